"""Decide which patches the commits of a fork become. No checkout and no ref of the fork changes.

The base is the newest state of upstream that the fork contains. Each of the fork's own commits after the last merge of
upstream becomes a patch. The fork's commits before that merge are moved onto the base, for each file separately. If the
moved commits give a file its content in the fork, the patches of these commits change the file. The changes of all
other files are squashed into one patch for each folder.

A fork can have upstream's files without upstream's commit, for example after a squashed merge. Then the fork's commit
whose tree is most similar to upstream's tree is treated like the last merge. The difference between upstream and this
commit is squashed, and the fork's commits after this commit become patches.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvtool.errors import UsageError
from kvtool.gitcmd import Git, Scratch
from kvtool.replay.apply import Blob
from kvtool.replay.paths import ABSENT, Entry, patch_paths, read_tree
from kvtool.series.patchfile import Authored, mail_message
from kvtool.upstream.lock import Lock, usable_tag

_FIXUP = re.compile(r"^(?:(?:fixup|squash|amend)! )+")
# if the patch of a folder changes this many lines or more, it is divided among the folders inside of it
_FOLDER_LINES = 1500
_LISTED = 40  # most commits that the message of a squashed patch names


@dataclass(frozen=True)
class ForkBase:
    """Hold the upstream state that a fork is based on."""

    tag: str  # name in upstream.lock: a tag, or the full id of a commit
    tree: str
    date: str  # date of the commit, as YYYY-MM-DD
    commit: str  # id of the commit in the fork, "" if the fork's history does not have it
    found_by: str  # how the base was found, as text for the user


@dataclass(frozen=True)
class ForkPatch(Authored):
    """Hold a patch that an import will make: its message, and the new state of each path that it changes."""

    action: str  # "kept", "moved", "merge" or "squashed"
    commit: str  # id of the fork's commit, "" for a squashed patch
    changes: Mapping[str, Entry]
    carried: tuple[str, ...] = ()  # commits of the fork that a merge or a squashed patch contains
    is_partial: bool = False  # True if squashed patches have the changes that the commit made to some of its files
    name_for_id: str = ""  # text that the patch's id is made from; "" means its subject


@dataclass(frozen=True)
class ForkPlan:
    """Hold everything that an import will write. The patches are in order."""

    base: ForkBase
    head: str
    tree: str
    new_files: tuple[Blob, ...]
    patches: tuple[ForkPatch, ...]
    only_new_files: tuple[str, ...]  # commits that only change files of cpp/
    links: tuple[str, ...] = ()  # paths of submodules; a patch stores only the id of their commit
    notes: tuple[str, ...] = field(default=())


# --- the base ----------------------------------------------------------------------------------------------------


def find_base(git: Git, head: str, lock: Lock, wanted: str | None) -> ForkBase | None:
    """Find the upstream state that a fork is based on: `wanted`, or else the newest one in the history of `head`.

    Returns None if the fork's repository has no tag or commit `wanted`, and the lock has no such tag. Raises UsageError
    if `wanted` is None and the history shows no upstream commit.

    If `wanted` is a commit that is not in the history of `head`, there are two cases. If the histories have no common
    commit, or if a commit of the fork is similar to `wanted`, return a ForkBase whose commit is empty. Otherwise, raise
    UsageError. A commit is similar if it differs from `wanted` in fewer than n/2 files, where n is the number of files
    that upstream changed from the last common commit to `wanted`.
    """
    return _named_base(git, head, lock, wanted) if wanted else _newest_base(git, head, lock)


def _named_base(git: Git, head: str, lock: Lock, wanted: str) -> ForkBase | None:
    commit = git.resolve(f"refs/tags/{wanted}^{{commit}}") or git.resolve(f"{wanted}^{{commit}}")
    known = lock.upstreams.get(wanted)
    if known and (commit is None or git.resolve(f"{commit}^{{tree}}") != known.tree):
        commit = _commits_by_tree(git, head).get(known.tree, "")
        return ForkBase(known.tag, known.tree, known.date, commit, "--base")
    if commit is None:
        return None
    if not git.ok("merge-base", "--is-ancestor", commit, head):
        common = git.run("merge-base", commit, head, check=False).stdout.strip()
        if not common:  # the histories have no common commit, so only the trees can be compared
            return replace(_base_at(git, commit, lock, "--base", wanted), commit="")
        base = replace(_base_at(git, commit, lock, "--base", wanted), commit="")
        nearest, differ = _nearest_commit(git, base.tree, head)
        if nearest and 2 * differ < len(git.changed(common, base.tree)):
            return base  # most files are equal, so upstream was merged without its commits
        raise UsageError(
            f"{head[:10]} does not contain {wanted}",
            why=f"the last common commit of both histories is {common[:10]}",
            next_step=f"name the upstream commit that the fork contains: --base {common[:10]}",
        )
    return _base_at(git, commit, lock, "--base", wanted)


def _base_at(git: Git, commit: str, lock: Lock, found_by: str, name: str = "") -> ForkBase:
    tree, date = git.line("show", "--no-patch", "--format=%T %cs", commit).split()
    tag = next((up.tag for up in lock.upstreams.values() if up.tree == tree), "")
    if not tag:  # a tag of upstream is a better name than the id of a commit
        there = git.line("tag", "--points-at", commit).split()
        tag = next((one for one in there if one == name or re.fullmatch(r"b\d+", one)), "")
        tag = tag if usable_tag(tag) else ""
    return ForkBase(tag or commit, tree, date, commit, found_by)


def _commits_by_tree(git: Git, head: str) -> dict[str, str]:
    """Return the commits in the history of `head`, by the id of their git tree.

    If several commits have the same tree, the newest of these commits is returned.
    """
    lines = git.run("log", "--format=%T %H", head).stdout.split("\n")
    return dict(line.split() for line in reversed(lines) if line)


def _newest_base(git: Git, head: str, lock: Lock) -> ForkBase:
    found: list[tuple[str, str, str]] = []  # id of the commit, how it was found, its tag
    by_tree = _commits_by_tree(git, head)
    for up in sorted(lock.upstreams.values(), key=lambda up: -up.order):
        if commit := by_tree.get(up.tree):
            found.append((commit, "a tree of upstream.lock", up.tag))
            break
    described = git.run("describe", "--tags", "--abbrev=0", "--match", "b[0-9]*", head, check=False).stdout.strip()
    if described:
        commit = git.line("rev-parse", f"refs/tags/{described}^{{commit}}")
        found.append((commit, f"the fork's tag {described}", described))
    refs = git.line("for-each-ref", "--format=%(refname)", "refs/remotes/upstream", "refs/heads/upstream").split()
    for ref in refs:
        if ref.endswith(("/HEAD", "/main", "/master", "/upstream")):
            common = git.run("merge-base", ref, head, check=False).stdout.strip()
            found += [(common, f"the merge base with {ref.removeprefix('refs/')}", "")] if common else []
    if not found:
        raise UsageError(
            "the upstream commit below the fork is unknown",
            why="its history has no tree of upstream.lock, no tag b<number>, and it has no remote named upstream",
            next_step="name the newest upstream commit that was merged: --base TAG or --base COMMIT",
        )
    commit, how, tag = min(found, key=lambda entry: int(git.line("rev-list", "--count", f"{entry[0]}..{head}")))
    return _base_at(git, commit, lock, how, tag)


# --- the plan ----------------------------------------------------------------------------------------------------


def plan_import(
    git: Git, base: ForkBase, head: str, name: str, *, squash: bool, each: Callable[[str, Sequence[str]], Iterable[str]]
) -> ForkPlan:
    """Decide how each commit of a fork is imported.

    name: the name of the fork, for messages
    squash: make one patch for each folder, instead of keeping commits
    each: iterates over commits while it shows a progress bar
    """
    tree = git.line("rev-parse", f"{head}^{{tree}}")
    theirs, final = read_tree(git, base.tree), read_tree(git, tree)
    wanted = patch_paths(theirs, final)
    notes: tuple[str, ...] = ()
    start, line = head, tuple[str, ...]()
    if base.commit and not squash:
        start, line = _kept_line(git, base.commit, head)
    elif not squash:
        start, differ = _nearest_commit(git, base.tree, head)
        line = tuple(git.line("rev-list", "--first-parent", "--reverse", f"{start}..{head}").split())
        subject = git.line("show", "--no-patch", "--format=%s", start)
        notes = (
            f"the fork's history does not have {base.tag}; nearest is {start[:10]} ({subject}): {differ} files differ "
            f"there, and are squashed; commits after it: {len(line)}",
        )
    planner = _Planner(git, base, name, wanted)
    older: list[ForkPatch] = []
    if start != base.commit:
        target = read_tree(git, start)
        older = planner.carry_older(start, theirs, target, each, squash=squash or not base.commit)
    newer, nothing = planner.keep(line, each)
    blobs = tuple(Blob(entry.mode, entry.id, path) for path, entry in sorted(final.items()) if path not in wanted)
    links = tuple(path for path, entry in sorted(final.items()) if entry.mode == "160000" and theirs.get(path) != entry)
    patches = _with_own_subjects([*older, *newer])
    return ForkPlan(base, head, tree, blobs, tuple(patches), (*planner.only_new_files, *nothing), links, notes)


def _kept_line(git: Git, base: str, head: str) -> tuple[str, tuple[str, ...]]:
    """Return the commit before the first kept commit, and the kept commits with the oldest first.

    The kept commits are the first-parent commits after the last merge of upstream.
    """
    chain = git.line("rev-list", "--first-parent", head, f"^{base}").split()
    low, high = 0, len(chain)  # chain[:low] contain the base, and chain[high:] do not
    while low < high:
        middle = (low + high) // 2
        if git.ok("merge-base", "--is-ancestor", base, chain[middle]):
            low = middle + 1
        else:
            high = middle
    line = chain[:low]
    if not line:
        return head, ()
    if git.resolve(f"{line[-1]}^1") == base:
        return base, tuple(reversed(line))
    return line[-1], tuple(reversed(line[:-1]))


def _nearest_commit(git: Git, tree: str, head: str) -> tuple[str, int]:
    """Return the first-parent commit of a fork that is most similar to a tree, and the number of different files.

    If several commits are equally similar, the oldest one is returned. git is called only twice for the whole history.
    """
    wanted = read_tree(git, tree)
    rows = git.line("log", "--first-parent", "--reverse", "--format=%H %T", head).split()
    commits, trees = rows[::2], rows[1::2]
    now = read_tree(git, trees[0])
    differ = {path for path in {*wanted, *now} if wanted.get(path) != now.get(path)}
    best = (len(differ), commits[0])
    pairs = "".join(f"{old} {new}\n" for old, new in itertools.pairwise(trees) if old != new)
    flags = ("diff-tree", "--stdin", "-r", "-z", "--raw", "--no-renames", "--no-abbrev")
    text = git.run(*flags, input=pairs).raw.decode("utf-8", "surrogateescape") if pairs else ""
    by_pair = iter(re.split(r"(?:^|(?<=\0))[0-9a-f]{40} [0-9a-f]{40}\n", text)[1:])
    for commit, old, new in zip(commits[1:], trees, trees[1:], strict=False):
        words = next(by_pair).split("\0") if old != new else []
        for meta, path in zip(words[::2], words[1::2], strict=False):
            _, mode, _, blob, _ = meta.split()
            is_equal = wanted.get(path, ABSENT) == (Entry(mode, blob) if mode.strip("0") else ABSENT)
            (differ.discard if is_equal else differ.add)(path)
        best = min(best, (len(differ), commit), key=lambda pair: pair[0])
    return best[1], best[0]


@dataclass
class _Planner:
    """Hold the data that all patches of one import share."""

    git: Git
    base: ForkBase
    name: str
    wanted: frozenset[str]
    only_new_files: list[str] = field(default_factory=list)

    def keep(
        self, line: Sequence[str], each: Callable[[str, Sequence[str]], Iterable[str]]
    ) -> tuple[list[ForkPatch], list[str]]:
        """Return a patch for each commit in `line` that changes files of patches, and the ids of the other commits."""
        told = _read_commits(self.git, line)
        kept, nothing = list[ForkPatch](), list[str]()
        for commit in each("reading the commits", line):
            author, parents = told[commit]
            changes = self._own(_changes(self.git, f"{commit}^1", commit))
            if not changes:
                nothing.append(commit)
                continue
            carried: tuple[str, ...] = ()
            if len(parents) > 1:
                carried = tuple(self.git.line("rev-list", "--no-merges", f"{commit}^1..{commit}").split())
            action = "merge" if len(parents) > 1 else "kept"
            after = {path: entry for path, (_, entry) in changes.items()}
            kept.append(_patch(author, action, commit, after, carried))
        return kept, nothing

    def _own(self, changes: Mapping[str, tuple[Entry, Entry]]) -> dict[str, tuple[Entry, Entry]]:
        return {path: change for path, change in changes.items() if path in self.wanted}

    def carry_older(
        self,
        start: str,
        theirs: Mapping[str, Entry],
        target: Mapping[str, Entry],
        each: Callable[[str, Sequence[str]], Iterable[str]],
        *,
        squash: bool,
    ) -> list[ForkPatch]:
        """Return patches that turn upstream's tree into the tree of `start`.

        The moved commits are the first patches. The changes that the moved commits do not contain follow, as one patch
        for each folder.
        """
        differ = {p for p in self.wanted if theirs.get(p, ABSENT) != target.get(p, ABSENT)}
        moved: list[ForkPatch] = []
        own: list[str] = []
        if self.base.commit:
            order = ("rev-list", "--reverse", "--topo-order", "--no-merges")
            own = self.git.line(*order, f"{self.base.commit}..{start}").split()
        touched: dict[str, list[str]] = {}
        if own and not squash:
            moved, differ, touched = self._move(own, theirs, target, differ, each)
        elif own:
            for commit in each("reading the commits", own):
                for path in _changes(self.git, f"{commit}^1", commit):
                    touched.setdefault(path, []).append(commit)
        after = {path: target.get(path, ABSENT) for path in differ}
        told = _read_commits(self.git, [start, *own])
        return [*moved, *self._by_folder(after, theirs, touched, told, start)]

    def _move(
        self,
        own: Sequence[str],
        theirs: Mapping[str, Entry],
        target: Mapping[str, Entry],
        differ: set[str],
        each: Callable[[str, Sequence[str]], Iterable[str]],
    ) -> tuple[list[ForkPatch], set[str], dict[str, list[str]]]:
        """Move commits onto the base, file by file.

        Returns the patches, the paths for which the commits do not produce the content in `target`, and the commits of
        each path.
        """
        now = {path: theirs.get(path, ABSENT) for path in differ}
        failed: set[str] = set()
        touched: dict[str, list[str]] = {}
        steps: list[tuple[str, dict[str, Entry]]] = []
        for commit in each("moving the commits before the last merge", own):
            changes = _changes(self.git, f"{commit}^1", commit)
            mine = self._own(changes)
            if changes and not mine:
                self.only_new_files.append(commit)
            step: dict[str, Entry] = {}
            for path, (old, new) in mine.items():
                touched.setdefault(path, []).append(commit)
                if path not in differ or path in failed:
                    continue
                merged = _merge_entry(self.git, now[path], old, new)
                if merged is None:
                    failed.add(path)
                elif merged != now[path]:
                    now[path] = step[path] = merged
            steps.append((commit, step))
        failed |= {path for path in differ if now[path] != target.get(path, ABSENT)}
        told = _read_commits(self.git, own)
        patches: list[ForkPatch] = []
        for commit, step in steps:
            if here := {path: entry for path, entry in step.items() if path not in failed}:
                partial = any(commit in touched[path] for path in failed if path in touched)
                patches.append(replace(_patch(told[commit][0], "moved", commit, here, ()), is_partial=partial))
        return patches, failed, touched

    def _by_folder(
        self,
        after: Mapping[str, Entry],
        theirs: Mapping[str, Entry],
        touched: Mapping[str, Sequence[str]],
        told: Mapping[str, tuple[Authored, tuple[str, ...]]],
        start: str,
    ) -> list[ForkPatch]:
        """Return one patch for each folder. The patch changes the files of the folder to their state in the fork."""
        found: list[ForkPatch] = []
        for folder, paths in folder_groups(_sizes(self.git, after, theirs)).items():
            commits = list(dict.fromkeys(commit for path in paths for commit in touched.get(path, ())))
            authors = Counter((told[commit][0].name, told[commit][0].email) for commit in commits)
            newest = told[commits[-1] if commits else start][0]
            name, email = authors.most_common(1)[0][0] if authors else (newest.name, newest.email)
            where = folder or "the root folder"
            subject = f"{where}: carry the changes of {self.name}"
            text = _squash_text(self.base.tag, commits, told, authors)
            message = "\n".join([subject, "", *text]).rstrip() + "\n"
            changes = {path: after[path] for path in paths}
            author = Authored(name, email, newest.date, message, b"")
            found.append(_patch(author, "squashed", "", changes, tuple(commits)))
        return found


def _squash_text(
    tag: str,
    commits: Sequence[str],
    told: Mapping[str, tuple[Authored, tuple[str, ...]]],
    authors: Mapping[tuple[str, str], int],
) -> list[str]:
    """Return the message of a squashed patch. It names the commits and their authors."""
    if not commits:
        return [f"The difference to {tag}; the fork's history has no details."]
    more = [f"... and {len(commits) - _LISTED} more"] if len(commits) > _LISTED else []
    listed = [f"  {commit[:10]} {told[commit][0].subject}" for commit in commits[-_LISTED:]]
    count = "one commit" if len(commits) == 1 else f"{len(commits)} commits"
    with_others = [f"Co-authored-by: {name} <{email}>" for name, email in authors][1:]
    return [f"Squashed from {count} of the fork, newest last:", "", *more, *listed, "", *with_others]


def folder_groups(sizes: Mapping[str, int], depth: int = 1) -> dict[str, list[str]]:
    """Group paths by their first folder. If a folder has many changed lines, group its paths by the folders inside."""
    groups: dict[str, list[str]] = {}
    for path in sorted(sizes):
        parts = path.split("/")[:-1]
        groups.setdefault("/".join(parts[:depth]), []).append(path)
    found: dict[str, list[str]] = {}
    for folder, paths in groups.items():
        inner = {path: sizes[path] for path in paths}
        is_deep = any(path.count("/") > depth for path in paths)
        if depth < 3 and is_deep and sum(inner.values()) > _FOLDER_LINES:
            found |= folder_groups(inner, depth + 1)
        else:
            found[folder] = paths
    return found


def _sizes(git: Git, after: Mapping[str, Entry], theirs: Mapping[str, Entry]) -> dict[str, int]:
    """Return the approximate number of changed lines for each path. A removed file counts as one line."""
    found: dict[str, int] = {}
    for path, entry in after.items():
        if not entry.mode:
            found[path] = 1
            continue
        ids = [e.id for e in (theirs.get(path, ABSENT), entry) if e.id and e.mode != "160000"]
        counts = [text.count(b"\n") for _, text in git.blobs(*ids)] if ids else [0]
        found[path] = abs(counts[-1] - counts[0]) if len(counts) > 1 else counts[0]
    return found


def _patch(
    author: Authored, action: str, commit: str, changes: Mapping[str, Entry], carried: tuple[str, ...]
) -> ForkPatch:
    message = mail_message(author.message.lstrip("\n").rstrip() + "\n")
    if not message.strip():
        message = f"commit {commit[:10]} (it has no message)\n"
    message = _FIXUP.sub("", message)
    name = author.name.strip() or author.email or "unknown"
    return ForkPatch(name, author.email, author.date, message, b"", action, commit, changes, carried)


def _with_own_subjects(patches: Sequence[ForkPatch]) -> list[ForkPatch]:
    """Append a number to a subject that occurs more than once.

    Export finds the patch of a commit by its subject, so subjects must differ.
    """
    seen: Counter[str] = Counter()
    taken = {patch.subject for patch in patches}
    found: list[ForkPatch] = []
    for patch in patches:
        subject = patch.subject
        seen[subject] += 1
        if seen[subject] > 1:
            number = seen[subject]
            while (fresh := f"{subject} ({number})") in taken:
                number += 1
            taken.add(fresh)
            rest = re.sub(r"\A(?:.*\S.*\n)+", "", patch.message.lstrip("\n"))
            patch = replace(patch, message=f"{fresh}\n{rest}")
        found.append(patch)
    return found


# --- reading -----------------------------------------------------------------------------------------------------


def _read_commits(git: Git, commits: Sequence[str]) -> dict[str, tuple[Authored, tuple[str, ...]]]:
    """Return the author, the message and the parents of each commit. Runs git once."""
    if not commits:
        return {}
    asked = ("log", "--no-walk=unsorted", "--stdin", "--date=raw", "--format=%x00%H%n%P%n%an%n%ae%n%ad%n%B")
    text = git.run(*asked, input="\n".join(dict.fromkeys(commits)) + "\n").raw.decode("utf-8", "surrogateescape")
    found = {}
    for entry in text.split("\0")[1:]:
        commit, parents, name, email, date, message = entry.split("\n", 5)
        found[commit] = (Authored(name, email, date, message.rstrip("\n") + "\n", b""), tuple(parents.split()))
    return found


def _changes(git: Git, old: str, new: str) -> dict[str, tuple[Entry, Entry]]:
    """Return the paths that differ between two commits, with their states before and after."""
    words = git.entries("diff-tree", "-r", "-z", "--raw", "--no-renames", old, new)
    found: dict[str, tuple[Entry, Entry]] = {}
    for meta, path in zip(words[::2], words[1::2], strict=True):
        old_mode, new_mode, old_id, new_id, _ = meta.removeprefix(":").split()
        sides = ((old_mode, old_id), (new_mode, new_id))
        before, after = (ABSENT if not mode.strip("0") else Entry(mode, blob) for mode, blob in sides)
        found[path] = (before, after)
    return found


def _merge_entry(git: Git, now: Entry, old: Entry, new: Entry) -> Entry | None:
    """Apply the change from `old` to `new` to the current state `now` of a path. Return None if there is a conflict."""
    if now in (old, new):
        return new
    plain = {"100644", "100755"}
    if not {now.mode, old.mode, new.mode} <= plain:
        return None
    mode = new.mode if old.mode != new.mode else now.mode
    texts = git.blobs(now.id, old.id, new.id)
    if any(b"\0" in text for _, text in texts):
        return None
    assert isinstance(git, Scratch)
    place = git.place()
    files = [place / name for name in ("now", "old", "new")]
    for file, (_, text) in zip(files, texts, strict=True):
        file.write_bytes(text)
    done = git.run("merge-file", "--quiet", *files, check=False)
    merged = git.line("hash-object", "-w", "--no-filters", files[0]) if done.returncode == 0 else ""
    for file in files:
        file.unlink()
    place.rmdir()
    return Entry(mode, merged) if merged else None
