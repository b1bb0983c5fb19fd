"""What goes wrong inside llama.cpp when a KV cache grows, each with the line that prevents it and the run that sees it.

A trap's name says what goes wrong without that line. `broken` takes the line out; `run` passes as the tree is and must
fail, in the named way, when it is out. Traps that this design cannot fall into are in impossible.py.
"""

from __future__ import annotations

from tests.e2e.traps.base import Trap
from tests.e2e.traps.cells import CELLS, ROWS
from tests.e2e.traps.copying import COPYING
from tests.e2e.traps.device import DEVICE
from tests.e2e.traps.growing import GROWING
from tests.e2e.traps.in_place import IN_PLACE
from tests.e2e.traps.no_memory import NO_MEMORY
from tests.e2e.traps.stale import STALE
from tests.e2e.traps.state import STATE
from tests.e2e.traps.strides import STRIDES
from tests.e2e.traps.types import TYPES

TRAPS: tuple[Trap, ...] = (
    *GROWING,
    *STALE,
    *ROWS,
    *CELLS,
    *STATE,
    *STRIDES,
    *COPYING,
    *NO_MEMORY,
    *IN_PLACE,
    *DEVICE,
    *TYPES,
)
