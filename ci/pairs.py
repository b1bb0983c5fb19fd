#!/usr/bin/env python3
"""What the rules for re-aligned lines and for lines put in at one place change, over pairs of the lock's upstreams.

    ci/pairs.py            neighbours in both directions, and the oldest and the newest
    ci/pairs.py --all      every pair

The series is moved to each upstream of a pair, and from there to the other one: once with the rules, once with git's
merge and the plain patch alone. A table goes to stdout. The upstreams have to be in the cache (kvtool rebase --dry-run
--all fetches them).
"""

from __future__ import annotations

import sys
from itertools import pairwise, permutations
from pathlib import Path

from kvtool.console import Console
from kvtool.gitcmd import Scratch, scratch_repository
from kvtool.project import find_project
from kvtool.replay import merge
from kvtool.replay.apply import Replayed
from kvtool.replay.rebase_plan import Rehearsal, SeriesContext
from kvtool.upstream.cache import Cache
from kvtool.upstream.lock import Upstream


class Pairs:
    """The series on every upstream, each made once."""

    def __init__(self, there: Scratch) -> None:
        self.context, self.there = SeriesContext(find_project(), Console(quiet=True)), there
        self.lock = self.context.lock
        self.made: dict[str, Replayed] = {}

    def move(self, old: Upstream, new: Upstream) -> Rehearsal:
        return self.context.rehearse(self.there, new, made=self.made.get(old.tag))

    def start(self, upstream: Upstream) -> None:
        """Bring the series to an upstream."""
        done = self.move(self.lock.upstream(), upstream)
        if done.complete:
            self.made[upstream.tag] = done


def wanted(tags: list[Upstream], every: bool) -> list[tuple[Upstream, Upstream]]:
    if every:
        return list(permutations(tags, 2))
    near = list(pairwise(tags))
    return [pair for a, b in (*near, (tags[0], tags[-1])) for pair in ((a, b), (b, a))]


def outcome(done: Rehearsal) -> str:
    bad = [report.id for report in done.reports if report.failed or report.lost]
    return ", ".join(bad) or "complete"


def main() -> None:
    settle = merge.resolve_trivial_conflicts
    with scratch_repository(Path(Cache(find_project().cache).repo)) as there:
        pairs = Pairs(there)
        trees: dict[str, Upstream] = {u.tree: u for u in reversed(pairs.lock.upstreams.values())}
        tags = [u for u in pairs.lock.upstreams.values() if trees[u.tree] is u]
        for upstream in tags:
            pairs.start(upstream)
        print("| from | to | git alone | with the rules | to look at |\n|---|---|---|---|---|")
        for old, new in wanted(tags, "--all" in sys.argv):
            merge.resolve_trivial_conflicts = lambda *_: None
            alone = pairs.move(old, new)
            merge.resolve_trivial_conflicts = settle
            ours = pairs.move(old, new)
            notes = [f"{report.id}: {note}" for report in ours.reports for note in report.moved if "merged" in note]
            print(f"| {old.tag} | {new.tag} | {outcome(alone)} | {outcome(ours)} | {'; '.join(notes)} |", flush=True)


if __name__ == "__main__":
    main()
