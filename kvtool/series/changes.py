"""Change the files of a project, and make a copy of a project with changes. Git is not run."""

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvtool.project import Project
from kvtool.series.series import load_patches, new_files


@dataclass(frozen=True)
class Change:
    """Describe a change of one file of the project."""

    path: str
    action: str  # "add", "change" or "remove"
    content: bytes | None  # None: remove the file
    executable: bool = False


def put_file(path: Path, change: Change) -> None:
    """Write or remove one file. It is written under a temporary name and renamed, so it is never incomplete."""
    if change.content is None:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # also remove folders that are empty now
            for parent in path.parents:
                parent.rmdir()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # a hidden name, which kvtool ignores if it is killed before the file is renamed
    fresh = path.with_name(f".{path.name}.kvtool-new")
    fresh.write_bytes(change.content)
    fresh.chmod(0o755 if change.executable else 0o644)
    fresh.replace(path)


def preview_project(project: Project, todo: Sequence[Change], place: Path) -> Project:
    """Copy the project with its changes into an empty folder. Return the project there."""
    patches = (project.patches / patch.file for patch in load_patches(project))
    for source in (project.series, project.lock, *patches, *(file.source for file in new_files(project.cpp))):
        target = place / source.relative_to(project.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    for change in todo:
        put_file(place / change.path, change)
    return replace(project, root=place)
