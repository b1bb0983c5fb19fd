"""`kvtool status` (placeholder while the core lands)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvtool.env import Env
from kvtool.result import Result

if TYPE_CHECKING:
    from kvtool.console import Console


@dataclass(frozen=True)
class Status(Result):
    command: ClassVar[str] = "status"
    root: str

    def render(self, console: Console) -> None:
        console.line(self.root)


def command(env: Env) -> Status:
    """Say where the project is."""
    return Status(str(env.project.root))
