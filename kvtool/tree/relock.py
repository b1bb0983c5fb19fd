"""The end of a rebase: patches/, series.toml and upstream.lock say the new upstream, the tree is it. All or nothing.

What will be written, and what was there, is first put aside (rebase-stage/ in the tree's .git/kvtool); then the journal
says "writing"; then the tree moves, and the project's files follow, the lock last. A rebase that was killed on the way
can be completed or taken back.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomlkit

from kvtool.console import Console
from kvtool.errors import DiskError, KvtoolError, TreeError
from kvtool.gitcmd import Git
from kvtool.project import Project
from kvtool.result import PatchOutcome
from kvtool.tree.flowback import Change, as_mail, digest_of, put_file, rehearse, says_the_same
from kvtool.tree.fold import FoldedPatch
from kvtool.tree.rebasing import Journal, journal_path, write_journal
from kvtool.tree.rehearse import Based, Rehearsal
from kvtool.tree.series import load_patches, read_text
from kvtool.tree.switch import finish_interrupted, move, switch
from kvtool.tree.worktree import Applied, branch_of, kvtool_dir, read_applied, write_applied, write_json
from kvtool.upstream.lock import Lock
from kvtool.upstream.pin import pin


@dataclass(frozen=True)
class Written:
    """What a rebase changed. previous: the tag before; files: (path in the project, change | remove)."""

    applied: Applied
    previous: str
    files: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Plan:
    """What is to be written, and what the tree becomes."""

    changes: tuple[Change, ...]
    applied: Applied


def plan(project: Project, git: Git, lock: Lock, new: Based, done: Rehearsal, scratch: Path) -> Plan:
    """Everything that has to change for the project to say the new upstream; tried in scratch before.

    A patch file whose bytes give the same commit on the new upstream stays as it is. A patch that has no place there
    (merged, empty, left out) gets `until`, or `from` when the new upstream is older than the locked one.
    """
    (scratch / "same").mkdir()
    found = _patch_files(git, new, done, scratch / "same")
    text = read_text(project.series)
    if (fresh := _series_text(project, text, lock, done)) != text:
        found.append(Change("patches/series.toml", "change", fresh.encode()))
    text = read_text(project.lock)
    if (fresh := pin(text, lock, done.tag)) != text:
        found.append(Change("patches/upstream.lock", "change", fresh.encode()))
    order = {"patches/series.toml": 1, "patches/upstream.lock": 2}
    found.sort(key=lambda change: 3 if change.content is None else order.get(change.path, 0))
    (scratch / "try").mkdir()
    series, replayed = rehearse(project, git, lock, new.series, new.commit, tuple(found), scratch / "try")
    if not replayed.complete or replayed.tree != done.tree:
        raise KvtoolError("the rebased series does not give the tree", why="this is a bug; nothing was written")
    upstream = new.series.upstream
    applied = Applied(upstream.tag, upstream.tree, series.digest, new.commit, replayed.head, False, replayed.reports)
    return Plan(tuple(found), applied)


def _patch_files(git: Git, new: Based, done: Rehearsal, scratch: Path) -> list[Change]:
    steps = {step.patch.id: step for step in new.series.steps}
    found = []
    for report in done.reports:
        step = steps[report.id]
        path = f"patches/{step.patch.file}"
        if report.outcome == PatchOutcome.DROPPED:
            found.append(Change(path, "remove", None))
        elif report.commit:
            parent = git.line("rev-parse", f"{report.commit}^")
            if not says_the_same(git, step, FoldedPatch(report.id, step.mail.subject, report.commit, parent), scratch):
                found.append(Change(path, "change", as_mail(git, report.commit)))
    return found


def _series_text(project: Project, text: str, lock: Lock, done: Rehearsal) -> str:
    """series.toml without the dropped patches, and with a limit on those that have no place on the new upstream."""
    document = tomlkit.parse(text)
    entries: Any = document.get("patch", [])
    wanted = {p.id for p in load_patches(project) if p.wanted(lock, lock.upstream(done.tag))}
    key, tag = _limit(lock, done.tag)
    for report in done.reports:
        at = next(number for number, entry in enumerate(entries) if entry["id"] == report.id)
        if report.outcome == PatchOutcome.DROPPED:
            del entries[at]
        elif not report.commit and report.id in wanted:
            entries[at][key] = tag
    return tomlkit.dumps(document)


def _limit(lock: Lock, tag: str) -> tuple[str, str]:
    """The key and value that exclude a tag: `until` it, or `from` the one after it when it is older than the lock's."""
    upstream = lock.upstream(tag)
    if upstream.order > lock.upstream().order:
        return "until", tag
    return "from", next(u.tag for u in lock.upstreams.values() if u.order == upstream.order + 1)


def write_range_diff(tree: Path, git: Git, old_tag: str, done: Rehearsal) -> Path:
    """Keep how each patch changed from the old upstream to the new one; the file."""
    ranges = (f"{done.locked.base}..{done.locked.head}", f"{done.base}..{done.head}")
    text = git.run("range-diff", "--no-color", "--no-ext-diff", *ranges).stdout
    path = range_diff_path(tree, old_tag, done.tag)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return path


def range_diff_path(tree: Path, old_tag: str, new_tag: str) -> Path:
    """Where the range-diff of a rebase is kept."""
    return kvtool_dir(tree) / "range-diff" / f"{old_tag}..{new_tag}.txt"


# --- the transaction ---------------------------------------------------------------------------------------------


def _stage(tree: Path) -> Path:
    return kvtool_dir(tree) / "rebase-stage"


def write(project: Project, git: Git, console: Console, journal: Journal, todo: Plan) -> Written:
    """Change tree and project. On failure all is as before, unless a person has resolved something: then it waits for
    `kvtool rebase --continue`."""
    _put_aside(project, git, todo)
    journal = write_journal(project.tree, replace(journal, phase="writing", to=todo.applied.head))
    try:
        return carry_out(project, git, console)
    except BaseException:
        if not journal.resolved:
            take_back(project, git, console, journal)
        raise


def _put_aside(project: Project, git: Git, todo: Plan) -> None:
    fresh = kvtool_dir(project.tree) / "rebase-stage.new"
    for left in (fresh, _stage(project.tree)):
        shutil.rmtree(left, ignore_errors=True)
    fresh.mkdir(parents=True)
    files = []
    for number, change in enumerate(todo.changes):
        path = project.root / change.path
        old = path.read_bytes() if path.is_file() else None
        for side, content in (("old", old), ("new", change.content)):
            if content is not None:
                (fresh / f"{number}.{side}").write_bytes(content)
        files.append({"path": change.path, "old": old is not None, "new": change.content is not None})
    before = read_applied(project.tree)
    assert before is not None
    branch = branch_of(todo.applied.tag)
    data = {
        "files": files,
        "applied": asdict(todo.applied),
        "before": asdict(before),
        "branch": git.resolve(f"refs/heads/{branch}") or "",
    }
    write_json(fresh / "plan.json", data)
    fresh.rename(_stage(project.tree))


def _plan_of(tree: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((_stage(tree) / "plan.json").read_text(encoding="utf-8"))
    return data


def carry_out(project: Project, git: Git, console: Console) -> Written:
    """Complete what is staged, from wherever it was left."""
    tree = project.tree
    data = _plan_of(tree)
    _refuse_edited(project, data)
    applied = Applied.from_json(data["applied"])
    finish_interrupted(tree, git)
    if git.resolve("HEAD^{commit}") != applied.head or git.line("rev-parse", "--abbrev-ref", "HEAD") == "HEAD":
        move(tree, git, console, git.line("rev-parse", "HEAD"), applied)
    else:
        write_applied(tree, applied)
    _put_all(project, data, "new")
    _clear(tree)
    files = tuple((str(file["path"]), "change" if file["new"] else "remove") for file in data["files"])
    return Written(applied, str(data["before"]["tag"]), files)


def take_back(project: Project, git: Git, console: Console, journal: Journal) -> None:
    """Undo what was staged: the project's files and the tree are as before the rebase."""
    tree = project.tree
    data = _plan_of(tree)
    _refuse_edited(project, data)
    finish_interrupted(tree, git)
    _put_all(project, data, "old")
    if git.resolve("HEAD^{commit}") != journal.head or git.line("rev-parse", "--abbrev-ref", "HEAD") != (
        journal.branch or "HEAD"
    ):
        switch(git, console, *((journal.branch,) if journal.branch else ("--detach", journal.head)))
    branch = f"refs/heads/{branch_of(journal.tag)}"
    if branch != f"refs/heads/{journal.branch}":
        git.run("update-ref", *((branch, data["branch"]) if data["branch"] else ("-d", branch)), check=False)
    write_applied(tree, Applied.from_json(data["before"]))
    _clear(tree)


def _clear(tree: Path) -> None:
    journal_path(tree).unlink()
    shutil.rmtree(_stage(tree), ignore_errors=True)


def _sides(project: Project, number: int, file: Mapping[str, Any]) -> dict[str, Path | None]:
    return {side: _stage(project.tree) / f"{number}.{side}" if file[side] else None for side in ("old", "new")}


def _refuse_edited(project: Project, data: dict[str, Any]) -> None:
    for number, file in enumerate(data["files"]):
        known = {digest_of(path) if path else None for path in _sides(project, number, file).values()}
        if digest_of(project.root / file["path"]) not in known:
            raise TreeError(
                f"a kvtool rebase was interrupted, and {file['path']} was edited since",
                next_step=f"put it back with git (git checkout {file['path']}) or move it away, then go on: "
                "kvtool rebase --continue; or give it up: kvtool rebase --abort",
            )


def _put_all(project: Project, data: dict[str, Any], side: str) -> None:
    """Write the project's files, in the staged order or (going back) in the reverse."""
    files = list(enumerate(data["files"]))
    for left in project.patches.glob(".*.kvtool-new"):
        left.unlink()
    try:
        for number, file in files if side == "new" else reversed(files):
            source, path = _sides(project, number, file)[side], project.root / file["path"]
            if digest_of(path) != (digest_of(source) if source else None):
                put_file(path, Change(file["path"], side, source.read_bytes() if source else None))
    except OSError as err:
        raise DiskError(
            "cannot write the project", why=str(err), next_step="kvtool rebase --continue, or kvtool rebase --abort"
        ) from err
