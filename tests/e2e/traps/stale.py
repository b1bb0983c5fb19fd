"""Graphs that were built before a growth."""

from __future__ import annotations

from tests.e2e.broken import Edit
from tests.e2e.traps.base import DRAFT, DYNAMIC, Trap, copies

STALE = (
    Trap(
        "a graph that was built before a growth runs again, on freed tensors",
        (
            Edit(DYNAMIC, "reset_graphs();", "", after="::set_moved("),
            Edit(DYNAMIC, "this->is_larger = this->is_larger || is_larger;", ""),
        ),
        copies("llama-dense", "state-self"),
        "state-self",
    ),
    Trap(
        "a draft that shares cells is not told that they moved, and runs its old graph again",
        Edit(DYNAMIC, "readers.push_back(reader);", ""),
        copies(DRAFT, "draft"),
        "draft",
    ),
)
