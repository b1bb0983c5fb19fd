"""Test kvtool bisect with the tags of the lock, and with single commits as git bisect run calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtool.commands.bisect import Trial, Verdict, search
from tests.conftest import Tiny, git

# --- the search alone ---------------------------------------------------------------------------------------------


def found(verdicts: str) -> tuple[str, str, str, int]:
    """Return the last good tag, the first bad tag, the suspects and the number of trials.

    verdicts: one letter for each upstream tag: g (good), b (bad) or s (skip)
    """
    words = {"g": Verdict.GOOD, "b": Verdict.BAD, "s": Verdict.SKIP}
    tags = [f"{n:02}" for n in range(len(verdicts))]
    asked: list[str] = []

    def attempt(tag: str) -> Trial:
        asked.append(tag)
        return Trial(tag, words[verdicts[int(tag)]], "", "", (), 0.0)

    good, bad, trials = search(tags, attempt, (attempt(tags[0]), attempt(tags[-1])))
    assert len(asked) == len(set(asked)) == len(trials), "none is tried twice"
    assert [trial.tag for trial in trials] == sorted(asked)
    return tags[good], tags[bad], " ".join(tags[good + 1 : bad]), len(asked)


def test_search_finds_every_border() -> None:
    for border in range(1, 17):
        last, first, suspects, trials = found("g" * border + "b" * (17 - border))
        assert (int(last), int(first), suspects) == (border - 1, border, "") and trials <= 7


def test_skipped_upstream_is_suspect() -> None:
    assert found("ggggsbbbb") == ("03", "05", "04", 5)
    assert found("gsssb")[:3] == ("00", "04", "01 02 03")
    assert found("gsgsbsb")[:3] == ("02", "04", "03")
    assert found("gb") == ("00", "01", "", 2)


# --- over the lock ------------------------------------------------------------------------------------------------


@pytest.fixture
def long(project: Tiny) -> Tiny:
    """Add the upstream tags v1 to v9. v5 changes lines of the patch `use`, and v8 changes lines of the patch `flag`."""
    for number in range(3, 10):
        source = project.upstream / "src/a.cpp"
        text = source.read_text() + f"// {number}\n"
        source.write_text(text.replace("x + 2;", "2 + x;") if number == 5 else text)
        if number == 8:
            header = project.upstream / "src/b.h"
            header.write_text(header.read_text().replace("bool two", "int two"))
        date = f"2026-02-{number:02}T00:00:00"
        subprocess.run(
            ["git", "-C", project.upstream, "commit", "-qam", f"number {number}", "--date", date],
            env={**os.environ, "GIT_COMMITTER_DATE": date},
            check=True,
        )
        git(project.upstream, "tag", f"v{number}")
        with (project.root / "patches/upstream.lock").open("a") as lock:
            tree = git(project.upstream, "rev-parse", f"v{number}^{{tree}}")
            lock.write(
                f'[[upstream]]\ntag = "v{number}"\ndate = "2026-02-{number:02}"\ntree = "{tree}"\nsources = []\n'
            )
    return project


def test_bisect_over_lock(long: Tiny, kvtool: Any) -> None:
    before = long.snapshot()
    ran = kvtool("bisect", "use", "--good", "v1", "--bad", "v9", "--json")
    assert ran.code == 0, ran
    assert (ran.json["last_good"], ran.json["first_bad"], ran.json["suspects"]) == ("v4", "v5", [])
    assert "src/a.cpp hunk 1 of 1" in ran.json["why"]
    assert len(ran.json["trials"]) < 7 and {t["verdict"] for t in ran.json["trials"]} == {"good", "bad"}
    assert long.snapshot() == before and not long.tree.exists()
    out = kvtool("bisect", "flag", "--bad", "v9").out
    assert "v8 is the first where flag fails, v7 the last where it holds" in out


def test_bisect_from_new_to_old(long: Tiny, kvtool: Any) -> None:
    lock = long.root / "patches/upstream.lock"
    lock.write_text(lock.read_text().replace('current = "v1"', 'current = "v9"'))
    series = long.root / "patches/series.toml"
    series.write_text("")
    (long.root / "cpp/src/new.cpp").unlink()
    work = long.root.parent / "new-work"
    git(long.upstream, "worktree", "add", "-q", "--detach", str(work), "v9")
    source = work / "src/a.cpp"
    source.write_text(source.read_text().replace("2 + x;", "3 + x;"))
    git(work, "commit", "-qam", "new: a patch")
    mail = git(work, "format-patch", "--stdout", "-1", "-U1", "--full-index", "-k", strip=False)
    (long.root / "patches/new.patch").write_text(mail)
    series.write_text('[[patch]]\nid = "new"\nwhy = "w"\n')
    ran = kvtool("bisect", "new", "--good", "v9", "--bad", "v1", "--json")
    assert (ran.json["last_good"], ran.json["first_bad"]) == ("v5", "v4")
    assert [t["tag"] for t in ran.json["trials"]] == sorted((t["tag"] for t in ran.json["trials"]), reverse=True)


def test_missing_upstream_is_skipped(long: Tiny, kvtool: Any) -> None:
    git(long.upstream, "tag", "-d", "v5")
    ran = kvtool("bisect", "use", "--bad", "v9", "--json")
    assert ran.code == 0, ran
    assert (ran.json["last_good"], ran.json["first_bad"], ran.json["suspects"]) == ("v4", "v6", ["v5"])
    assert next(t for t in ran.json["trials"] if t["tag"] == "v5")["verdict"] == "skip"
    assert "were skipped: v5" in kvtool("bisect", "use", "--bad", "v9").out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("use", "--good", "v6", "--bad", "v9"), "use is not good on v6"),
        (("use", "--good", "v1", "--bad", "v4"), "use is not bad on v4"),
        (("use", "--good", "v1", "--bad", "v1"), "same upstream"),
        (("nope", "--bad", "v9"), "no patch 'nope'"),
        (("use", "--bad", "v77"), "v77"),
        (("use",), "--bad is missing"),
    ],
)
def test_bisect_rejects_wrong_endpoints(long: Tiny, kvtool: Any, args: tuple[str, ...], says: str) -> None:
    ran = kvtool("bisect", *args, "--json")
    assert ran.code == 2 and says in str(ran.json["error"]), ran


# --- one commit, for git bisect run -------------------------------------------------------------------------------


def at(kvtool: Any, long: Tiny, patch: str, revision: str) -> tuple[int, str]:
    ran = kvtool("bisect", patch, "--at", revision, "--mirror", long.upstream, "--json")
    assert "verdict" in ran.json or ran.code == 128, ran
    return ran.code, ran.json.get("verdict") or ran.json["error"]["why"] or ran.json["error"]["what"]


def test_exit_code_is_verdict(long: Tiny, kvtool: Any) -> None:
    assert at(kvtool, long, "use", "v5~1") == (0, "good")
    assert at(kvtool, long, "use", "v5") == (1, "bad")
    series = long.root / "patches/series.toml"
    text = series.read_text()
    series.write_text(text.replace('id = "use"\n', 'id = "use"\nuntil = "v7"\n'))
    assert at(kvtool, long, "use", "v7") == (125, "skip"), "its date is not before that of v7"
    assert at(kvtool, long, "use", "v6") == (1, "bad")
    series.write_text(text)


def test_patch_after_failing_patch_is_skipped(long: Tiny, kvtool: Any) -> None:
    long.add_patch("behind", ("src/a.cpp", "x + 2 + grown();", "x + 2 + grown() + more;"))
    assert at(kvtool, long, "use", "v5") == (1, "bad")
    assert at(kvtool, long, "behind", "v5") == (125, "skip")


def test_other_errors_exit_128(long: Tiny, kvtool: Any, monkeypatch: Any, tmp_path: Path) -> None:
    assert at(kvtool, long, "use", "no-such-commit")[0] == 128
    assert at(kvtool, long, "nope", "v5")[0] == 128
    assert kvtool("bisect", "use", "--at", "HEAD", "--bad", "v9").code == 128
    assert kvtool("bisect", "use", "--at", "HEAD", "--mirror", tmp_path / "none").code == 128
    monkeypatch.setattr("kvtool.replay.rebase_plan.SeriesContext.rehearse", lambda *_, **__: 1 / 0)
    ran = kvtool("bisect", "use", "--at", "v5", "--mirror", long.upstream, "--json")
    assert ran.code == 128 and "ZeroDivisionError" in ran.json["error"]["what"], ran


def test_git_bisect_run_finds_commit(long: Tiny, kvtool: Any, tmp_path: Path) -> None:
    assert kvtool("fetch").code == 0
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(long.upstream), str(clone))
    git(clone, "bisect", "start", "v9", "v1")
    command = [sys.executable, "-m", "kvtool", "bisect", "use", "--at", "HEAD", "--mirror", ".", "--project", long.root]
    said = git(clone, "bisect", "run", *(str(part) for part in command))
    assert f"{git(clone, 'rev-parse', 'v5')} is the first bad commit" in said


def test_bisect_in_shallow_clone(long: Tiny, kvtool: Any, tmp_path: Path) -> None:
    clone = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth", "2", f"file://{long.upstream}", str(clone))
    ran = kvtool("bisect", "use", "--at", "HEAD~1", "--mirror", clone)
    assert ran.code == 1, ran
