"""List traps (known mistakes) with graphs that were built before a growth."""

from __future__ import annotations

from tests.e2e.broken import Edit
from tests.e2e.traps.base import DRAFT, DYNAMIC, Trap, copies

STALE = (
    Trap(
        "a graph that was built before a growth runs again, on freed tensors",
        (
            Edit(DYNAMIC, "compute.drop_graphs();", ""),
            Edit(DYNAMIC, "compute.set_too_small(compute.is_too_small() || too_small);", ""),
        ),
        copies("llama-dense", "state-self"),
        "state-self",
    ),
    Trap(
        "a draft that shares cells is not notified of their move, and runs its old graph again",
        Edit(DYNAMIC, "readers.push_back(reader);", ""),
        copies(DRAFT, "draft"),
        "draft",
    ),
)
