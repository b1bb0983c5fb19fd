#!/usr/bin/env python3
"""Rebase random series onto random upstreams, and check that nothing is lost, doubled or written wrongly."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvtool.gitcmd import Scratch
from kvtool.replay.apply import Builder, Commit, commits_of
from kvtool.replay.merge import cherry_pick, has_every_hunk
from kvtool.replay.rebase_plan import lost_changes
from kvtool.series.source import squeezed

FILES = ("src/a.cpp", "src/b.h", "src/tool.py", "docs/notes.txt")


@dataclass
class Case:
    """Hold one random case. `made` is the number of lines that were made so far."""

    chance: random.Random
    made: int = 0
    patches: list[dict[str, list[str]]] = field(default_factory=list)

    def fresh(self, path: str) -> str:
        """Return a line that occurs nowhere else."""
        self.made += 1
        n = self.made
        kinds = [
            f"    int value_{n} = {n};",
            f"    call_{n}(x, {n});",
            f"    // remark number {n}",
            f"    x += f_{n}(y);",
        ]
        return self.chance.choice(kinds) if path.endswith((".cpp", ".h")) else f"    item_{n} = {n}"

    def upstream(self) -> dict[str, list[str]]:
        """Return the first version of upstream: functions with some equal lines and some unique lines."""
        files: dict[str, list[str]] = {}
        for path in FILES:
            rows = ["#include <x.h>", ""]
            for n in range(self.chance.randint(5, 10)):
                rows += [f"int {path[4]}_{n}(int x) {{"]
                for _ in range(self.chance.randint(3, 9)):
                    same = self.chance.choice(["    x++;", "    if (x) {", "    }", "", "    return x;"])
                    rows.append(same if self.chance.random() < 0.3 else self.fresh(path))
                rows += ["}", ""]
            files[path] = rows
        return files

    def edit(self, path: str, rows: list[str]) -> list[str]:
        """Return the lines with one random edit."""
        rows, at = list(rows), self.chance.randrange(1, max(len(rows) - 1, 2))
        kind = self.chance.random()
        if kind < 0.55:
            rows[at:at] = [self.fresh(path) for _ in range(self.chance.randint(1, 3))]
        elif kind < 0.8:
            rows[at : at + self.chance.randint(1, 2)] = [self.fresh(path)]
        else:
            del rows[at : at + self.chance.randint(1, 2)]
        return rows

    def series(self, files: dict[str, list[str]]) -> None:
        """Make some patches, each on top of the one before."""
        for _ in range(self.chance.randint(1, 4)):
            files = dict(files)
            for path in self.chance.sample(FILES, self.chance.randint(1, 2)):
                for _ in range(self.chance.randint(1, 3)):
                    files[path] = self.edit(path, files[path])
            self.patches.append(files)

    def spoil(self, row: str) -> str:
        """Return a line with other white space."""
        ways = [
            row + " ",
            row.replace(" = ", "  = "),
            "  " + row,
            row.replace("    ", "\t", 1),
            row.replace(", ", ",  "),
        ]
        return self.chance.choice(ways)

    def take(self, base: dict[str, list[str]], files: dict[str, list[str]]) -> dict[str, list[str]]:
        """Return the upstream after it took over a part of a patch, perhaps changed or at another place."""
        mine = self.chance.choice(self.patches)
        files = dict(files)
        for path in FILES:
            known = set(base[path])
            rows = list(files[path])
            for n, row in enumerate(mine[path]):
                if row in known or row in rows or not row.strip() or self.chance.random() < 0.3:
                    continue
                above = next((r for r in reversed(mine[path][:n]) if r in rows), None)
                at = rows.index(above) + 1 if above is not None else 1
                if self.chance.random() < 0.15:
                    at = self.chance.randrange(len(rows))
                rows.insert(at, self.spoil(row) if self.chance.random() < 0.5 else row)
            files[path] = rows
        return files

    def newer(self, files: dict[str, list[str]]) -> dict[str, list[str]]:
        """Return the newer version of upstream."""
        base = files
        if self.chance.random() < 0.6:
            files = self.take(base, files)
        files = dict(files)
        for path in self.chance.sample(FILES, self.chance.randint(1, len(FILES))):
            for _ in range(self.chance.randint(0, 2)):
                files[path] = self.edit(path, files[path])
            if self.chance.random() < 0.04:
                files[path] = [row.replace("    ", "  ") for row in files[path]]
            if self.chance.random() < 0.02:
                files[path] = [row + "\r" for row in files[path]]
            if self.chance.random() < 0.1:  # move a block of lines
                start = self.chance.randrange(len(files[path]))
                block = files[path][start : start + 6]
                del files[path][start : start + 6]
                at = self.chance.randrange(len(files[path]) + 1)
                files[path][at:at] = block
        if self.chance.random() < 0.1:
            files["src/moved.cpp"] = files.pop("src/a.cpp")
        return files


class Repository:
    """Hold a bare repository into which trees are written."""

    def __init__(self, place: Path) -> None:
        self.git = Scratch.create(place / "repo.git")
        self.builder: Builder | None = None

    def commit(self, files: dict[str, list[str]], parent: str = "", message: str = "x") -> str:
        stream = ["commit refs/heads/made\n", "committer A <a@x> 1767225600 +0000\n"]
        stream += [f"data {len(message.encode())}\n{message}\n", f"from {parent}\n" if parent else "", "deleteall\n"]
        for path, rows in files.items():
            text = "\n".join(rows) + "\n"
            stream.append(f"M 100644 inline {path}\ndata {len(text.encode())}\n{text}\n")
        if not parent:
            self.git.run("update-ref", "-d", "refs/heads/made", check=False)
        self.git.run("fast-import", "--quiet", "--force", input="".join(stream))
        return self.git.line("rev-parse", "refs/heads/made")

    def read(self, tree: str) -> dict[str, list[str]]:
        names = sorted(self.git.paths(tree))
        texts = self.git.blobs(*(f"{tree}:{name}" for name in names))
        return {name: text.decode().split("\n")[:-1] for name, (_, text) in zip(names, texts, strict=True)}


def counts(files: dict[str, list[str]]) -> Counter[bytes]:
    return Counter(squeezed(row.encode()) for rows in files.values() for row in rows)


def check(seed: int, place: Path) -> tuple[Counter[str], list[str]]:
    """Return the outcomes of the patches for one seed, and the rules that were violated."""
    case = Case(random.Random(seed))
    base = case.upstream()
    case.series(base)
    newer = case.newer(base)
    repo = Repository(place)
    start = repo.commit(base)
    head = start
    for number, files in enumerate(case.patches):
        head = repo.commit(files, head, f"patch {number}")
    origins = commits_of(repo.git, start, head)
    onto = repo.commit(newer)
    builder = Builder(repo.git, onto)
    outcomes, violations = Counter[str](), list[str]()
    theirs = counts(newer)
    for origin in origins:
        before = counts(repo.read(builder.tree))
        done = cherry_pick(builder, origin)
        if done.tree is None:
            outcomes["conflict"] += 1
            if not done.failed or not all(hunk.reason and hunk.cause for hunk in done.failed):
                violations.append(f"seed {seed}: {origin.subject}: a conflict without a reason: {done.failed}")
            continue
        after = counts(repo.read(done.tree))
        for problem in _problems(repo, origin, before, after, theirs, done.tree == builder.tree, builder):
            violations.append(f"seed {seed}: {origin.subject}: {problem}")
        diff = builder.diff_of(builder.tree, done.tree)
        lost = bool(diff) and bool(lost_changes(origin.diff, diff))
        lost = lost and not has_every_hunk(repo.git, origin, builder.tree, done.tree)
        outcomes["merged" if done.tree == builder.tree else "lost" if lost else "applied"] += 1
        if done.tree != builder.tree and not lost:
            violations += _missing(repo, origin, before, after, f"seed {seed}: {origin.subject}")
        builder.commit_index(origin.message, author=origin, tree=done.tree)
        violations += _written(repo, builder, f"seed {seed}: {origin.subject}")
    return outcomes, violations


def _changed_lines(repo: Repository, origin: Commit) -> tuple[Counter[bytes], Counter[bytes]]:
    """Return how often a patch adds and removes each line. White space is ignored."""
    old, new = counts(repo.read(origin.parent)), counts(repo.read(origin.id))
    return new - old, old - new


def _problems(
    repo: Repository,
    origin: Commit,
    before: Counter[bytes],
    after: Counter[bytes],
    theirs: Counter[bytes],
    is_merged: bool,
    builder: Builder,
) -> Iterator[str]:
    added, _ = _changed_lines(repo, origin)
    for line, count in added.items():
        if len(line) > 6 and after[line] > max(before[line], count):
            yield f"{line!r} is there {after[line]} times; upstream has it {theirs[line]} times"
        if is_merged and len(line) > 6 and not after[line]:
            yield f"{line!r} is called upstream's, and is not there"


def _missing(repo: Repository, origin: Commit, before: Counter[bytes], after: Counter[bytes], where: str) -> list[str]:
    added, removed = _changed_lines(repo, origin)
    found = [f"{where}: {line!r} is lost" for line in added if len(line) > 6 and not after[line]]
    return found + [
        f"{where}: {line!r} is not removed" for line in removed if len(line) > 6 and after[line] > before[line]
    ]


def _written(repo: Repository, builder: Builder, where: str) -> list[str]:
    """Check a commit as kvtool apply would: apply it to its parent as a patch with one line of context."""
    head = builder.commit
    parent = repo.git.resolve(f"{head}^")
    if parent is None or repo.git.resolve(f"{parent}^{{tree}}") == builder.tree:
        return []
    again = Builder(repo.git, parent)
    diff = again.diff_of(parent, head)
    if again.apply(diff) and again.write_tree() == builder.tree:
        return []
    return [f"{where}: the written patch does not give the tree again"]


def run(first: int, count: int) -> tuple[Counter[str], list[str]]:
    """Check some seeds. Return the outcomes and the violations."""
    outcomes, violations = Counter[str](), list[str]()
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory(prefix="kvtool-random-") as name:
            counted, found = check(seed, Path(name))
        outcomes += counted
        violations += found
    return outcomes, violations


def main() -> int:
    """Print the outcomes and every violation. The exit code is 1 if there is a violation."""
    first, count = (
        (int(word) for word in (*sys.argv[1:], "0", "1000")[:2]) if len(sys.argv) != 2 else (int(sys.argv[1]), 1)
    )
    began = time.monotonic()
    outcomes, violations = run(first, count)
    for violation in violations:
        print(violation)
    told = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
    print(f"{count} series from seed {first}: {told}; {len(violations)} violations; {time.monotonic() - began:.0f} s")
    return int(bool(violations))


if __name__ == "__main__":
    sys.exit(main())
