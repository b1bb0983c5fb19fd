"""Edit the project or the patched tree as a user does, and list the files that an export wrote."""

from __future__ import annotations

from tests.conftest import Tiny, git


def change_series(project: Tiny) -> None:
    (project.root / "cpp/src/new.cpp").write_text("int newer;\n")


def edit(project: Tiny, path: str, old: str, new: str, message: str) -> None:
    """Replace a text in a file of the patched tree, and commit."""
    file = project.tree / path
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    git(project.tree, "commit", "-qam", message)


def files(ran) -> dict[str, str]:
    return {file["path"]: file["action"] for file in ran.json["files"]}
