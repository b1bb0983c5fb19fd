"""Test each step of kvtool canary, its failures, and the key that stays the same for the same breakage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtool import canary
from kvtool.canary import Breakage, StepName, candidates, of_error
from kvtool.commands import verify
from kvtool.errors import BuildError
from kvtool.result import CheckOutcome
from kvtool.upstream.lock import load_lock
from kvtool.verify.checks import Finding
from kvtool.verify.report import Verified
from tests.conftest import Tiny, git
from tests.repo.fetches import fake


def release(project: Tiny, tag: str, *edits: tuple[str, str, str], date: str = "2026-03-01T00:00:00") -> None:
    """Make a new upstream tag with the edits (path, old, new). The lock does not list it."""
    for path, old, new in edits:
        file = project.upstream / path
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
    git(project.upstream, "-c", f"user.name={tag}", "commit", "-q", "--allow-empty", "-am", tag, "--date", date)
    git(project.upstream, "tag", tag)


@pytest.fixture
def good(project: Tiny, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """Add a patch with which the tiny project compiles.

    Also replace verify by a function that fails the checks in FAILING.
    """
    monkeypatch.setenv("CCACHE_DISABLE", "1")
    project.add_patch("declare", ("src/a.cpp", "int function_2(", "int grown();\nint function_2("))
    monkeypatch.setattr(verify, "verify_programs", lambda env, options: verified(env.project, options.mode))
    return project


def test_missing_tool_is_not_breakage(project: Tiny, kvtool: Any, tmp_path: Path, monkeypatch: Any) -> None:
    fake(tmp_path, monkeypatch, "git", "echo git version 2.37.7\n")
    report = tmp_path / "report.json"
    ran = kvtool("canary", "v2", "--json", "--report", report)
    assert ran.code == 7 and ran.json["error"]["code"] == "missing_tool" and not report.exists()
    assert kvtool("rebase", "v2", "--dry-run").code == 7


def test_unknown_backend_is_refused(project: Tiny, kvtool: Any) -> None:
    ran = kvtool("canary", "v2", "--backend", "rpc", "--json")
    assert (ran.code, ran.json["error"]["code"]) == (2, "usage")
    assert ran.json["error"]["what"] == "no backend is called rpc: there are cpu, metal, cuda, vulkan"


FAILING: list[str] = []


@pytest.fixture(autouse=True)
def nothing_fails() -> None:
    FAILING.clear()


def verified(project: Any, mode: str) -> Verified:
    found = [Finding(name, "kv-check", "plain", CheckOutcome.FAILED, "differs", "value 7") for name in FAILING]
    fine = Finding("kv-check/a/fa-on", "kv-check", "plain", CheckOutcome.PASSED, "same")
    return Verified(project.lock.read_text().split('"')[1], mode, Path("bin"), (), (*found, fine), None, 1.0)


def outcomes(ran: Any) -> dict[str, str]:
    return {step["name"]: step["outcome"] for step in ran.json["steps"]}


PASSED = {"fetch": "passed", "rebase": "passed", "build": "passed", "verify": "passed"}


def test_unlisted_tag_passes(good: Tiny, kvtool: Any, tmp_path: Path) -> None:
    release(good, "b100", ("src/b.h", "bool one;", "bool one; // first"))
    before = good.snapshot()
    ran = kvtool("canary", "b100", "--json", "--report", tmp_path / "out/canary.json")
    assert ran.code == 0, ran
    assert outcomes(ran) == PASSED
    assert (ran.json["schema"], ran.json["tag"], ran.json["tag_from"], ran.json["locked"]) == (1, "b100", "given", "v1")
    assert ran.json["tree"] == git(good.upstream, "rev-parse", "b100^{tree}")
    assert (ran.json["key"], ran.json["breakages"]) == ("", []) and "error" not in ran.json
    assert [patch["outcome"] for patch in ran.json["patches"]] == ["applied"] * 3
    assert json.loads((tmp_path / "out/canary.json").read_text()) == ran.json
    assert good.snapshot() == before and not good.tree.exists()


def test_unwritable_report_fails_first(good: Tiny, kvtool: Any, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "file/report.json"):
        (tmp_path / "file").write_text("")
        ran = kvtool("canary", "b100", "--json", "--report", place)
        assert ran.code == 1 and ran.json["error"]["what"] == f"cannot write {place}", ran


def test_rebased_series_is_built(good: Tiny, kvtool: Any, tmp_path: Path) -> None:
    release(good, "b100", ("src/b.h", "bool one;", "bool one; // first"))
    assert kvtool("canary", "b100", "--work", tmp_path / "work").code == 0
    tree = tmp_path / "work/llama.cpp"
    assert "bool one; // first" in (tree / "src/b.h").read_text() and "bool dynamic;" in (tree / "src/b.h").read_text()
    state = kvtool("status", "--json", "--project", tmp_path / "work").json
    assert (state["state"], state["tag"], state["locked"]) == ("clean", "b100", "b100")
    assert list((tree / "build/cpu-release").glob("liba.*"))
    kept = Tiny(tmp_path / "work", good.upstream).snapshot()
    assert kvtool("canary", "b100", "--work", tmp_path / "work", "--json").code == 2, "existing files are kept"
    assert Tiny(tmp_path / "work", good.upstream).snapshot() == kept


def test_conflict_exits_3(good: Tiny, kvtool: Any) -> None:
    release(good, "b100", ("src/a.cpp", "x + 2;", "2 + x;"))
    ran = kvtool("canary", "b100", "--json")
    assert ran.code == 3 and outcomes(ran) == {**PASSED, "rebase": "failed", "build": "skipped", "verify": "skipped"}
    assert ran.json["error"]["next"] == "kvtool rebase b100"
    (broken,) = ran.json["breakages"]
    assert (broken["step"], broken["patch"], broken["file"]) == ("rebase", "use", "src/a.cpp")
    assert "hunk 1 of 1" in broken["what"] and "function_2" in broken["where"]
    out = kvtool("canary", "b100").out
    assert ran.json["key"] in out and "use" in out


def test_key_depends_on_breakage(good: Tiny, kvtool: Any) -> None:
    release(good, "b100", ("src/a.cpp", "x + 2;", "2 + x;"))
    release(good, "b101", ("src/a.cpp", "// a comment", "// other\n\n// a comment"))
    release(good, "b102", ("src/b.h", "bool two;", "int two;"), ("src/a.cpp", "2 + x;", "x + 2;"))
    keys = [kvtool("canary", tag, "--json", "--to", "rebase").json["key"] for tag in ("b100", "b101", "b102")]
    assert keys[0] == keys[1] != keys[2] and all(keys)


def test_build_failure_exits_7_with_log(good: Tiny, kvtool: Any) -> None:
    release(good, "b100", ("src/a.cpp", "x + 5;", "x + nonsense;"))
    ran = kvtool("canary", "b100", "--json")
    assert ran.code == 7 and outcomes(ran) == {**PASSED, "build": "failed", "verify": "skipped"}
    assert "nonsense" in ran.json["steps"][2]["log"] and ran.json["breakages"][0]["step"] == "build"
    release(good, "b101", ("src/a.cpp", "x + nonsense;", "x + 1 +\n nonsense;"))
    assert kvtool("canary", "b101", "--json").json["key"] == ran.json["key"]


def test_breakage_key_ignores_build_order() -> None:
    errors = [BuildError(f"the build failed at {names}") for names in ("a.o, b.o", "b.o, a.o", "b.o")]
    assert len({of_error(StepName.BUILD, error).key for error in errors}) == 1


def test_failed_check_exits_8(good: Tiny, kvtool: Any) -> None:
    release(good, "b100")
    FAILING.extend(["kv-check/deepseek/fa-on", "kv-check/mamba/fa-on"])
    ran = kvtool("canary", "b100", "--json")
    assert ran.code == 8 and outcomes(ran) == {**PASSED, "verify": "failed"}
    (broken,) = ran.json["breakages"]
    assert broken["where"] == "kv-check/deepseek/fa-on" and "and 1 more checks" in broken["what"]
    assert Breakage(StepName.VERIFY, "", "", "kv-check/deepseek/fa-on", "other words").key == ran.json["key"]


def test_to_limits_steps(good: Tiny, kvtool: Any) -> None:
    release(good, "b100")
    ran = kvtool("canary", "b100", "--to", "rebase", "--json")
    assert ran.code == 0 and outcomes(ran) == {**PASSED, "build": "skipped", "verify": "skipped"}
    assert "holds on b100: fetch, rebase" in kvtool("canary", "b100", "--to", "rebase").out
    assert kvtool("canary", "b100", "--to", "nowhere").code == 2


# --- latest -------------------------------------------------------------------------------------------------------


def test_newest_tag_per_scheme(project: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    for tag in ("b99", "b100", "b9x", "v0.9.0", "v0.10.0", "v0.10", "gguf-v1", "master-1"):
        git(project.upstream, "tag", tag)
    seen: list[str] = []

    def told(tags: list[str]) -> tuple[str, ...]:
        seen.extend(candidates(tags))
        return ("b1",)

    monkeypatch.setattr(canary, "candidates", told)
    assert canary.newest(load_lock(project.root / "patches/upstream.lock"), str(project.upstream))[0] == "b1"
    assert seen == ["b100", "v0.10.0"] and candidates(["x"]) == ()


def test_latest_is_youngest_tag(good: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-03-01T00:00:00")
    release(good, "b100")
    release(good, "b99")
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-03-02T00:00:00")
    release(good, "v0.9.0")
    ran = kvtool("canary", "--to", "fetch", "--json")
    assert (ran.json["tag"], ran.json["tag_from"]) == ("v0.9.0", str(good.upstream))
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-03-03T00:00:00")
    release(good, "b101")
    assert kvtool("canary", "latest", "--to", "fetch", "--json").json["tag"] == "b101"


def test_latest_offline_is_last_of_lock(good: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kvtool("fetch", "v2").code == 0 and kvtool("fetch", "v1").code == 0
    monkeypatch.delenv("KVTOOL_UPSTREAM")  # the remote that the lock names does not exist
    ran = kvtool("canary", "--to", "fetch", "--json")
    assert (ran.code, ran.json["tag"], ran.json["tag_from"]) == (0, "v2", "upstream.lock") and ran.json["tag_why"]
    assert "could not be reached" in kvtool("canary", "--to", "fetch").out


def test_unavailable_tag_fails_fetch(good: Tiny, kvtool: Any) -> None:
    ran = kvtool("canary", "b77", "--json")
    assert ran.code == 2 and outcomes(ran)["fetch"] == "failed" and ran.json["tree"] == "" and ran.json["key"]
