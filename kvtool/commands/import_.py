"""Implement `kvtool import`: turn a fork, or the patches of another tool, into the series of an empty project."""

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

from typer import Argument, Option

from kvtool.console import Console
from kvtool.errors import UsageError, writing
from kvtool.gitcmd import Git, Scratch, scratch_repository
from kvtool.locks import hold_tree
from kvtool.options import Context, Env, Mirror, env_of, reject
from kvtool.process import redact_urls
from kvtool.project import Project, expanded, place_of
from kvtool.replay.fork import ForkBase, ForkPatch, ForkPlan, find_base, plan_import
from kvtool.replay.importing import ImportedPatch, commit_patches, import_changes, refuse_missing
from kvtool.replay.rebase_plan import SeriesContext
from kvtool.result import Result
from kvtool.series.changes import Change, put_file
from kvtool.series.incoming import read_patches
from kvtool.series.series import load_patches, new_files
from kvtool.upstream.lock import with_upstream
from kvtool.upstream.sources import adopt_base, explain_failure

_T = TypeVar("_T")
_SHOWN = 6  # most commits of a squashed patch that are printed; the message of the patch names more
_ACTIONS = {
    "kept": "one patch each",
    "moved": "from before the last merge of upstream, moved onto the base, one patch each",
    "merge": "a merge of the fork's own branch, one patch with all its commits",
    "squashed": "one patch per folder",
}


@dataclass(frozen=True)
class ImportResult(Result, command="import"):
    """Report an imported series. With dry_run, report the series that an import would make."""

    source: str  # where the fork or the folder of patches is
    head: str  # id of the fork's commit, "" for a folder of patches
    base: str  # upstream tag or commit under the fork
    found_by: str  # how the base was found
    tree: str  # id of the fork's git tree, which the series reproduces
    dry_run: bool
    patches: tuple[ImportedPatch, ...]
    new_files: int  # number of files in cpp/
    only_new_files: int  # number of the fork's commits that only change files of cpp/
    notes: tuple[str, ...]  # remarks for the user
    summary: tuple[str, ...]  # lines that say which commits are kept and which are squashed

    def render(self, console: Console) -> None:
        if self.dry_run:
            for line in self.summary:
                console.line(line)
            rows = [(patch.id, _word(patch), patch.files, patch.commit[:10], patch.subject) for patch in self.patches]
            console.table(("patch", "action", ">files", "commit", "subject"), rows)
            console.line("nothing was written (--dry-run)")
            return
        console.line(
            f"{len(self.patches)} patches, {self.new_files} files of cpp/: with {self.base}, the tree is the fork's"
        )
        console.line("next: kvtool apply; then write each why in patches/series.toml, and kvtool lint")


def _word(patch: ImportedPatch) -> str:
    if patch.commits:
        return f"{patch.action} ({len(patch.commits)} commits)"
    return f"{patch.action}, in part" if patch.is_partial else patch.action


def announce(plan: ForkPlan) -> list[str]:
    """Return the lines that announce which commits an import keeps and which it squashes."""
    by_action = Counter(patch.action for patch in plan.patches)
    partial = sum(patch.is_partial for patch in plan.patches)
    carried = {action: sum(len(p.carried) for p in plan.patches if p.action == action) for action in by_action}
    lines = [f"base: {plan.base.tag[:12]} of {plan.base.date} ({plan.base.found_by})", f"patches: {len(plan.patches)}"]
    for action, count in by_action.items():
        more = f"; other files of {partial} of them are squashed" if action == "moved" and partial else ""
        more = f" ({carried[action]} commits)" if carried[action] else more
        lines.append(f"  {count} {action}: {_ACTIONS[action]}{more}")
        lines += [_carried_line(patch) for patch in plan.patches if patch.action == action and patch.carried]
    if plan.only_new_files:
        lines.append(
            f"{len(plan.only_new_files)} commits only change new files: cpp/ has their result, no patch has the commits"
        )
    lines.append(f"new files in cpp/: {len(plan.new_files)}")
    return lines + [f"note: {note}" for note in plan.notes]


def _carried_line(patch: ForkPatch) -> str:
    """Return a line that lists the fork's commits that a patch contains. The patch is a merge or a squashed patch."""
    shown = " ".join(commit[:10] for commit in patch.carried[:_SHOWN])
    more = f" and {len(patch.carried) - _SHOWN} more" if len(patch.carried) > _SHOWN else ""
    return f"    {patch.subject.partition(': carry the changes')[0]}: {shown}{more}"


@contextlib.contextmanager
def _open_fork(where: str, console: Console) -> Iterator[Git]:
    """Open a fork's repository.

    A folder is opened as it is. A URL or a bundle is cloned, and the clone is removed at the end.
    """
    place = expanded(where)
    if place.is_dir():
        git = Git(place.resolve())
        asked = git.run("rev-parse", "--absolute-git-dir", "--show-prefix", check=False)
        inside, _, prefix = asked.stdout.strip("\n").partition("\n")
        is_root = asked.returncode == 0 and not prefix.strip() and Path(inside).is_relative_to(git.repo)
        is_worktree = asked.returncode == 0 and (git.repo / ".git").is_file()
        if not (is_root or is_worktree):
            raise UsageError(
                f"{where} is not a git repository",
                why=asked.stderr.strip() or "it is a folder inside another repository",
                next_step="name the fork's clone; for a folder of patches: kvtool import --patches DIR",
            )
        yield git
        return
    if not place.exists() and ":" not in where:
        raise UsageError(f"there is no {where}", next_step="name the fork by its path or its URL")
    with tempfile.TemporaryDirectory(prefix="kvtool-import-") as folder:
        git = Git(Path(folder))
        with console.progress(f"cloning {redact_urls(where)}") as bar:
            bar.set_total(200)
            phases = ("Receiving objects", "Resolving deltas")
            clone = ("clone", "--bare", "--progress", "--", place_of(where), "fork.git")
            done = git.watch(*clone, bar=bar, phases=phases)
        if done.returncode != 0:
            raise explain_failure(done.stdout, redact_urls(where))
        yield Git(Path(folder) / "fork.git")


def _require_empty(project: Project) -> None:
    """Raise UsageError if the project has a series already."""
    if patches := load_patches(project):
        raise UsageError(
            f"{project.root} has a series already",
            why=f"patches/series.toml lists {len(patches)} patches, and import begins a series",
            next_step="begin an empty project: kvtool init my-fork --empty && cd my-fork, then import there",
        )


def _refuse_others(project: Project, todo: Sequence[Change]) -> None:
    """Raise UsageError if patches/ or cpp/ has a file that the import would not write with the same content.

    The import would replace this file, or the file would become a part of the new series. If an earlier import of the
    same fork was killed, the files of that import are accepted: they have the content that this import would write.
    """
    wanted = {change.path: change.content for change in todo}
    there = [project.root / "cpp" / file.path for file in new_files(project.cpp)]
    there += project.patches.glob("*.patch")
    names = [(file, file.relative_to(project.root).as_posix()) for file in there]
    if other := [name for file, name in names if wanted.get(name) != file.read_bytes()]:
        more = f" and {len(other) - 3} more" if len(other) > 3 else ""
        raise UsageError(
            f"the project has {', '.join(sorted(other)[:3])}{more} already",
            why="import writes patches/ and cpp/ of an empty project",
            next_step="move these files away; or begin an empty project: kvtool init my-fork --empty",
        )


def _write(project: Project, todo: Sequence[Change]) -> None:
    """Write all files, then upstream.lock, then series.toml. If this fails, restore the project as it was.

    If kvtool is killed partway, series.toml does not list any patches yet, so the same import can run again.
    """
    last = ("patches/upstream.lock", "patches/series.toml")
    order = sorted(todo, key=lambda change: (last.index(change.path) + 1 if change.path in last else 0, change.path))
    before = {change.path: _content(project.root / change.path) for change in order}
    try:
        with writing(str(project.root), "nothing was changed"):
            for change in order:
                put_file(project.root / change.path, change)
    except BaseException:
        for change in reversed(order):
            put_file(project.root / change.path, replace(change, content=before[change.path]))
        raise


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


class _Importer:
    """Import one fork or one folder of patches into a project."""

    def __init__(self, env: Env, mirror: str | None, *, dry_run: bool, squash: bool) -> None:
        self.project, self.console = env.project, env.console
        self.context = SeriesContext(self.project, self.console, mirror or os.environ.get("KVTOOL_UPSTREAM"))
        self.dry_run, self.squash = dry_run, squash

    def each(self, text: str, items: Sequence[_T]) -> Iterator[_T]:
        """Yield the items while a progress bar counts them."""
        if items:
            with self.console.progress(text, len(items)) as bar:
                for number, item in enumerate(items):
                    bar.update(number)
                    yield item

    def import_fork(self, where: str, revision: str, base_name: str | None) -> ImportResult:
        with _open_fork(where, self.console) as fork:
            head = fork.resolve(f"{revision}^{{commit}}")
            if head is None:
                what = f"{redact_urls(where)} has no commit {revision}"
                raise UsageError(what, next_step="name a branch, a tag or a commit of the fork: --rev REV")
            base = find_base(fork, head, self.context.lock, base_name)
            if base is None:
                upstream = self.context.find(base_name or "")
                base = ForkBase(upstream.tag, upstream.tree, upstream.date, "", "--base")
                base = find_base(fork, head, self.context.lock, upstream.tag) or base
            name = Path(redact_urls(where).rstrip("/")).name.removesuffix(".git") or "the fork"
            with scratch_repository(fork.repo, self.context.cache.repo) as scratch:
                if not base.commit:
                    self.context.base(self.context.lock.upstream(base.tag))
                each: Callable[[str, Sequence[str]], Iterable[str]] = self.each
                plan = plan_import(scratch, base, head, name, squash=self.squash, each=each)
                notes = list(plan.notes)
                if not base.commit and self.squash:
                    notes.append(f"the fork's history does not have {base.tag}: each patch has all changes of a folder")
                if fork.line("rev-parse", "--is-shallow-repository") == "true":
                    notes.append("the fork is a shallow clone: to keep older commits, run git fetch --unshallow there")
                if plan.links:
                    notes.append(f"submodules are carried as commit ids only: {', '.join(plan.links)}")
                plan = replace(plan, notes=tuple(notes))
                why = f"Imported from {name}"
                return self._finish(scratch, plan, redact_urls(where), lambda p: _reason(why, p))

    def _local_mirror(self) -> Git | None:
        """Return the mirror's repository if it is on this machine, else None.

        Any commit of a local mirror can be the base of a fork, even a commit that is not in upstream.lock.
        """
        place = expanded(self.context.mirror) if self.context.mirror else None
        return Git(place) if place and place.is_dir() else None

    def import_patches(self, place: Path, base_name: str | None) -> ImportResult:
        patches = read_patches(place)
        mirror = self._local_mirror()
        commit = mirror.resolve(f"{base_name}^{{commit}}") if mirror and base_name else None
        base = find_base(mirror, commit, self.context.lock, base_name) if mirror and commit else None
        if base is None:
            upstream = self.context.find(base_name) if base_name else self.context.lock.upstream()
            commit = self.context.base(upstream)
            how = "--base" if base_name else "upstream.lock"
            base = ForkBase(upstream.tag, upstream.tree, upstream.date, commit, how)
        with scratch_repository(self.context.cache.repo, *([mirror.repo] if mirror else [])) as scratch:
            head, names, empty = commit_patches(scratch, base, patches)
            if not names:
                raise UsageError(f"the patches of {place} change nothing")
            each: Callable[[str, Sequence[str]], Iterable[str]] = self.each
            plan = plan_import(scratch, base, head, place.name, squash=False, each=each)
            made = tuple(replace(patch, name_for_id=names[patch.commit]) for patch in plan.patches)
            notes = tuple(f"{name} changes nothing, and is left out" for name in empty)
            plan = replace(plan, patches=made, notes=notes)
            result = self._finish(scratch, plan, str(place), lambda p: f"Imported from {names[p.commit]}.")
        return replace(result, head="")

    def _finish(self, scratch: Scratch, plan: ForkPlan, source: str, why: Callable[[ForkPatch], str]) -> ImportResult:
        """Print the plan, make the files, check that they reproduce the fork, and write them."""
        summary = announce(plan)
        if not self.dry_run:
            for line in summary:
                self.console.step(line)
        base = plan.base
        if base.tag not in self.context.lock.upstreams:
            self.context.lock = with_upstream(self.context.lock, base.tag, base.tree, base.date)
        upstream = self.context.lock.upstream(base.tag)
        refuse_missing(scratch, plan)
        commit = adopt_base(self.context.cache, scratch, upstream, self.console)
        each: Callable[[str, Sequence[ForkPatch]], Iterable[ForkPatch]] = self.each
        todo, imported = import_changes(self.context, scratch, commit, plan, why, each)
        _refuse_others(self.project, todo)
        if not self.dry_run:
            with hold_tree(self.project, self.console):
                _require_empty(self.project)
                _write(self.project, todo)
        counts = (len(plan.new_files), len(plan.only_new_files))
        shown = (imported, *counts, plan.notes, tuple(summary))
        return ImportResult(source, plan.head, base.tag, base.found_by, plan.tree, self.dry_run, *shown)


def _reason(start: str, patch: ForkPatch) -> str:
    return (
        f"{start}, commit {patch.commit[:10]}." if patch.commit else f"{start}, {len(patch.carried)} commits squashed."
    )


def command(
    ctx: Context,
    fork: Annotated[str | None, Argument(metavar="FORK", help="Path or URL of the fork's git repository.")] = None,
    patches: Annotated[
        Path | None,
        Option("--patches", metavar="DIR|FILE", help="Import patches instead: a folder, a quilt series or a mailbox."),
    ] = None,
    base: Annotated[
        str | None,
        Option("--base", metavar="TAG", help="Upstream tag or commit under the fork [the newest one in its history]."),
    ] = None,
    rev: Annotated[str, Option("--rev", metavar="REV", help="Branch, tag or commit of the fork to import.")] = "HEAD",
    squash: Annotated[bool, Option("--squash", help="Make one patch per folder instead of one per commit.")] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print the patches that would be made, and write nothing.")
    ] = False,
    mirror: Mirror = None,
) -> ImportResult:
    """Turn a fork, or patches of another tool, into the series of an empty project.

    Make the project first: kvtool init my-fork --empty && cd my-fork.

    The commits of the fork become patches. Each commit after the last merge of upstream becomes one patch. A merge of
    one of the fork's own branches becomes one patch, too. Commits before the last merge of upstream are moved onto the
    base. If the moved commits do not give a file the content that it has in the fork, the changes of this file are
    squashed into one patch per folder.

    New files of the fork are put into cpp/. Hidden files, symbolic links and submodules stay in the patches.
    Uncommitted changes of the fork are not imported.

    --patches reads mails, quilt patches and plain diffs. Their order is that of the file `series` or, without this
    file, of their names. Headers such as Origin, Bug and Forwarded become trailers of the commit message.

    Before anything is written, kvtool checks that the series produces exactly the files of the fork, and that a
    kvtool export afterwards would change nothing.

        kvtool import ~/src/my-llama.cpp --dry-run
        kvtool import https://github.com/me/llama.cpp --base b9093
        kvtool import --patches ~/src/ollama/llama/patches --base 1a2b3c4

    Exit codes: 2 the project has a series already, or the base is unknown, 3 a patch does not apply, 5 and 9 as in
    kvtool fetch.
    """
    env = env_of(ctx)
    reject(
        "import",
        (not fork and not patches, "name a fork, or a folder with --patches"),
        (fork and patches, "a fork and --patches exclude each other"),
        (patches and (rev != "HEAD" or squash), "--rev and --squash are for forks"),
    )
    env.project.refuse_packaged()
    _require_empty(env.project)
    importer = _Importer(env, mirror, dry_run=dry_run, squash=squash)
    if patches:
        return importer.import_patches(expanded(patches), base)
    return importer.import_fork(fork or "", rev, base)
