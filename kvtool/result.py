"""What commands return: frozen data that the edge renders, as a table for people or as one JSON document."""

import dataclasses
import enum
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast, get_args, get_origin, get_type_hints

from kvtool.errors import KvtoolError

if TYPE_CHECKING:
    from kvtool.console import Console


_T = TypeVar("_T")
_PLAIN: Mapping[Any, Any] = {str: str, int: int, float: (int, float)}


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
    if isinstance(value, (Path, enum.StrEnum)):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    return value


def read(kind: type[_T], data: Any) -> _T:
    """The inverse of plain(): KeyError, TypeError or ValueError when the JSON types are something else."""
    return cast(_T, _read(kind, data))


def _read(kind: Any, data: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(data, Mapping):
            raise TypeError(f"{data!r} has no names and values")
        hints, made = get_type_hints(kind), dict[str, Any]()
        for field in dataclasses.fields(kind):
            needed = field.default is field.default_factory is dataclasses.MISSING
            if needed or field.name in data:
                try:
                    made[field.name] = _read(hints[field.name], data[field.name])
                except TypeError as err:
                    raise TypeError(f"{field.name}: {err}") from err
        return kind(**made)  # type: ignore[operator]
    if get_origin(kind) is tuple:
        first, *others = get_args(kind)
        kinds = itertools.repeat(first) if others == [...] else (first, *others)
        if isinstance(data, str):
            raise TypeError(f"{data!r} is no list")
        return tuple(_read(each, value) for each, value in zip(kinds, data, strict=False))
    if kind in _PLAIN and not isinstance(data, _PLAIN[kind]):
        raise TypeError(f"{data!r} is no {'text' if kind is str else 'number'}")
    return kind(data) if isinstance(kind, enum.EnumType) else data


def last_document(text: str) -> dict[str, Any] | None:
    """The JSON object in the last line that is not empty, None when it is none: what kv-check and kv-bench answer."""
    try:
        data = json.loads(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return data if isinstance(data, dict) else None


@dataclasses.dataclass(frozen=True)
class Result:
    """Base of every command's result. Subclass as a frozen dataclass, name the command, implement render().

    A result that carries a failure (a conflict with the outcome of each patch, a failed check with its table) overrides
    `failure`: the data is rendered, then the error, and its exit code is the program's.

    error: what went wrong on the way to it: a report that cannot be written, a step of the canary. It is the failure
    unless there is a worse one, and is told beside that then ("unwritten" in the document).
    """

    command: ClassVar[str] = ""
    error: KvtoolError | None = dataclasses.field(default=None, kw_only=True)

    def __init_subclass__(cls, *, command: str = "") -> None:
        cls.command = command or cls.command

    @property
    def failure(self) -> KvtoolError | None:
        """The error this result amounts to, or None."""
        return self.error

    def to_json(self) -> dict[str, Any]:
        """{"command": ..., "ok": ..., then the fields in order, "error": {...} only when there is one}."""
        failure = self.failure
        doc = {"command": self.command, "ok": failure is None, **plain(self)}
        del doc["error"]
        if failure is not None:
            doc["error"] = failure.to_json()
        if self.error not in (None, failure):
            doc["unwritten"] = str(self.error)
        return doc

    def render(self, console: "Console") -> None:
        """Say it to a person, through console.line() and console.table()."""
        raise NotImplementedError
