"""List the known mistakes in llama.cpp's growing KV cache, called traps.

Each trap has the line of code that prevents the mistake, and a run of a program that fails without this line.

The name of a trap describes the mistake that would happen without the line. `broken` removes the line. `run` must pass
with the line, and must fail without it as described. impossible.py lists mistakes that this design excludes.
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
