"""Make upstream tags and resolve conflicts, for the tests of kvtool rebase."""

from __future__ import annotations

import tomllib
from typing import Any

from tests.conftest import Tiny, git


def release(project: Tiny, tag: str, *edits: tuple[str, str, str], lock: bool = True) -> str:
    """Make a new upstream tag with the edits (path, old, new) on top of the last tag.

    lock: also add the tag to upstream.lock
    """
    for path, old, new in edits:
        file = project.upstream / path
        text = file.read_text()
        assert text.count(old) == 1, (path, old)
        file.write_text(text.replace(old, new))
    git(project.upstream, "commit", "-q", "--allow-empty", "-am", f"upstream: {tag}")
    git(project.upstream, "tag", tag)
    tree = git(project.upstream, "rev-parse", f"{tag}^{{tree}}")
    if lock:
        with (project.root / "patches/upstream.lock").open("a") as lines:
            lines.write(
                f'\n# about {tag}\n[[upstream]]\ntag = "{tag}"\ndate = "2026-02-01"\ntree = "{tree}"\nsources = []\n'
            )
    return tree


def current(project: Tiny) -> str:
    return str(tomllib.loads((project.root / "patches/upstream.lock").read_text())["current"])


def outcomes(ran: Any) -> dict[str, str]:
    return {patch["id"]: patch["outcome"] for patch in ran.json["patches"]}


def everything(project: Tiny) -> dict[str, bytes]:
    """Return all files of the project and the commits of the tree's branches. The tree's .git is left out."""
    found = {
        str(p.relative_to(project.root)): p.read_bytes()
        for p in sorted(project.root.rglob("*"))
        if p.is_file() and ".git" not in p.relative_to(project.root).parts
    }
    heads = git(project.tree, "for-each-ref", "--format=%(refname) %(objectname)", "refs/heads")
    found["HEAD"] = f"{heads}\n{(project.tree / '.git/HEAD').read_text()}".encode()
    found["state"] = (project.state / "state.json").read_bytes()
    assert git(project.tree, "status", "--porcelain") == ""
    return found


ALL = {"flag": "applied", "use": "applied", "block": "applied", "more": "applied", "tail": "applied"}
BLOCK = ("src/a.cpp", "x + 44;\n", "x + 44;\n    one();\n    mid();\n    last();\n")


def resolve(project: Tiny, path: str, old: str, new: str) -> None:
    """Resolve a conflict as a user would: write upstream's file with `old` replaced by `new`."""
    upstream = git(project.tree, "show", f"HEAD:{path}", strip=False)
    assert upstream.count(old) == 1
    (project.tree / path).write_text(upstream.replace(old, new))


def finished(project: Tiny, kvtool: Any) -> None:
    """Assert that the rebase is complete: all files are for v3, and a second run changes nothing."""
    assert current(project) == "v3"
    assert kvtool("status", "--json").json["state"] == "clean"
    assert kvtool("export", "--check").code == 0
    again = kvtool("apply", "--tree", project.root / "again", "--json")
    assert again.json["head"] == git(project.tree, "rev-parse", "HEAD")
    left = {p.name for p in project.state.iterdir()} - {"state.json", "range-diff"}
    assert not left and not (project.tree / ".git/MERGE_MSG").exists()
