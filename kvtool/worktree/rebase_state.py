"""A rebase that is under way in a patched tree: its state, stopping for a person, going on, giving up.

The journal (rebase.json) says what was decided so far and where the checkout is on its way to; it is written before
the checkout moves. The patches that were moved need no state: moving them again gives the same commits.

    stopping   the checkout goes from `at` to `to`, where `patch` needs a person
    stopped    it is there; the person works
    taking     what the person did is being taken in
    writing    every patch has its place: the tree and the project are being changed (transaction.py)
    aborting   the checkout goes back

Nobody's edits are thrown away: before the checkout moves on or back, what it holds becomes a commit, kept by a ref.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from kvtool.console import Console
from kvtool.errors import ConflictError, TreeError
from kvtool.gitcmd import Git
from kvtool.replay.merge import parse_unmerged
from kvtool.replay.rebase_plan import Choices, ConflictStop, Rehearsal, Resolution
from kvtool.worktree.checkout import await_git, put_back, reject_untracked, run_checkout
from kvtool.worktree.status import kvtool_dir, read_journal, write_json

KEPT_REFS = "refs/kvtool/kept"
_CONFLICT = ("-c", "rerere.enabled=true", "-c", "rerere.autoUpdate=false")
_MARKER = re.compile(rb"^(<{7}|\|{7}|>{7})( |$)", re.MULTILINE)


@dataclass(frozen=True)
class RebaseState:
    """rebase.json. head, branch: where the tree was ("" branch: detached); digest: the series' then; mirror: as given;
    at, to: commits."""

    phase: str
    tag: str
    tree: str
    date: str
    head: str
    branch: str
    digest: str
    mirror: str
    at: str
    to: str = ""
    stop: ConflictStop = field(default_factory=ConflictStop)
    choices: Choices = field(default_factory=Choices)

    @property
    def back(self) -> tuple[str, ...]:
        """What git checkout is told to bring the tree to where it was."""
        return (self.branch,) if self.branch else ("--detach", self.head)


def state_path(tree: Path) -> Path:
    return kvtool_dir(tree) / "rebase.json"


def read_state(tree: Path) -> RebaseState | None:
    """The rebase that is under way, or None. TreeError when the journal cannot be understood."""
    return read_journal(state_path(tree), RebaseState, "kvtool status")


def write_state(tree: Path, state: RebaseState) -> RebaseState:
    write_json(state_path(tree), asdict(state), private=True)  # a mirror can have a login in it
    return state


def stop_at(git: Git, console: Console, state: RebaseState, stop: ConflictStop) -> RebaseState:
    """Bring the checkout to the patch that needs a person, with conflict markers where it meets upstream's lines."""
    to = stop.commit or stop.parent
    reject_untracked(git, state.at, to)
    if stop.origin:
        reject_untracked(git, f"{stop.origin}^", stop.origin)
    state = write_state(git.repo, replace(state, phase="stopping", to=to, stop=stop))
    run_checkout(git, console, "--detach", to)
    if stop.origin and not stop.commit:
        git.run(*_CONFLICT, "cherry-pick", "--no-commit", stop.origin, check=False)  # conflicts: that is what it is for
    return write_state(git.repo, replace(state, phase="stopped", at=to))


@contextlib.contextmanager
def resolving(git: Git, state: RebaseState) -> Iterator[RebaseState]:
    """Around whatever touches a tree that waits for a person, so that a lock which a kill leaves is known as ours."""
    if state.phase == "taking":
        await_git(git.repo)
    state = write_state(git.repo, replace(state, phase="taking"))
    try:
        yield replace(state, phase="stopped")
    finally:
        write_state(git.repo, replace(state, phase="stopped"))


def accept_resolution(git: Git, state: RebaseState) -> RebaseState:
    """The person is done: what the tree holds is the resolution of state.stop. The checkout is clean afterwards.

    ConflictError for what is not resolved, TreeError when HEAD is somewhere else.
    """
    head, parent = git.resolve("HEAD^{commit}"), state.stop.parent
    if head is None or not git.ok("merge-base", "--is-ancestor", parent, head):
        raise TreeError(
            f"{git.repo} is not where the rebase stopped",
            why=f"HEAD does not come from {parent[:10]}",
            next_step=f"git -C {git.repo} checkout --detach {parent[:10]} and resolve there, or kvtool rebase --abort",
        )
    if marked := _files_with_markers(git, parent):
        raise ConflictError(
            f"patch {state.stop.id!r} is not resolved yet",
            why=f"conflict markers are left in {', '.join(marked)}",
            next_step="edit them, then kvtool rebase --continue",
        )
    if left := _untouched_conflicts(git):
        raise ConflictError(
            f"patch {state.stop.id!r} is not resolved yet",
            why=f"one side has no such file, or it is binary, and it is as git left it: {', '.join(left)}",
            next_step=f"say what is right: git -C {git.repo} add FILE, or rm FILE; then kvtool rebase --continue",
        )
    record_rerere(git)
    kept = stash_as_commit(git)
    made = Resolution(state.stop.id, parent, git.line("rev-parse", f"{kept}^{{tree}}"))
    resolved = (*(known for known in state.choices.resolved if known.patch != made.patch), made)
    return replace(state, at=kept, choices=replace(state.choices, resolved=resolved))


def record_rerere(git: Git) -> None:
    """Let git record how the conflicts that have no markers any more were resolved (rerere)."""
    git.run(*_CONFLICT, "rerere", check=False)


def stash_as_commit(git: Git) -> str:
    """Make what the checkout holds (untracked files aside) a commit and HEAD, so that it is clean; keep it by a ref."""
    lock = git.repo / ".git" / "index.lock"
    if lock.exists():
        raise TreeError(
            f"{git.repo}: another git is at work there, or was killed",
            why=f"{lock} exists",
            next_step=f"if none is running: rm {lock}, and run kvtool again",
        )
    git.run("add", "--update", ":/")
    content = git.line("write-tree")
    head = git.line("rev-parse", "HEAD")
    if content != git.resolve("HEAD^{tree}"):
        head = git.line("commit-tree", content, "-p", head, input="kvtool: what a rebase left in the tree\n")
        git.run("update-ref", "--no-deref", "-m", "kvtool rebase", "HEAD", head)
    git.run("update-ref", _stash_ref_of(head), head)  # one each: the next must not let go of this one
    for left in ("MERGE_MSG", "AUTO_MERGE", "CHERRY_PICK_HEAD"):
        (git.repo / ".git" / left).unlink(missing_ok=True)
    return head


def _stash_ref_of(commit: str) -> str:
    return f"{KEPT_REFS}/{commit[:12]}"


def stash_ref(git: Git, state: RebaseState, at: str) -> str:
    """The ref by which keep() keeps what the checkout, now at `at`, held since `state`; "" where it held nothing."""
    ref = _stash_ref_of(at)
    return ref if at != state.at and git.resolve(ref) else ""


def rerere_resolved(git: Git) -> tuple[str, ...]:
    """The conflicts that rerere resolved as they were resolved before: unmerged, and without markers."""
    there = {name for name in _unmerged(git) if (git.repo / name).is_file() and not _count_markers(git.repo / name)}
    return tuple(sorted(there - set(_untouched_conflicts(git))))


def _files_with_markers(git: Git, parent: str) -> list[str]:
    """Files of the patch that still hold conflict markers which are not upstream's own."""
    names = {*git.entries("diff", "--name-only", "-z", parent), *_unmerged(git)}
    theirs = git.blobs(*(f"{parent}:{name}" for name in names))
    counts = {name: len(_MARKER.findall(text)) for name, (_, text) in zip(names, theirs, strict=True)}
    return sorted(name for name, count in counts.items() if _count_markers(git.repo / name) > count)


def _unmerged(git: Git) -> dict[str, dict[str, tuple[str, str]]]:
    return parse_unmerged(git.entries("ls-files", "-u", "-z"))


def _untouched_conflicts(git: Git) -> list[str]:
    """Conflicts that git can put no markers into (one side has no such file, or it is binary), as git left them."""
    found: list[str] = []
    for name, stages in _unmerged(git).items():
        if not (git.repo / name).is_file():
            continue
        texts = {number: git.raw("cat-file", "blob", blob) for number, (_, blob) in stages.items()}
        sides = [texts[number] for number in "23" if number in texts]
        told = git.line("check-attr", "merge", "--", name).endswith((": unset", ": binary"))
        unmarked = told or len(sides) == 1 or any(b"\0" in text for text in texts.values())
        if unmarked and sides and (git.repo / name).read_bytes() == sides[0]:
            found.append(name)
    return found


def _count_markers(file: Path) -> int:
    return len(_MARKER.findall(file.read_bytes())) if file.is_file() and not file.is_symlink() else 0


def recover(git: Git, state: RebaseState) -> RebaseState:
    """After a kill while the checkout was on its way: put it back to where it came from, cleanly.

    TreeError when files were edited since that the move did not write.
    """
    await_git(git.repo)
    head, dirty = git.resolve("HEAD^{commit}"), git.dirty()
    if head == state.at:
        put_back(git, state.at, state.to, dirty, "rebase")
    elif head == state.to and dirty:  # it was there, and the conflict was being written
        return replace(state, at=stash_as_commit(git))
    elif head != state.to:
        raise TreeError(
            f"{git.repo}: a kvtool rebase was interrupted, and HEAD was moved since",
            why=f"it is neither at {state.at[:10]} nor at {state.to[:10]}",
            next_step=f"git -C {git.repo} checkout --detach {state.at[:10]} && kvtool rebase --abort",
        )
    return replace(state, at=head or state.at)


def abort(git: Git, console: Console, state: RebaseState) -> str:
    """Bring the checkout back to where it was, exactly. The ref that keeps what it held, "" where it held nothing."""
    if state.phase in ("stopped", "taking"):
        with resolving(git, state):
            git.run(*_CONFLICT, "rerere", "clear", check=False)
            at = stash_as_commit(git)
    else:
        at = recover(git, state).at
    reject_untracked(git, at, state.head)
    write_state(git.repo, replace(state, phase="aborting", at=at, to=state.head))
    run_checkout(git, console, *state.back)
    if git.resolve("HEAD^{commit}") != state.head:
        raise TreeError(
            f"{git.repo}: branch {state.branch} moved during the rebase",
            why=f"it was at {state.head[:10]}",
            next_step=f"git -C {git.repo} log {state.branch}; then remove {state_path(git.repo)}",
        )
    state_path(git.repo).unlink()
    return stash_ref(git, state, at)


# --- the report of a rebase ------------------------------------------------------------------------------------


def write_range_diff(tree: Path, git: Git, old_tag: str, done: Rehearsal) -> None:
    """Keep how each patch changed from the old upstream to the new one."""
    ranges = (f"{done.locked.base}..{done.locked.head}", f"{done.base}..{done.head}")
    empty = done.locked.base == done.locked.head or done.base == done.head  # no range for git
    text = b"" if empty else git.raw("range-diff", "--no-color", "--no-ext-diff", *ranges)
    path = range_diff_path(tree, old_tag, done.tag)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)


def range_diff_path(tree: Path, old_tag: str, new_tag: str) -> Path:
    return kvtool_dir(tree) / "range-diff" / f"{old_tag}..{new_tag}.txt"
