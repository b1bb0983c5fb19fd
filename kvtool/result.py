"""What commands return: frozen data that the edge renders, as a table for people or as one JSON document."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvtool.errors import KvtoolError

if TYPE_CHECKING:
    from kvtool.console import Console


class PatchOutcome(enum.StrEnum):
    """What became of one patch."""

    APPLIED = "applied"
    MERGED = "merged"  # upstream has it already
    EMPTY = "empty"  # changes nothing
    CONFLICT = "conflict"
    BLOCKED = "blocked"  # not tried on its own terms: it needs a patch that conflicts
    SKIPPED = "skipped"  # from/until exclude this upstream, or it was left out by name
    DROPPED = "dropped"  # taken out of the series by name


class CheckOutcome(enum.StrEnum):
    """What became of one check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclasses.dataclass(frozen=True)
class FileChange:
    """A file of the project that was written. action: add | change | remove."""

    path: str
    action: str


def plain(value: Any) -> Any:
    """A value as JSON types: dataclasses become objects (in field order), paths and enums strings, tuples lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, KvtoolError):
        return value.to_json()
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    return value


@dataclasses.dataclass(frozen=True)
class Result:
    """Base of every command's result. Subclass as a frozen dataclass, set `command`, implement render().

    A result that carries a failure (a conflict with the outcome of each patch, a failed check with its table) overrides
    `failure`: the data is rendered, then the error, and its exit code is the program's.
    """

    command: ClassVar[str] = ""

    @property
    def failure(self) -> KvtoolError | None:
        """The error this result amounts to, or None."""
        return None

    def to_json(self) -> dict[str, Any]:
        """{"command": ..., "ok": ..., then the fields in order, "error": {...} only when there is one}."""
        failure = self.failure
        doc = {"command": self.command, "ok": failure is None, **plain(self)}
        if failure is not None:
            doc["error"] = failure.to_json()
        return doc

    def render(self, console: Console) -> None:
        """Say it to a person, through console.line() and console.table()."""
        raise NotImplementedError
