"""Define the base of all results of commands.

A result is data that cli.py prints as a table for people, or as one JSON document.
"""

import dataclasses
import enum
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast, get_args, get_origin, get_type_hints

from kvtool.console import Console
from kvtool.errors import KvtoolError

_T = TypeVar("_T")
_PLAIN: Mapping[Any, Any] = {str: str, int: int, float: (int, float)}


class PatchOutcome(enum.StrEnum):
    """Name the outcomes of one patch."""

    APPLIED = "applied"
    MERGED = "merged"  # upstream has the patch already
    EMPTY = "empty"  # the patch changes nothing
    CONFLICT = "conflict"
    BLOCKED = "blocked"  # the patch needs another patch that has a conflict
    SKIPPED = "skipped"  # from/until leave the patch out on this upstream, or the user left it out
    DROPPED = "dropped"  # the user removed the patch from the series


class CheckOutcome(enum.StrEnum):
    """Name the outcomes of one check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclasses.dataclass(frozen=True)
class FileChange:
    """Report a file of the project that was written."""

    path: str
    action: str  # "add", "change" or "remove"


def to_plain(value: Any) -> Any:
    """Convert a value to types of JSON.

    A dataclass becomes an object with its fields in order, a path or an enum a string.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (Path, enum.StrEnum)):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain(v) for v in value]
    return value


def from_plain(kind: type[_T], data: Any) -> _T:
    """Convert types of JSON back to `kind`. Raise KeyError, TypeError or ValueError if they do not match."""
    return cast(_T, _from_plain(kind, data))


def _from_plain(kind: Any, data: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(data, Mapping):
            raise TypeError(f"{data!r} has no names and values")
        hints, made = get_type_hints(kind), dict[str, Any]()
        for field in dataclasses.fields(kind):
            needed = field.default is field.default_factory is dataclasses.MISSING
            if needed or field.name in data:
                try:
                    made[field.name] = _from_plain(hints[field.name], data[field.name])
                except TypeError as err:
                    raise TypeError(f"{field.name}: {err}") from err
        return kind(**made)  # type: ignore[operator]
    if get_origin(kind) is tuple:
        first, *others = get_args(kind)
        kinds = itertools.repeat(first) if others == [...] else (first, *others)
        if isinstance(data, str):
            raise TypeError(f"{data!r} is no list")
        return tuple(_from_plain(each, value) for each, value in zip(kinds, data, strict=False))
    if kind in _PLAIN and not isinstance(data, _PLAIN[kind]):
        raise TypeError(f"{data!r} is no {'text' if kind is str else 'number'}")
    return kind(data) if isinstance(kind, enum.EnumType) else data


def parse_last_json_line(text: str) -> dict[str, Any] | None:
    """Parse the last line that is not empty, in which kv-check and kv-bench print their results.

    Returns None if it is not a JSON object.
    """
    try:
        data = json.loads(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return data if isinstance(data, dict) else None


@dataclasses.dataclass(frozen=True)
class Result:
    """Define the base of every command's result: a frozen dataclass with the name of the command and render().

    A subclass whose data can contain a failure overrides `failure`. An example is a rebase that stopped at a conflict:
    the result has the outcome of each patch, and an error. kvtool then prints the data, prints the error, and exits
    with the exit code of the error.

    `error` is a problem in addition to the result, such as a report that cannot be written. By default, `failure`
    returns `error`. A subclass can return another, worse failure. Then the JSON document has the worse failure as
    "error", and the text of `error` as "unwritten".
    """

    command: ClassVar[str] = ""
    error: KvtoolError | None = dataclasses.field(default=None, kw_only=True)

    def __init_subclass__(cls, *, command: str = "") -> None:
        cls.command = command or cls.command

    @property
    def failure(self) -> KvtoolError | None:
        """Return the error of this result, None if there is none."""
        return self.error

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document: "command", "ok", the fields in their order, and "error" if there is a failure."""
        failure = self.failure
        doc = {"command": self.command, "ok": failure is None, **to_plain(self)}
        del doc["error"]
        if failure is not None:
            doc["error"] = failure.to_json()
        if self.error not in (None, failure):
            doc["unwritten"] = str(self.error)
        return doc

    def render(self, console: Console) -> None:
        """Print the result for people, with console.line() and console.table()."""
        raise NotImplementedError
