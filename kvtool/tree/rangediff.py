"""Two states of a series against each other: git's range-diff, with the patches' own names deciding what is what.

range-diff pairs commits by how alike they are, and takes a small patch of which a line changed for a removed and an
added one. Here each patch has an id (and a subject), so commits of the same name are the same patch, however different.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtool.gitcmd import Git
from kvtool.tree.mailbox import DIFF_FLAGS

_PAIR = re.compile(r"^\s*(?:\d+|-):\s+(\S+) ([=!<>])\s+(?:\d+|-):\s+(\S+) (.*)$")
_WORDS = {"=": "same", "!": "changed", "<": "removed", ">": "added"}
_SIGNS = {word: sign for sign, word in _WORDS.items()}
# With git's three lines of context every change of upstream's nearby would count as a change of the patch.
_RANGE_DIFF = ("-c", "diff.context=1", "-c", "core.abbrev=40", "range-diff", "--no-color")

Range = tuple[str, str]  # base, head


@dataclass(frozen=True)
class Pair:
    """A commit of one state and its counterpart. change: same | changed | removed | added; before, after: commit ids,
    "" where there is none; diff: for a changed one, git's diff of the two diffs, indented as git does."""

    change: str
    before: str
    after: str
    subject: str
    diff: str = ""


def range_diff(git: Git, before: Range, after: Range, name: Callable[[str, str], str]) -> tuple[Pair, ...]:
    """Which commit became which. name: of a commit by id and subject, what makes two of them the same patch."""
    ranges = (f"{before[0]}..{before[1]}", f"{after[0]}..{after[1]}")
    done = git.run(*_RANGE_DIFF, "--no-patch", *ranges)
    pairs = [_pair(found) for line in done.stdout.splitlines() if (found := _PAIR.match(line))]
    gone = {name(pair.before, pair.subject): pair for pair in pairs if pair.change == "removed"}
    taken: set[str] = set()
    joined: list[Pair] = []
    for pair in pairs:
        was = gone.get(name(pair.after, pair.subject)) if pair.change == "added" else None
        if was is not None:
            taken.add(was.before)
            pair = Pair("changed", was.before, pair.after, pair.subject)
        joined.append(replace(pair, diff=_diff(git, pair)) if pair.change == "changed" else pair)
    return tuple(pair for pair in joined if pair.change != "removed" or pair.before not in taken)


def text(pairs: tuple[Pair, ...], width: int = 10) -> str:
    """The pairs as range-diff shows them: a line each, and below it what changed in the patch."""
    lines: list[str] = []
    for pair in pairs:
        before, after = (commit[:width] or "-" * width for commit in (pair.before, pair.after))
        lines.append(f"{before} {_SIGNS[pair.change]} {after} {pair.subject}")
        if pair.diff:
            lines.append(pair.diff)
    return "\n".join(lines)


def code_diff(git: Git, before: Range, after: Range) -> str:
    """The patched files themselves: those that either state touches, so that upstream's own news stay out."""
    paths: set[str] = set()
    for base, head in (before, after):
        listed = git.run("diff", "--name-only", "--no-renames", "-z", base, head).stdout.split("\0")
        paths.update(path for path in listed if path)
    if not paths:
        return ""
    flags = [flag for flag in DIFF_FLAGS if flag not in ("-U1", "--full-index", "--binary")]
    spec = [f":(literal){path}" for path in sorted(paths)]
    return git.run("diff", *flags, before[1], after[1], "--", *spec).stdout.rstrip("\n")


def _pair(found: re.Match[str]) -> Pair:
    before, sign, after, subject = found.groups()
    return Pair(_WORDS[sign], "" if set(before) == {"-"} else before, "" if set(after) == {"-"} else after, subject)


def _diff(git: Git, pair: Pair) -> str:
    """The diff of two diffs; a creation factor this high makes git pair them whatever they hold."""
    ranges = (f"{commit}^..{commit}" for commit in (pair.before, pair.after))
    done = git.run(*_RANGE_DIFF, "--creation-factor=100000", *ranges)
    return "\n".join(line for line in done.stdout.splitlines() if not _PAIR.match(line))
