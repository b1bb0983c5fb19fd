"""Test kvtool rebase: every outcome of a patch, and the table with all patches on all upstream tags."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tiny, git
from tests.repo.rebases import ALL, current, everything, outcomes, release

# --- outcomes -----------------------------------------------------------------------------------------------------


def test_success_moves_tree_and_lock(applied: Tiny, kvtool: Any) -> None:
    before = applied.snapshot()
    ran = kvtool("rebase", "v2", "--json")
    assert ran.code == 0, ran
    assert (ran.json["outcome"], ran.json["previous"], ran.json["files"]) == (
        "rebased",
        "v1",
        [{"path": "patches/upstream.lock", "action": "change"}],
    )
    changed = {name for name, content in applied.snapshot().items() if before[name] != content}
    assert changed == {"patches/upstream.lock"} and current(applied) == "v2"
    assert kvtool("status", "--json").json["state"] == "clean"
    assert git(applied.tree, "branch", "--show-current") == "kvtool/v2"
    assert "x + 88" in (applied.tree / "src/a.cpp").read_text()
    assert Path(ran.json["range_diff"]).read_text().count(" = ") == 3
    # kvtool apply must make the same ids in a new folder
    assert kvtool("apply", "--tree", applied.root / "again", "--json").json["head"] == ran.json["head"]


def test_rebase_creates_missing_tree(project: Tiny, kvtool: Any) -> None:
    assert kvtool("rebase", "v2").code == 0
    assert kvtool("status", "--json").json["tag"] == "v2"


def test_mirror_with_only_new_tag(project: Tiny, kvtool: Any, tmp_path: Path) -> None:
    clone = tmp_path / "new-only"
    git(tmp_path, "clone", "-q", "--depth=1", "--branch=v2", f"file://{project.upstream}", str(clone))
    assert git(clone, "tag") == "v2"
    ran = kvtool("rebase", "v2", "--dry-run", "--mirror", clone, "--json")
    assert (ran.code, ran.json["outcome"]) == (0, "rehearsed"), ran


def test_rebase_to_current_is_unchanged(applied: Tiny, kvtool: Any) -> None:
    before = everything(applied)
    ran = kvtool("rebase", "v1", "--json")
    assert (ran.code, ran.json["outcome"]) == (0, "unchanged")
    assert everything(applied) == before


def test_rebase_round_trip(applied: Tiny, kvtool: Any) -> None:
    before = applied.snapshot()
    assert kvtool("rebase", "v2").code == 0
    assert kvtool("rebase", "v1").code == 0
    assert applied.snapshot() == before


def test_merged_upstream_gets_until(applied: Tiny, kvtool: Any) -> None:
    release(applied, "v3", ("src/b.h", "    bool two;\n", "    bool two;\n    bool dynamic;\n"))
    ran = kvtool("rebase", "v3", "--json")
    assert ran.code == 0, ran
    assert outcomes(ran) == {"flag": "merged", "use": "applied"}
    series = tomllib.loads((applied.root / "patches/series.toml").read_text())
    assert [patch.get("until") for patch in series["patch"]] == ["v3", None]
    assert (applied.root / "patches/series.toml").read_text().startswith("# the series\n")
    # older upstream tags still need the patch
    assert kvtool("apply", "v1", "--json").json["patches"][0]["outcome"] == "applied"


def test_patch_in_older_upstream_gets_from(applied: Tiny, kvtool: Any) -> None:
    release(applied, "v3")
    assert kvtool("rebase", "v3").code == 0
    file = applied.tree / "src/a.cpp"
    file.write_text(file.read_text().replace("x + 88", "x + 8"))  # as it is in v1
    git(applied.tree, "commit", "-qam", "undo")
    assert kvtool("export").code == 0
    ran = kvtool("rebase", "v1", "--json")
    assert outcomes(ran) == {"flag": "applied", "use": "applied", "undo": "merged"}
    series = tomllib.loads((applied.root / "patches/series.toml").read_text())
    assert [patch.get("from") for patch in series["patch"]] == [None, None, "v2"]


def test_renamed_file_is_followed(applied: Tiny, kvtool: Any) -> None:
    git(applied.upstream, "mv", "src/a.cpp", "src/core.cpp")
    release(applied, "v3")
    ran = kvtool("rebase", "v3", "--json")
    assert ran.code == 0, ran
    assert "+++ b/src/core.cpp" in (applied.root / "patches/use.patch").read_text()
    assert "grown" in (applied.tree / "src/core.cpp").read_text()


def test_hunk_is_kept_from_nearer_twin(applied: Tiny, kvtool: Any) -> None:
    """Use a similar function that is nearer, and in which the hunk would also fit with one line of context.

    The merge must find the right place, and report it.
    """
    text = (applied.upstream / "src/a.cpp").read_text()
    at = text.index("int function_2")
    twin = "int twin(int x) {\n    int y = x + 2;\n    return y;\n}\n\n"
    head = "".join(f"// line {n}\n" for n in range(3))
    (applied.upstream / "src/a.cpp").write_text(head + text[:at] + twin + text[at:])
    release(applied, "v3")
    ran = kvtool("rebase", "v3", "--json")
    assert ran.code == 0, ran
    assert "int twin(int x) {\n    int y = x + 2;\n" in (applied.tree / "src/a.cpp").read_text()
    assert "int function_2(int x) {\n    int y = x + 2 + grown();\n" in (applied.tree / "src/a.cpp").read_text()


def wrong_place(project: Tiny) -> None:
    """Add a patch in function_5 whose lines upstream has removed.

    With one line of context, git finds them in another function.
    """
    old = "int function_5(int x) {\n    int y = x + 5;\n    return y;\n"
    project.add_patch("astray", ("src/a.cpp", old, old.replace("    return", "    use(y);\n    return")))
    release(
        project,
        "v3",
        ("src/a.cpp", old, "int function_5(int x) {\n    return x + 5;\n"),
        ("src/a.cpp", "int function_6(int x) {\n    int y = x + 6;\n", "int function_6(int x) {\n    int y = x + 5;\n"),
    )


def test_wrong_function_is_conflict(project: Tiny, kvtool: Any) -> None:
    wrong_place(project)
    ran = kvtool("rebase", "v3", "--dry-run", "--keep-going", "--json")
    assert ran.code == 3
    assert outcomes(ran) == {"flag": "applied", "use": "applied", "astray": "conflict"}
    (hunk,) = ran.json["patches"][2]["failed"]
    assert (hunk["cause"], hunk["header"].split(" @@ ")[1]) == ("changed lines", "int function_5(int x) {")


def test_apply_refuses_wrong_place(project: Tiny, kvtool: Any) -> None:
    wrong_place(project)
    assert kvtool("apply").code == 0
    before = everything(project)
    ran = kvtool("apply", "v3", "--json")
    assert (ran.code, ran.json["outcome"]) == (3, "conflict"), ran
    assert outcomes(ran) == {"flag": "applied", "use": "applied", "astray": "conflict"}
    assert "function_5" in ran.json["error"]["why"] and "kvtool rebase v3" in ran.json["error"]["next"]
    assert everything(project) == before


def test_report_shows_missing_lines(applied: Tiny, kvtool: Any) -> None:
    release(applied, "v3", ("src/b.h", "    bool two;\n", "    bool twenty;\n"))
    ran = kvtool("rebase", "v3", "--dry-run", "--json", "--mirror", applied.upstream)
    (hunk,) = ran.json["patches"][0]["failed"]
    assert (hunk["path"], hunk["number"], hunk["total"]) == ("src/b.h", 1, 1)
    assert hunk["expected"] == ["    bool two;", "    bool three;"]
    assert hunk["wanted"] == ["    bool two;", "    bool dynamic;", "    bool three;"]
    assert hunk["found"] == ["    bool twenty;", "    bool three;"]
    assert hunk["behind"].endswith("upstream: v3")
    human = kvtool("rebase", "v3", "--dry-run", "--mirror", applied.upstream)
    assert "+    bool twenty;" in human.out and "upstream: v3" in human.out


def squashed(project: Tiny, tag: str, folder: Path) -> Path:
    """Make a repository with one upstream tag and no history."""
    shutil.copytree(project.upstream, folder, ignore=shutil.ignore_patterns(".git"))
    git(folder, "init", "-q")
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-qm", "squashed")
    git(folder, "tag", tag)
    return folder


def test_unlisted_tag_from_shallow_mirror(applied: Tiny, kvtool: Any, tmp_path: Path) -> None:
    tree = release(applied, "b12345", ("src/a.cpp", "x + 7", "x + 77"), lock=False)
    mirror = squashed(applied, "b12345", tmp_path / "mirror")
    git(applied.upstream, "tag", "-d", "b12345")
    before = everything(applied)
    ran = kvtool("rebase", "b12345", "--mirror", mirror, "--dry-run", "--json")
    assert (ran.code, ran.json["outcome"]) == (0, "rehearsed")
    assert everything(applied) == before
    ran = kvtool("rebase", "b12345", "--mirror", mirror, "--json")
    assert ran.code == 0, ran
    lock = tomllib.loads((applied.root / "patches/upstream.lock").read_text())
    assert lock["current"] == "b12345"
    assert lock["upstream"][-1] == {"tag": "b12345", "date": "2026-01-02", "tree": tree, "sources": []}
    assert kvtool("status", "--json").json["state"] == "clean"


def test_conflict_without_history(applied: Tiny, kvtool: Any, tmp_path: Path) -> None:
    release(applied, "v3", ("src/b.h", "    bool two;\n", "    bool twenty;\n"), lock=False)
    mirror = squashed(applied, "v3", tmp_path / "mirror")
    ran = kvtool("rebase", "v3", "--dry-run", "--json", "--mirror", os.path.relpath(mirror))
    assert "no history" in ran.json["patches"][0]["failed"][0]["behind"]
    assert ran.json["error"]["next"].startswith(f"kvtool rebase v3 --mirror {mirror} stops there")


def test_assumed_older_upstream_is_reported(
    applied: Tiny, kvtool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied.add_patch("new", ("src/a.cpp", "x + 4;", "x + 4 + 0;"), extra='from = "v1"\ngroup = "new"\n')
    release(applied, "other", ("src/a.cpp", "x + 7", "x + 77"), lock=False)
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2020-01-01T00:00:00Z")
    mirror = squashed(applied, "other", tmp_path / "mirror")
    ran = kvtool("rebase", "other", "--dry-run", "--json", "--mirror", mirror)
    assert (ran.code, outcomes(ran)["new"]) == (0, "skipped")
    assert "other older than v1, by its number or its date (2020-01-01)" in ran.json["older"]
    assert "leave out new. If it is newer" in ran.json["older"]
    assert ran.json["older"] in " ".join(kvtool("rebase", "other", "--dry-run", "--mirror", mirror).out.split())


@pytest.mark.parametrize("tag", ["v9", "../x", "-x", "a..b"])
def test_nonexistent_tag_is_refused(applied: Tiny, kvtool: Any, tag: str) -> None:
    before = everything(applied)
    ran = kvtool("rebase", "--json", "--", tag)
    assert ran.code == 2, ran
    assert everything(applied) == before


def test_unknown_tag_offline(project: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (project.root / "patches/upstream.lock").read_text()
    remote = "http://127.0.0.1:9/llama.cpp"
    (project.root / "patches/upstream.lock").write_text(text.replace(str(project.root / "no-remote"), remote))
    monkeypatch.delenv("KVTOOL_UPSTREAM")
    for form in ((), ("--dry-run",)):
        ran = kvtool("rebase", "v9", *form, "--json")
        assert ran.code == 9 and ran.json["error"]["what"] == f"{remote}: it could not be reached"
        assert "--mirror PATH" in ran.json["error"]["next"] and "llama.cpp v1" not in ran.err


def test_limits_apply_to_new_upstream(project: Tiny, kvtool: Any) -> None:
    project.add_patch("late", ("src/b.h", "bool one;", "bool one; // new"), extra='from = "v2"\n')
    project.add_patch("early", ("src/b.h", "bool three;", "bool three; // old"), extra='until = "v2"\n')
    ran = kvtool("rebase", "v2", "--json")
    assert ran.code == 0, ran
    assert outcomes(ran) == {"flag": "applied", "use": "applied", "late": "applied", "early": "skipped"}
    assert "bool one; // new" in (project.tree / "src/b.h").read_text()


def test_newly_wanted_patch_stays_in_function(project: Tiny, kvtool: Any) -> None:
    """Rebase to the first tag that needs a patch. No older version of the patched files exists, so git cannot merge.

    kvtool applies the patch by its context, and checks that it is in the function that the patch file names.
    """
    project.add_patch("late", ("src/a.cpp", "x + 4;", "x + 4 + 0;"), extra='from = "v3"\n')
    recorded = next(line for line in (project.root / "patches/late.patch").read_text().splitlines() if "@@ " in line)
    head = recorded.rpartition("@@ ")[2]
    release(project, "v3", ("src/a.cpp", head, head.replace("(", "_renamed(", 1)))
    assert kvtool("apply").code == 0
    ran = kvtool("rebase", "v3", "--json")
    assert ran.code == 3 and f"recorded in {head!r}, landed in" in ran.json["error"]["why"], ran
    assert kvtool("rebase", "--abort").code == 0


def test_unlisted_upstream_decides_by_content(applied: Tiny, kvtool: Any) -> None:
    """Use an upstream before the next tag of the lock.

    It may already have the change that a patch's `from` or `until` is for.
    """
    release(
        applied, "between", ("src/b.h", "bool one;", "bool uno;"), ("docs/ünï cödé.md", "naïve", "small"), lock=False
    )
    release(applied, "v3", ("scripts/run.sh", "exit 0", "exit 1"))
    assert kvtool("rebase", "v3").code == 0
    for name, path, old, new in (
        ("needed", "src/b.h", "bool uno;", "bool uno; // shared"),
        ("later", "scripts/run.sh", "exit 1", "exit 1 # later"),
        ("feature", "src/b.h", "bool three;", "bool three; // more"),
        ("instead", "src/a.cpp", "x + 7;", "x + 7 + 0;"),
    ):
        file = applied.tree / path
        assert file.read_text().count(old) == 1
        file.write_text(file.read_text().replace(old, new))
        git(applied.tree, "commit", "-qam", name)
    assert kvtool("export").code == 0
    listed = applied.root / "patches/series.toml"
    text = listed.read_text()
    for name, limit in (
        *((name, 'from = "v3"') for name in ("needed", "later", "instead")),
        ("feature", 'from = "v3"\ngroup = "feature"'),
    ):
        text = text.replace(f'id = "{name}"\n', f'id = "{name}"\n{limit}\n')
    listed.write_text(text)
    applied.add_patch("before", ("src/a.cpp", "x + 4;", "x + 4 + 0;"), extra='until = "v3"\n')
    applied.add_patch("placeless", ("docs/ünï cödé.md", "naïve", "little"), extra='until = "v3"\n')
    applied.add_patch("gone", ("src/a.cpp", "x + 3;", "x + 3 + 0;"), extra='until = "v2"\n')
    ran = kvtool("rebase", "between", "--mirror", applied.upstream, "--json")
    assert ran.code == 0, ran
    told = {patch["id"]: patch for patch in ran.json["patches"]}
    applied_there = {name for name, patch in told.items() if patch["outcome"] == "applied"}
    assert applied_there == {"flag", "use", "needed", "before"}
    assert "is needed from v3 on, the next tag of the lock, and it applies here" in told["needed"]["moved"][0]
    assert "is not needed from v3 on, the next tag of the lock, and it" in told["before"]["moved"][0]
    assert "is not needed from v3 on, the next tag of the lock, and it does not apply" in told["placeless"]["moved"][0]
    assert not any(told[name]["moved"] for name in ("flag", "later", "feature", "instead", "gone"))
    series = tomllib.loads((applied.root / "patches/series.toml").read_text())
    limits = {patch["id"]: (patch.get("from"), patch.get("until")) for patch in series["patch"]}
    assert limits["needed"] == ("between", None) and limits["later"] == ("v3", None)
    assert limits["placeless"] == (None, "between") and limits["before"] == (None, "v3")
    assert "bool uno; // shared" in (applied.tree / "src/b.h").read_text()
    again = kvtool("rebase", "v3", "--json")
    assert outcomes(again) == dict.fromkeys(told, "applied") | dict.fromkeys(("before", "placeless", "gone"), "skipped")


def test_own_commit_on_target_is_kept(applied: Tiny, kvtool: Any) -> None:
    git(applied.tree, "branch", "kvtool/v2", "HEAD~1")
    git(applied.tree, "checkout", "-q", "kvtool/v2")
    git(applied.tree, "commit", "-q", "--allow-empty", "-m", "mine")
    git(applied.tree, "checkout", "-q", "kvtool/v1")
    ran = kvtool("rebase", "v2", "--json")
    assert ran.code == 4 and "kvtool/v2" in ran.json["error"]["what"]
    assert git(applied.tree, "log", "-1", "--format=%s", "kvtool/v2") == "mine" and current(applied) == "v1"


# --- the span -----------------------------------------------------------------------------------------------------


def test_table_of_all_upstreams(stopped: Tiny, kvtool: Any, tmp_path: Path) -> None:
    text = (stopped.root / "patches/upstream.lock").read_text()
    gone = '\n[[upstream]]\ntag = "v0"\ndate = "2025-01-01"\ntree = "{}"\nsources = []\n'
    (stopped.root / "patches/upstream.lock").write_text(text + gone.format("a" * 40))
    before = everything(stopped)
    table = tmp_path / "span.md"
    ran = kvtool("rebase", "--dry-run", "--keep-going", "--all", "--markdown", table, "--json")
    assert ran.code == 3, ran
    assert {row["tag"]: row["outcome"] for row in ran.json["rows"]} == {
        "v1": "complete",
        "v2": "complete",
        "v3": "conflict",
        "v0": "failed",
    }
    assert {p["id"]: p["outcome"] for p in ran.json["rows"][2]["patches"]} == {
        **ALL,
        "block": "conflict",
        "more": "blocked",
    }
    assert "| v3 | 2026-02-01 | 1 | 2 | conflict (1 of 1) | blocked by block | 1 |" in table.read_text()
    assert everything(stopped) == before
    human = kvtool("rebase", "--dry-run", "--keep-going", "--all").out
    assert "conflict" in human and "v3 block: src/a.cpp hunk 1 of 1" in human


def test_json_documents(stopped: Tiny, kvtool: Any) -> None:
    dry = kvtool("rebase", "v2", "--dry-run", "--keep-going", "--json").json
    assert list(dry) == [
        "command",
        "ok",
        "tag",
        "previous",
        "tree",
        "outcome",
        "head",
        "stopped_at",
        "range_diff",
        "files",
        "patches",
        "seconds",
        "filled_in",
        "mirror",
        "older",
        "astray",
        "kept",
        "upstream",
    ]
    assert sorted(dry["patches"][0]) == sorted(
        ["id", "outcome", "commit", "hunks", "added", "removed", "failed", "blocked_by", "moved", "lost", "seconds"]
    )
    assert json.dumps(dry)
