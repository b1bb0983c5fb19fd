"""What cli.py hands to every command."""

import functools
from pathlib import Path

from kvtool.console import Console
from kvtool.project import Project, find_project


class Env:
    """The console, and the project (found on first use; raises UsageError when there is none)."""

    def __init__(self, console: Console, project: Path | None = None, tree: Path | None = None) -> None:
        self.console = console
        self._project, self._tree = project, tree

    @functools.cached_property
    def project(self) -> Project:
        return find_project(self._project, self._tree)
