"""Turn the plan of an import into the files of a project, and prove that they produce the fork's tree.

No file is written here.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvtool.errors import ConflictError, KvtoolError, UsageError
from kvtool.gitcmd import Scratch
from kvtool.project import read_text
from kvtool.replay.apply import Builder
from kvtool.replay.export import prove_changes
from kvtool.replay.fork import ForkBase, ForkPatch, ForkPlan
from kvtool.replay.rebase_plan import SeriesContext
from kvtool.series.changes import Change
from kvtool.series.incoming import IncomingPatch
from kvtool.series.patchfile import DIFF_FLAGS, MAIL_FLAGS, find_wrong_count
from kvtool.series.series import new_id
from kvtool.series.series_toml import edit_series
from kvtool.upstream.lock import pin

_T = TypeVar("_T")
_PREFIXED = re.compile(rb"^(?:diff --git |--- a/|\+\+\+ b/)", re.MULTILINE)  # names with the folders a/ and b/


@dataclass(frozen=True)
class ImportedPatch:
    """Report a patch that an import makes."""

    id: str
    action: str  # "kept", "moved", "merge" or "squashed"
    subject: str
    commit: str  # id of the fork's commit, "" for a squashed patch
    commits: tuple[str, ...]  # ids of the fork's commits that a merge or a squashed patch contains
    is_partial: bool  # True if the changes of other files of the commit are in squashed patches
    files: int  # number of files that it changes


def commit_patches(
    scratch: Scratch, base: ForkBase, patches: Sequence[IncomingPatch]
) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """Apply patches in order. Return the last commit, the patch file of each commit, and patches that change nothing.

    Raises ConflictError with the first patch file that does not apply.
    """
    builder = Builder(scratch, base.commit)
    names: dict[str, str] = {}
    empty: list[str] = []
    for patch in patches:
        if wrong := find_wrong_count(patch.diff):
            raise UsageError(
                f"{patch.file}:{patch.first_line + wrong[0]}: {wrong[1]}",
                why="the file was edited by hand, or it was cut off",
                next_step="write the patch again with git diff or diff -u",
            )
        flags = (f"-p{patch.strip}", *(["--reverse"] if patch.reverse else []))
        diffs = dict.fromkeys((patch.diff, patch.diff.replace(b"\r\n", b"\n")))
        ways = [flags] if _PREFIXED.search(patch.diff) else [flags, ("-p0", *flags[1:])]
        if not any(builder.apply(diff, *way) for way in ways for diff in diffs):
            raise _conflict(builder, patch, base.tag, flags)
        commit = builder.commit_index(patch.message, author=patch)
        if commit:
            names[commit] = patch.stem
        else:
            empty.append(patch.file.name)
    return builder.commit, names, tuple(empty)


def _conflict(builder: Builder, patch: IncomingPatch, tag: str, flags: Sequence[str]) -> KvtoolError:
    """Return the error for a patch that does not apply."""
    said = patch.in_file(builder.apply_error(patch.diff, *flags) or "")
    reasons = [line.removeprefix("error: ") for line in said.splitlines() if line.startswith("error: ")]
    why = "; ".join(reasons) or said.strip()
    if "corrupt patch" in said or "without header" in said or "unrecognized input" in said:
        hint = "write the patch again with git diff or diff -u"
        return UsageError(f"{patch.file} is not a valid patch", why=why, next_step=hint)
    if builder.apply_error(patch.diff, *flags, "--reverse") is None:
        hint = "leave it out, or name an older upstream: --base TAG"
        return ConflictError(f"{patch.file}: {tag} with the patches before it has this change already", next_step=hint)
    hint = "correct it, or name the upstream that it was made for: --base TAG"
    return ConflictError(f"{patch.file} does not apply to {tag} with the patches before it", why=why, next_step=hint)


def refuse_missing(scratch: Scratch, plan: ForkPlan) -> None:
    """Raise UsageError if the fork's repository does not have some files of its own tree."""
    wanted = {blob.id: blob.path for blob in plan.new_files} | {
        entry.id: path
        for patch in plan.patches
        for path, entry in patch.changes.items()
        if entry.mode not in ("", "160000")
    }
    told = scratch.run("cat-file", "--batch-check", input="".join(f"{blob}\n" for blob in wanted)).stdout.splitlines()
    missing = [wanted[line.split()[0]] for line in told if line.endswith(" missing")]
    if missing:
        raise UsageError(
            f"the fork's repository lacks {len(missing)} of its files, such as {missing[0]}",
            why="it is a partial clone or an incomplete copy",
            next_step="complete it: git fetch --refetch --no-filter; or name a complete clone",
        )


def import_changes(
    context: SeriesContext,
    scratch: Scratch,
    base: str,
    plan: ForkPlan,
    why: Callable[[ForkPatch], str],
    each: Callable[[str, Sequence[ForkPatch]], Iterable[ForkPatch]],
) -> tuple[tuple[Change, ...], tuple[ImportedPatch, ...]]:
    """Return the files that add the planned series to an empty project, and the patches.

    Raises KvtoolError if the files do not produce the fork's tree, or if an export would change them.

    base: the id of the commit of unpatched upstream
    why: returns the reason of a patch for series.toml
    each: iterates over patches while it shows a progress bar
    """
    first, made = _build(scratch, base, plan, each)
    mails = _mails(scratch, first, made)
    project, taken, found = context.project, set[str](), list[Change]()
    imported: list[ImportedPatch] = []
    for (patch, _), mail in zip(made, mails, strict=True):
        name = new_id(patch.name_for_id or patch.subject, taken)
        taken.add(name)
        found.append(Change(f"patches/{name}.patch", "add", mail))
        counts = (patch.carried, patch.is_partial, len(patch.changes))
        imported.append(ImportedPatch(name, patch.action, patch.subject, patch.commit, *counts))
    for blob in plan.new_files:
        content = scratch.raw("cat-file", "blob", blob.id)
        found.append(Change(f"cpp/{blob.path}", "add", content, blob.mode == "100755"))
    reasons = {patch.id: why(source) for patch, (source, _) in zip(imported, made, strict=True)}
    series = edit_series(read_text(project.series), list(reasons), reasons, set())
    found.append(Change("patches/series.toml", "change", series.encode()))
    lock = pin(read_text(project.lock), context.lock, plan.base.tag)
    found.append(Change("patches/upstream.lock", "change", lock.encode()))
    prove_changes(context, scratch, context.lock.upstream(plan.base.tag), base, plan.tree, found)
    return tuple(found), tuple(imported)


def _build(
    scratch: Scratch,
    base: str,
    plan: ForkPlan,
    each: Callable[[str, Sequence[ForkPatch]], Iterable[ForkPatch]],
) -> tuple[str, list[tuple[ForkPatch, str]]]:
    """Commit the new files, then each patch. Return the commit of the new files, and the patches with their commits."""
    builder = Builder(scratch, base)
    builder.commit_blobs(plan.new_files)
    first, made = builder.commit, list[tuple[ForkPatch, str]]()
    for patch in each("making the patches", plan.patches):
        builder.put_entries(patch.changes)
        if commit := builder.commit_index(patch.message, author=patch):
            made.append((patch, commit))
    if builder.tree != plan.tree:
        differ = scratch.changed(builder.tree, plan.tree)
        why = f"these files differ: {', '.join(differ[:5])}"
        raise KvtoolError("the patches do not reproduce the fork's tree", why=why, next_step="please report this")
    return first, made


def _mails(scratch: Scratch, first: str, made: Sequence[tuple[ForkPatch, str]]) -> list[bytes]:
    """Return the patch file of each commit. Runs git once."""
    if not made:
        return []
    place = scratch.place()
    flags = ("--quiet", "--numbered-files", *MAIL_FLAGS, *DIFF_FLAGS)
    scratch.run("format-patch", *flags, "-o", place, f"{first}..{made[-1][1]}")
    files = sorted(place.iterdir(), key=lambda file: int(file.name))
    return [file.read_bytes() for file in files]
