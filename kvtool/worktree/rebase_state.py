"""Keep the state of an unfinished rebase in a patched tree: stop for the user, accept a resolution, abort.

The journal (rebase.json) has the decisions of the user so far, and the commit to which the checkout moves. It is
written before the checkout moves. Moved patches are not recorded, because moving them again produces the same commits.
The phases are:

    stopping   the checkout is being moved from `at` to `to`, where the conflict is
    stopped    the user has to resolve the conflict
    taking     kvtool is reading the user's resolution
    writing    every patch applies, and the tree and the project are being changed (transaction.py)
    aborting   the checkout is being moved back

Edits of the user are not lost: before kvtool continues or aborts, it commits the files of the checkout, and a ref keeps
the commit.
"""

import contextlib
import hashlib
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from kvtool.console import Console
from kvtool.errors import ConflictError, TreeError
from kvtool.gitcmd import Git, scratch_repository
from kvtool.process import quote
from kvtool.replay.merge import SUBMODULE, merge_trees, parse_unmerged
from kvtool.replay.paths import patch_paths, read_tree
from kvtool.replay.rebase_plan import Choices, ConflictStop, Rehearsal, Resolution
from kvtool.worktree.checkout import await_git, put_back, reject_untracked, run_checkout
from kvtool.worktree.status import kvtool_dir, read_journal, write_json

KEPT_REFS = "refs/kvtool/kept"
_CONFLICT = ("-c", "rerere.enabled=true", "-c", "rerere.autoUpdate=false")
_SIZE = 7  # length of a conflict marker, unless a git attribute sets another one
_PROSE = (".md", ".rst", ".txt", ".adoc")  # in these files, a line of equal signs can be the underline of a heading


@dataclass(frozen=True)
class FileConflict:
    """Hold a file with a conflict, as git left it.

    size: the length of its conflict markers
    digest: the SHA-256 of the file; "" if git wrote no file
    filled: True if git rerere resolved it in the same way as an earlier conflict
    """

    path: str
    size: int = _SIZE
    digest: str = ""
    filled: bool = False


@dataclass(frozen=True)
class RebaseState:
    """Hold the content of rebase.json."""

    phase: str
    tag: str  # upstream tag to rebase onto
    tree: str  # id of that upstream's git tree
    date: str  # date of that upstream, as YYYY-MM-DD
    head: str  # id of the commit at HEAD before the rebase
    branch: str  # branch before the rebase, "" for a detached HEAD
    digest: str  # hash of the series before the rebase, see Series.digest
    mirror: str  # value of --mirror, unchanged from the command line
    at: str  # id of the commit where the checkout is
    to: str = ""  # id of the commit to which the checkout moves
    stop: ConflictStop = field(default_factory=ConflictStop)
    choices: Choices = field(default_factory=Choices)
    conflicts: tuple[FileConflict, ...] = ()  # conflicts at the patch where the rebase stopped, as git left them

    @property
    def checkout_args(self) -> tuple[str, ...]:
        """Return the arguments of git checkout that restore the branch or the commit from before the rebase."""
        return (self.branch,) if self.branch else ("--detach", self.head)


def state_path(tree: Path) -> Path:
    """Return the path of a tree's rebase.json."""
    return kvtool_dir(tree) / "rebase.json"


def read_state(tree: Path) -> RebaseState | None:
    """Return the unfinished rebase, None if there is none. Raise TreeError if rebase.json cannot be parsed."""
    return read_journal(state_path(tree), RebaseState, "kvtool status")


def write_state(tree: Path, state: RebaseState) -> RebaseState:
    """Write the state atomically, and return it."""
    # only the user may read the file, because the URL of a mirror can contain a password
    write_json(state_path(tree), asdict(state), private=True)
    return state


def stop_at(git: Git, console: Console, state: RebaseState, stop: ConflictStop) -> RebaseState:
    """Move the checkout to the patch that needs the user, and write conflict markers into its files."""
    to = stop.commit or stop.parent
    reject_untracked(git, state.at, to)
    if stop.origin:
        reject_untracked(git, f"{stop.origin}^", stop.origin)
    state = write_state(git.repo, replace(state, phase="stopping", to=to, stop=stop, conflicts=()))
    run_checkout(git, console, "--detach", to)
    if stop.origin and not stop.commit:
        # this fails with conflicts, as expected
        git.run(*_CONFLICT, "cherry-pick", "--no-commit", stop.origin, check=False)
        _complete_conflicts(git, stop)
    return write_state(git.repo, replace(state, phase="stopped", at=to, conflicts=_conflicts_now(git)))


@contextlib.contextmanager
def resolving(git: Git, state: RebaseState) -> Iterator[RebaseState]:
    """Set the phase "taking" while kvtool changes a stopped tree.

    If kvtool is killed in this phase, the next run of kvtool finds the phase "taking" in rebase.json. So the next run
    knows that the killed kvtool made the lock files in the tree's .git, and removes these lock files.
    """
    if state.phase == "taking":
        await_git(git.repo)
    state = write_state(git.repo, replace(state, phase="taking"))
    try:
        yield replace(state, phase="stopped")
    finally:
        write_state(git.repo, replace(state, phase="stopped"))


def accept_resolution(git: Git, state: RebaseState) -> RebaseState:
    """Commit the files of the tree as the resolution of state.stop.

    Raises ConflictError if a conflict is not resolved, and TreeError if HEAD is not based on the commit where the
    rebase stopped.
    """
    head, parent = git.resolve("HEAD^{commit}"), state.stop.parent
    if head is None or not git.ok("merge-base", "--is-ancestor", parent, head):
        raise TreeError(
            f"{git.repo} is not where the rebase stopped",
            why=f"HEAD is not based on {parent[:10]}",
            next_step=f"git -C {git.repo} checkout --detach {parent[:10]} and resolve there, or kvtool rebase --abort",
        )
    if marked := _files_with_markers(git, state):
        raise ConflictError(
            f"patch {state.stop.id!r} is not resolved yet",
            why=f"conflict markers are left in {', '.join(marked)}",
            next_step="edit them, then kvtool rebase --continue",
        )
    if modules := sorted(name for name, stages in _unmerged(git).items() if _is_submodule(stages)):
        raise ConflictError(
            f"patch {state.stop.id!r} is not resolved yet",
            why=f"the patch and upstream each name another commit of the submodule {', '.join(modules)}",
            next_step=f"name the right one: git -C {git.repo} update-index --cacheinfo 160000,COMMIT,{modules[0]}\n"
            "then kvtool rebase --continue",
        )
    if left := _untouched_conflicts(git, state):
        raise ConflictError(
            f"patch {state.stop.id!r} is not resolved yet",
            why=f"the file is binary or missing on one side, and still unresolved: {', '.join(left)}",
            next_step=f"keep the file with git -C {git.repo} add FILE, or remove it with git -C {git.repo} rm FILE; "
            "then kvtool rebase --continue",
        )
    record_rerere(git)
    kept = stash_as_commit(git)
    if extra := _own_new_files(git, state.stop, kept):
        raise ConflictError(
            f"the resolution of patch {state.stop.id!r} adds {', '.join(extra[:5])}",
            why="neither upstream nor the patch has such a file, and new files belong to cpp/",
            next_step=f"{quote(['git', '-C', git.repo, 'rm', '--cached', *extra[:5]])}\nthen kvtool rebase --continue; "
            "a file that you need becomes a file of cpp/ after the rebase",
        )
    made = Resolution(state.stop.id, parent, git.line("rev-parse", f"{kept}^{{tree}}"))
    resolved = (*(known for known in state.choices.resolved if known.patch != made.patch), made)
    return replace(state, at=kept, choices=replace(state.choices, resolved=resolved))


def _own_new_files(git: Git, stop: ConflictStop, resolved: str) -> list[str]:
    """Return the new files of a resolution that cpp/ would store: neither upstream nor the patch has these files."""
    known = git.paths(stop.parent) | (git.paths(stop.origin) if stop.origin else frozenset())
    final = read_tree(git, resolved)
    of_patches = patch_paths(known, final)
    return sorted(path for path in final if path not in of_patches)


def record_rerere(git: Git) -> None:
    """Let git record how conflicts were resolved (rerere)."""
    git.run(*_CONFLICT, "rerere", check=False)


def stash_as_commit(git: Git) -> str:
    """Commit the tracked files of the checkout, move HEAD to the commit, and keep the commit with a ref of its own."""
    lock = git.repo / ".git" / "index.lock"
    if lock.exists():
        raise TreeError(
            f"{git.repo}: another git is at work there, or was killed",
            why=f"{lock} exists",
            next_step=f"if none is running: rm {lock}, and run kvtool again",
        )
    hidden = [f":(exclude,top,literal){path}" for path in _absent_submodules(git)]
    git.run("add", "--sparse", "--update", "--", ":/", *hidden)
    _settle_index(git)
    content = git.line("write-tree")
    head = git.line("rev-parse", "HEAD")
    if content != git.resolve("HEAD^{tree}"):
        head = git.line("commit-tree", content, "-p", head, input="kvtool: edits of an unfinished rebase\n")
        git.run("update-ref", "--no-deref", "-m", "kvtool rebase", "HEAD", head)
    git.run(
        "update-ref", _stash_ref_of(head), head
    )  # one ref for each commit, so that the next commit does not replace this one
    for left in ("MERGE_MSG", "AUTO_MERGE", "CHERRY_PICK_HEAD"):
        (git.repo / ".git" / left).unlink(missing_ok=True)
    return head


def _stash_ref_of(commit: str) -> str:
    return f"{KEPT_REFS}/{commit[:12]}"


def stash_ref(git: Git, state: RebaseState, at: str) -> str:
    """Return the ref that stash_as_commit() made for `at`; "" if the checkout had no edits."""
    ref = _stash_ref_of(at)
    return ref if at != state.at and git.resolve(ref) else ""


def rerere_resolved(state: RebaseState) -> tuple[str, ...]:
    """Return the files whose conflict git rerere resolved in the same way as an earlier conflict."""
    return tuple(sorted(conflict.path for conflict in state.conflicts if conflict.filled))


# --- conflicts ---------------------------------------------------------------------------------------------------


def _complete_conflicts(git: Git, stop: ConflictStop) -> None:
    """Write conflict markers for the conflicts that git cherry-pick has resolved automatically.

    git resolves a conflict automatically if an attribute such as merge=union applies to the file.
    """
    with scratch_repository(git.repo, below=kvtool_dir(git.repo)) as scratch:
        _, unmerged = merge_trees(scratch, f"{stop.parent}^{{tree}}", f"{stop.origin}^", stop.origin)
    there = _unmerged(git)
    for path, stages in unmerged.items():
        if path in there or set(stages) != {"1", "2", "3"} or _is_submodule(stages):
            continue
        entries = [f"0 {'0' * 40}\t{path}\0"]
        entries += [f"{mode} {blob} {stage}\t{path}\0" for stage, (mode, blob) in sorted(stages.items())]
        git.run("update-index", "-z", "--index-info", input="".join(entries))
        with tempfile.TemporaryDirectory(dir=kvtool_dir(git.repo)) as name:
            sides = [Path(name) / label for label in ("HEAD", "base", "patch")]
            for side, stage in zip(sides, "213", strict=True):
                side.write_bytes(git.raw("cat-file", "blob", stages[stage][1]))
            labels = [word for side in sides for word in ("-L", side.name)]
            size = f"--marker-size={_marker_size(git, path)}"
            (git.repo / path).write_bytes(
                git.run("merge-file", "-p", "--diff3", size, *labels, *sides, check=False).raw
            )


def _conflicts_now(git: Git) -> tuple[FileConflict, ...]:
    """Return the conflicts of the checkout, as git left them."""
    found: list[FileConflict] = []
    for path, stages in _unmerged(git).items():
        file, size = git.repo / path, _marker_size(git, path)
        text = file.read_bytes() if file.is_file() and not file.is_symlink() else None
        if text is None or _is_submodule(stages):
            found.append(FileConflict(path, size))
            continue
        if not _marker_counts(text, size)["<"] and _marker_counts(text, size + 1)["<"]:
            size += 1  # git writes longer markers into a file that both sides renamed
        sides = [git.raw("cat-file", "blob", blob) for _, blob in stages.values()]
        textual = len(sides) == 3 and not any(b"\0" in side for side in sides) and text not in sides[1:]
        filled = textual and not _marker_counts(text, size)["<"]
        found.append(FileConflict(path, size, hashlib.sha256(text).hexdigest(), filled))
    return tuple(found)


def _marker_size(git: Git, path: str) -> int:
    """Return the length of the markers that git writes into a file (attribute conflict-marker-size)."""
    value = git.entries("check-attr", "-z", "conflict-marker-size", "--", path)[-1]
    return int(value) if value.isdigit() and int(value) else _SIZE


def _marker_counts(text: bytes, size: int) -> Counter[str]:
    """Count the lines that look like conflict markers of the given length, by their character."""
    marker = re.compile(rb"^([<|>=])\1{%d}(?!\1)( |\r?$)" % (size - 1), re.MULTILINE)
    found = (match for match in marker.finditer(text) if match[1] != b"=" or match[2] != b" ")
    return Counter(match[1].decode() for match in found)


def _files_with_markers(git: Git, state: RebaseState) -> list[str]:
    """Return the files that still have conflict markers. Lines that only look like markers are not counted."""
    known = {conflict.path: conflict.size for conflict in state.conflicts}
    sizes = sorted({_SIZE, *known.values()})
    names = sorted({*git.entries("diff", "--name-only", "-z", state.stop.parent), *_unmerged(git), *known})
    return [
        name for name in names if any(_has_markers(git, state.stop, name, n) for n in _sizes_of(name, known, sizes))
    ]


def _sizes_of(name: str, known: Mapping[str, int], sizes: Sequence[int]) -> Sequence[int]:
    return (known[name],) if name in known else sizes


def _has_markers(git: Git, stop: ConflictStop, name: str, size: int) -> bool:
    """Return True if a file has more lines that look like conflict markers than a merge of both sides can have.

    For each kind of marker, the limit is the largest of three numbers: the lines in upstream's version, the lines in
    the patch's version, and the sum of these two numbers minus the lines in the base.
    """
    file = git.repo / name
    if not file.is_file() or file.is_symlink():
        return False
    counts = _marker_counts(file.read_bytes(), size)
    if not counts:
        return False
    trees = (stop.parent, stop.origin, f"{stop.origin}^") if stop.origin else (stop.parent,)
    texts = git.blobs(*(f"{tree}:{name}" for tree in trees))
    ours, theirs, base = ([_marker_counts(text, size) for _, text in texts] + [Counter(), Counter()])[:3]
    kinds = "<|>" if name.endswith(_PROSE) else "<|>="
    return any(counts[kind] > max(ours[kind], theirs[kind], ours[kind] + theirs[kind] - base[kind]) for kind in kinds)


def _unmerged(git: Git) -> dict[str, dict[str, tuple[str, str]]]:
    return parse_unmerged(git.entries("ls-files", "-u", "-z"))


def _is_submodule(stages: Mapping[str, tuple[str, str]]) -> bool:
    return SUBMODULE in (mode for mode, _ in stages.values())


def _untouched_conflicts(git: Git, state: RebaseState) -> list[str]:
    """Return the files without conflict markers that still have a conflict, because the user has not changed them.

    Such a file is binary, or was removed by either upstream or the patch.
    """
    there = _unmerged(git)
    open_ones = (c for c in state.conflicts if c.path in there and c.digest and not c.filled)
    return [c.path for c in open_ones if (git.repo / c.path).is_file() and _digest(git.repo / c.path) == c.digest]


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _absent_submodules(git: Git) -> list[str]:
    """Return the submodules that are not checked out, because git add cannot read them."""
    entries = (entry.partition("\t") for entry in git.entries("ls-files", "-s", "-z"))
    paths = {path for meta, _, path in entries if meta.startswith(SUBMODULE)}
    return sorted(path for path in paths if not _has_commit(git.repo / path))


def _has_commit(folder: Path) -> bool:
    return (folder / ".git").exists() and Git(folder).resolve("HEAD^{commit}") is not None


def _settle_index(git: Git) -> None:
    """Resolve the conflicts that are left in the index with upstream's version.

    These are submodules, and files that git add could not read.
    """
    entries: list[str] = []
    for path, stages in _unmerged(git).items():
        entries.append(f"0 {'0' * 40}\t{path}\0")
        entries += [f"{mode} {blob}\t{path}\0" for mode, blob in [stages["2"]]] if "2" in stages else []
    if entries:
        git.run("update-index", "-z", "--index-info", input="".join(entries))


def recover(git: Git, state: RebaseState) -> RebaseState:
    """Bring the checkout into a known state after kvtool was killed while it moved the checkout from `at` to `to`.

    If HEAD is still at `at`, the files of `at` are restored. If HEAD is already at `to`, changed files are committed.
    Raises TreeError if HEAD is at another commit. Raises TreeError also if HEAD is at `at` and the user edited a file.
    """
    await_git(git.repo)
    head, dirty = git.resolve("HEAD^{commit}"), git.dirty()
    if head == state.at:
        put_back(git, state.at, state.to, dirty, "rebase")
    elif head == state.to and dirty:  # kvtool was killed while it wrote the conflict, after the checkout had moved
        return replace(state, at=stash_as_commit(git))
    elif head != state.to:
        raise TreeError(
            f"{git.repo}: a kvtool rebase was interrupted, and HEAD was moved since",
            why=f"it is neither at {state.at[:10]} nor at {state.to[:10]}",
            next_step=f"git -C {git.repo} checkout --detach {state.at[:10]} && kvtool rebase --abort",
        )
    return replace(state, at=head or state.at)


def abort(git: Git, console: Console, state: RebaseState) -> str:
    """Restore the checkout from before the rebase.

    Returns the ref that keeps the edits of the user, "" if there were none.
    """
    if state.phase in ("stopped", "taking"):
        with resolving(git, state):
            git.run(*_CONFLICT, "rerere", "clear", check=False)
            at = stash_as_commit(git)
    else:
        at = recover(git, state).at
    reject_untracked(git, at, state.head)
    write_state(git.repo, replace(state, phase="aborting", at=at, to=state.head))
    run_checkout(git, console, *state.checkout_args)
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
    """Write the git range-diff between the series on the old and on the new upstream."""
    ranges = (f"{done.locked.base}..{done.locked.head}", f"{done.base}..{done.head}")
    empty = done.locked.base == done.locked.head or done.base == done.head  # git does not accept an empty range
    text = b"" if empty else git.raw("range-diff", "--no-color", "--no-ext-diff", *ranges)
    path = range_diff_path(tree, old_tag, done.tag)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)


def range_diff_path(tree: Path, old_tag: str, new_tag: str) -> Path:
    """Return the path of the range-diff that a rebase writes."""
    return kvtool_dir(tree) / "range-diff" / f"{old_tag}..{new_tag}.txt"
