"""Changes to the files of a project, and a preview of the project with them. Writes files, runs no git."""

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvtool.project import Project
from kvtool.series.series import load_patches, new_files


@dataclass(frozen=True)
class Change:
    """A file of the project that is to say something else. action: add | change | remove; content None: remove."""

    path: str
    action: str
    content: bytes | None
    executable: bool = False


def put_file(path: Path, change: Change) -> None:
    """Write or remove one file, atomically."""
    if change.content is None:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # folders that hold nothing any more go too
            for parent in path.parents:
                parent.rmdir()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.kvtool-new")  # hidden, so that a kill here leaves nothing that is read
    fresh.write_bytes(change.content)
    fresh.chmod(0o755 if change.executable else 0o644)
    fresh.replace(path)


def preview_project(project: Project, todo: Sequence[Change], place: Path) -> Project:
    """The project as it will be, put together in an empty directory."""
    patches = (project.patches / patch.file for patch in load_patches(project))
    for source in (project.series, project.lock, *patches, *(file.source for file in new_files(project.cpp))):
        target = place / source.relative_to(project.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    for change in todo:
        put_file(place / change.path, change)
    return replace(project, root=place)
