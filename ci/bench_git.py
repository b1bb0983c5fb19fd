"""Measure how much slower kvtool is than plain git.

Usage: python ci/bench_git.py [--rounds N] [--json FILE]

All runs are on the locked upstream and on one machine. They alternate, so a disturbance of the machine affects all of
them:

  am              git am of the series, in a checkout of the same tree
  apply           kvtool apply, in a checkout of the same tree
  am-fresh        fetch upstream from kvtool's cache into an empty folder, check it out, and run git am
  apply-fresh     kvtool apply without an existing tree, the whole command
  dry-run         kvtool rebase --dry-run onto another tag (--onto)
  apply-command, dry-run-command    the same two commands with the start of Python, which apply and dry-run leave out

Prints the medians, and their ratios to the medians of git am, as JSON. The exit code is 1 if the ratio of apply,
apply-fresh or dry-run is larger than --bar.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvtool import cli

ROOT = Path(__file__).resolve().parents[1]
PAIRS = {
    "apply": "am",
    "apply-fresh": "am-fresh",
    "dry-run": "am",
    "apply-command": "am",
    "dry-run-command": "am",
}
HELD = ("apply", "apply-fresh", "dry-run")  # the runs that are compared with the target --bar


def run(*argv: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a command that must succeed, and return its output."""
    settings = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    done = subprocess.run([str(part) for part in argv], cwd=cwd, env=settings, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(str(part) for part in argv)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def kvtool(*args: str | Path) -> str:
    return run(sys.executable, "-m", "kvtool", *args)


def git(*args: str | Path, cwd: Path) -> str:
    """Run git without the user's settings, as kvtool does, and with a fixed author."""
    env = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_PAGER": "cat"}
    me = {f"GIT_COMMITTER_{key}": value for key, value in (("NAME", "bench"), ("EMAIL", "bench@localhost"))}
    return run("git", "-c", "gc.auto=0", *args, cwd=cwd, env={**env, **me})


def inside(*args: str | Path) -> None:
    """Run kvtool in this process, in which all modules are already imported."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        code = cli.run([str(part) for part in args])
    if code:
        sys.exit(f"error: kvtool {args[0]}: {said.getvalue()}")


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class Bench:
    """Make the folders of the benchmark, once for all rounds.

    They are a project without patches (applying it resets the tree to plain upstream), a mailbox with the patches, and
    a checkout for git am.
    """

    def __init__(self, work: Path, onto: str) -> None:
        self.work, self.onto = work, onto
        self.cache = Path(json.loads(kvtool("fetch", "--json", "--project", ROOT))["cache"]) / "upstream.git"
        self.empty = work / "empty"
        (self.empty / "patches").mkdir(parents=True)
        (self.empty / "patches/series.toml").touch()
        shutil.copy(ROOT / "patches/upstream.lock", self.empty / "patches")
        self.tree, self.plain, self.fresh = work / "tree", work / "plain", work / "fresh"
        self.apply(ROOT)
        kvtool("export", "--mailbox", work / "mails", "--project", ROOT, "--tree", self.tree, "--quiet")
        self.mails = sorted((work / "mails").iterdir())
        self.state = json.loads((self.tree / ".git/kvtool/state.json").read_text())
        self.base = self.state["base"]
        self.clone(self.plain)

    def apply(self, project: Path, tree: Path | None = None, how: Callable[..., object] = kvtool) -> None:
        how("apply", "--quiet", "--project", project, "--tree", tree or self.tree)

    def clone(self, place: Path) -> None:
        place.mkdir()
        git("init", "--quiet", ".", cwd=place)
        ref = f"refs/kvtool/upstream/{self.state['tag']}"
        git("fetch", "--quiet", "--no-tags", self.cache, f"{ref}:refs/heads/base", cwd=place)
        git("checkout", "--quiet", "-B", "work", "base", cwd=place)

    def am(self, place: Path) -> None:
        git("am", "--quiet", *self.mails, cwd=place)

    def round(self) -> dict[str, float]:
        """Run each command once. The time to restore the state between two commands does not count."""
        git("checkout", "--quiet", "-B", "work", self.base, cwd=self.plain)
        self.apply(self.empty)
        for place in (self.fresh, self.work / "fresh-tree"):
            shutil.rmtree(place, ignore_errors=True)
        times = {"am": timed(lambda: self.am(self.plain)), "apply": timed(lambda: self.apply(ROOT, how=inside))}
        self.apply(self.empty)
        times["apply-command"] = timed(lambda: self.apply(ROOT))
        ids = [git("rev-parse", "HEAD^{tree}", cwd=place) for place in (self.plain, self.tree)]
        if ids[0] != ids[1]:
            sys.exit(f"error: git am and kvtool apply gave different trees: {ids}")
        times["am-fresh"] = timed(lambda: (self.clone(self.fresh), self.am(self.fresh)))
        times["apply-fresh"] = timed(lambda: self.apply(ROOT, self.work / "fresh-tree"))
        if self.onto:
            rebase = ("rebase", self.onto, "--dry-run", "--quiet", "--project", ROOT, "--tree", self.tree)
            times["dry-run"] = timed(lambda: inside(*rebase))
            times["dry-run-command"] = timed(lambda: kvtool(*rebase))
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--onto", default="", help="tag for the dry run; the series must apply to it, and it must be in the cache"
    )
    parser.add_argument("--bar", type=float, default=2.0, help="largest allowed ratio to the time of git am")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtool-bench-") as name:
        bench = Bench(Path(name), given.onto)
        bench.round()  # fill the system's cache of files
        rounds = [bench.round() for _ in range(given.rounds)]
    medians = {what: statistics.median(times[what] for times in rounds) for what in rounds[0]}
    ratios = {what: medians[what] / medians[against] for what, against in PAIRS.items() if what in medians}
    document = {"tag": bench.state["tag"], "rounds": given.rounds, "patches": len(bench.mails), "bar": given.bar}
    document |= {
        "seconds": {k: round(v, 3) for k, v in medians.items()},
        "ratio": {k: round(v, 2) for k, v in ratios.items()},
    }
    print(json.dumps(document, indent=2))
    if given.json:
        given.json.write_text(json.dumps({**document, "all": rounds}, indent=2) + "\n")
    sys.exit(any(ratios.get(what, 0.0) > given.bar for what in HELD))


if __name__ == "__main__":
    main()
