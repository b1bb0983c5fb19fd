"""Write a folded series back into patches/ and cpp/: what changes, whether it is right, and all of it or nothing.

The new patches/ and cpp/ are first put together in a scratch directory and applied from there; only if that gives the
tree that was exported are the project's files replaced. A journal (export.json in the tree) names the files, so that an
export that was killed half way can be run again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from pathlib import Path

import tomlkit
from tomlkit.items import AoT

from kvtool.errors import DiskError, UsageError
from kvtool.gitcmd import Git
from kvtool.project import Project
from kvtool.tree.fold import Folded, FoldedPatch
from kvtool.tree.mailbox import DIFF_FLAGS, MAIL_FLAGS, Mail, parse_diff, parse_mail
from kvtool.tree.replay import Builder, Replayed, replay
from kvtool.tree.series import Series, Step, load_patches, load_series, new_files, read_text
from kvtool.tree.worktree import kvtool_dir, write_json
from kvtool.upstream.lock import Lock


@dataclass(frozen=True)
class Change:
    """A file of the project that the tree says differently. action: add | change | remove; content None: remove."""

    path: str
    action: str
    content: bytes | None
    executable: bool = False


def changes(project: Project, git: Git, folded: Folded, series: Series, scratch: Path) -> tuple[Change, ...]:
    """Everything that has to change in the project for it to say what the tree says.

    In the order to write it in: new files before series.toml names them, old ones go after it no longer does, so that
    the project can be read at every moment.
    """
    found = [*_cpp_changes(project, git, folded), *_patch_changes(project, git, folded, series, scratch)]

    def turn(change: Change) -> tuple[int, str]:
        return (2 if change.content is None else int(change.path == "patches/series.toml")), change.path

    return tuple(sorted(found, key=turn))


# --- cpp/ --------------------------------------------------------------------------------------------------------


def _cpp_changes(project: Project, git: Git, folded: Folded) -> list[Change]:
    ours = {file.path: file for file in new_files(project.cpp)}
    names = "".join(f"{file.source.absolute()}\n" for file in ours.values())
    ids = git.run("hash-object", "--no-filters", "--stdin-paths", input=names).stdout.split() if ours else []
    known = dict(zip(ours, ids, strict=True))
    found: list[Change] = []
    for blob in folded.files:
        executable = blob.mode == "100755"
        same_mode = os.name == "nt" or (blob.path in ours and ours[blob.path].executable == executable)
        if known.get(blob.path) == blob.id and same_mode:
            continue
        content = git.run("cat-file", "blob", blob.id).stdout.encode("utf-8", "surrogateescape")
        found.append(Change(f"cpp/{blob.path}", "change" if blob.path in ours else "add", content, executable))
    there = {blob.path for blob in folded.files}
    return found + [Change(f"cpp/{path}", "remove", None) for path in ours if path not in there]


# --- patches/ ----------------------------------------------------------------------------------------------------


def _patch_changes(project: Project, git: Git, folded: Folded, series: Series, scratch: Path) -> list[Change]:
    steps = {step.patch.id: step for step in series.steps}
    found: list[Change] = []
    added: dict[str, str] = {}  # new id -> subject
    order: list[str] = []
    for patch in folded.patches:
        step = steps.get(patch.id)
        name = patch.id or _new_id(patch.subject, {*steps, *added})
        order.append(name)
        if step is None:
            added[name] = patch.subject
            found.append(Change(f"patches/{name}.patch", "add", as_mail(git, patch.commit)))
        elif not says_the_same(git, step, patch, scratch):
            found.append(Change(f"patches/{step.patch.file}", "change", as_mail(git, patch.commit)))
    gone = [steps[name] for name in folded.emptied if name in steps]
    found += [Change(f"patches/{step.patch.file}", "remove", None) for step in gone]
    text = read_text(project.series)
    fresh = _edit_series(text, order, added, {step.patch.id for step in gone})
    if fresh != text:
        found.append(Change("patches/series.toml", "change", fresh.encode()))
    return found


def _new_id(subject: str, taken: set[str]) -> str:
    """A patch id from a subject: lower-case words and dashes, unique."""
    stem = "-".join(re.findall(r"[a-z0-9]+", subject.lower()))[:40].strip("-") or "patch"
    number, name = 1, stem
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    return name


def as_mail(git: Git, commit: str) -> bytes:
    """A commit as a patch file, the same bytes everywhere."""
    done = git.run("format-patch", "--stdout", "-1", *MAIL_FLAGS, *DIFF_FLAGS, commit)
    return done.stdout.encode("utf-8", "surrogateescape")


def says_the_same(git: Git, step: Step, patch: FoldedPatch, scratch: Path) -> bool:
    """Whether the file as it is already gives this commit, so that it need not change (its line numbers may be old)."""
    fresh = parse_mail(as_mail(git, patch.commit), patch.subject)
    if _identity(fresh) != _identity(step.mail) or _headings(fresh) != _headings(step.mail):
        return False
    place = scratch / f"check-{patch.commit}"
    place.mkdir()
    builder = Builder(git, place, patch.parent)
    if not builder.apply(step.mail.diff):
        return False
    builder.commit_index("check\n")
    return builder.tree == git.line("rev-parse", f"{patch.commit}^{{tree}}")


def _identity(mail: Mail) -> tuple[object, ...]:
    date: object = mail.date
    with contextlib.suppress(ValueError, TypeError):
        when = parsedate_to_datetime(mail.date)
        date = (when.timestamp(), when.utcoffset())
    return mail.name, mail.email, date, mail.message


def _headings(mail: Mail) -> list[tuple[str, str]]:
    return [(hunk.path, hunk.heading) for file in parse_diff(mail.diff) for hunk in file.hunks]


def _edit_series(text: str, order: list[str], added: dict[str, str], gone: set[str]) -> str:
    """series.toml with new entries in their place, gone ones removed, the rest reordered only if it must be."""
    doc = tomlkit.parse(text)
    table = doc.get("patch")
    entries = list(table) if isinstance(table, AoT) else []
    listed = [str(entry["id"]) for entry in entries]
    kept = [name for name in listed if name in order]
    if not added and not gone and kept == [name for name in order if name in listed]:
        return text
    by_id = dict(zip(listed, entries, strict=True))
    for name, subject in added.items():
        entry = tomlkit.table()
        entry.add("id", name)
        entry.add("why", subject)
        entry.add("tests", tomlkit.array())
        by_id[name] = entry
    result = list(order)
    for name in listed:  # patches that this upstream skips stay behind the one they followed
        if name not in order and name not in gone:
            before = listed[: listed.index(name)]
            at = max((result.index(b) + 1 for b in before if b in result), default=0)
            result.insert(at, name)
    fresh = [_entry_text(by_id[name]) for name in result]
    if result[: len(listed)] == listed:  # the usual case: the file grows at its end, and nothing in it moves
        return "\n\n".join([text.rstrip("\n"), *fresh[len(listed) :]]).lstrip("\n") + "\n"
    if table is not None:
        doc.remove("patch")
    return "\n\n".join([tomlkit.dumps(doc).rstrip("\n"), *fresh]).lstrip("\n") + "\n"


def _entry_text(entry: tomlkit.items.Table) -> str:
    tables = tomlkit.aot()
    tables.append(entry)
    doc = tomlkit.document()
    doc.append("patch", tables)
    return tomlkit.dumps(doc).strip("\n")


# --- check and write ---------------------------------------------------------------------------------------------


def rehearse(
    project: Project, git: Git, lock: Lock, series: Series, base: str, todo: tuple[Change, ...], scratch: Path
) -> tuple[Series, Replayed]:
    """Put the project together as it will be, in scratch, and apply it there."""
    copy = replace(project, root=scratch, patches=scratch / "patches", cpp=scratch / "cpp")
    copy.patches.mkdir()
    for patch in load_patches(project):
        shutil.copy2(project.patches / patch.file, copy.patches)
    shutil.copy2(project.series, copy.patches)
    for file in new_files(project.cpp):
        target = copy.cpp / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file.source, target)
    for change in todo:
        put_file(scratch / change.path, change)
    fresh = load_series(copy, lock, series.upstream)
    place = scratch / "replay"
    place.mkdir()
    return fresh, replay(git, base, fresh, place)


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


def digest_of(path: Path) -> str | None:
    """SHA-256 of a file, None when there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def journal_of(tree: Path) -> Path:
    return kvtool_dir(tree) / "export.json"


def explained(project: Project) -> bool:
    """Whether an export was interrupted, and every file it was to write is either as it was or as it is to be."""
    journal = journal_of(project.tree)
    if not journal.exists():
        return False
    pairs = json.loads(journal.read_text(encoding="utf-8"))
    return all(digest_of(project.root / path) in (old, new) for path, (old, new) in pairs.items())


def write(project: Project, todo: tuple[Change, ...]) -> None:
    """Replace the project's files; after a failure they are as they were. The caller removes the journal."""
    old = {change.path: (project.root / change.path) for change in todo}
    before = {name: path.read_bytes() if path.is_file() else None for name, path in old.items()}
    pairs = {
        change.path: (
            digest_of(old[change.path]),
            hashlib.sha256(change.content).hexdigest() if change.content is not None else None,
        )
        for change in todo
    }
    for left in (*project.patches.glob(".*.kvtool-new"), *project.cpp.rglob(".*.kvtool-new")):
        left.unlink()
    write_json(journal_of(project.tree), pairs)
    done: list[Change] = []
    try:
        for change in todo:
            done.append(change)
            put_file(old[change.path], change)
    except BaseException as err:
        for change in done:
            put_file(old[change.path], replace(change, content=before[change.path]))
        journal_of(project.tree).unlink()
        if isinstance(err, OSError):
            raise DiskError("cannot write the project", why=str(err), next_step="nothing was changed") from err
        raise


def write_mailbox(git: Git, base: str, head: str, folder: Path) -> tuple[Path, ...]:
    """Write base..head as numbered mails that `git am` takes. Replaces an earlier mailbox there, and nothing else."""
    if folder.exists() and (not folder.is_dir() or any(not _numbered(p) for p in folder.iterdir())):
        raise UsageError(
            f"{folder} holds something else than a mailbox", next_step="name a directory that is empty or not there yet"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.iterdir():
        left.unlink()
    git.run("format-patch", "--quiet", "-o", folder.absolute(), *MAIL_FLAGS, *DIFF_FLAGS, f"{base}..{head}")
    return tuple(sorted(folder.iterdir()))


def _numbered(path: Path) -> bool:
    return bool(re.fullmatch(r"\d{4}-.*\.patch", path.name))
