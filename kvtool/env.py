"""What cli.py hands to every command."""

import functools
from collections.abc import Callable

from kvtool.console import Console
from kvtool.project import Project


class Env:
    """The console, and the project: looked for on first use (UsageError when there is none)."""

    def __init__(self, console: Console, find: Callable[[], Project]) -> None:
        self.console, self._find = console, find

    @functools.cached_property
    def project(self) -> Project:
        return self._find()
