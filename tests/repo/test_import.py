"""Test kvtool import with git forks: for every kind of history, the imported series must give the tree of the fork."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvtool.series.changes import put_file
from tests.conftest import Tiny, git, write_files
from tests.repo.rebases import outcomes


@pytest.fixture
def fork(project: Tiny, tmp_path: Path) -> Path:
    """Clone upstream at v1, with a branch main."""
    place = tmp_path / "my-fork"
    git(tmp_path, "clone", "-q", str(project.upstream), str(place))
    git(place, "checkout", "-q", "-B", "main", "v1")
    git(place, "remote", "rename", "origin", "upstream")
    return place


@pytest.fixture
def empty(project: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tiny:
    """Make an empty project for the same upstream."""
    root = tmp_path / "mine"
    assert kvtool("init", root, "--empty").code == 0
    monkeypatch.chdir(root)
    return Tiny(root, project.upstream)


def commit(place: Path, message: str, *edits: tuple[str, str, str], **added: str) -> str:
    """Replace texts in files, add files, and commit.

    In the name of an added file, two underscores stand for a slash.
    """
    for path, old, new in edits:
        text = (place / path).read_text()
        assert text.count(old) == 1, (path, old)
        (place / path).write_text(text.replace(old, new))
    write_files(place, {name.replace("__", "/"): text for name, text in added.items()})
    git(place, "add", "-A")
    git(place, "commit", "-q", "--allow-empty", "--allow-empty-message", "-m", message)
    return git(place, "rev-parse", "HEAD")


def imported(empty: Tiny, kvtool: Any, fork: Path, *options: str) -> Any:
    """Import a fork. Check that the series gives the fork's tree, and that an export changes nothing."""
    ran = kvtool("import", fork, *options, "--json")
    assert ran.code == 0, ran
    assert kvtool("apply").code == 0
    tree = git(fork, "rev-parse", "HEAD^{tree}")
    assert ran.json["tree"] == tree == git(empty.tree, "rev-parse", "HEAD^{tree}")
    assert git(empty.tree, "status", "--porcelain") == ""
    assert kvtool("export", "--check").code == 0
    return ran


def actions(ran: Any) -> list[tuple[str, str]]:
    return [(patch["subject"], patch["action"]) for patch in ran.json["patches"]]


def test_linear_commits_become_patches(empty: Tiny, kvtool: Any, fork: Path) -> None:
    first = commit(fork, "a: change five\n\nBecause.", ("src/a.cpp", "x + 5;", "x + 55;"), src__more__n_h="int n;\n")
    git(fork, "config", "user.name", "Bob")
    commit(fork, "new: only files", src__more__m_h="int m;\n")
    commit(fork, "b: change the header", ("src/b.h", "bool two;", "bool two; // !"), src__more__n_h="int n = 1;\n")
    ran = imported(empty, kvtool, fork)
    assert actions(ran) == [("a: change five", "kept"), ("b: change the header", "kept")]
    assert ran.json["base"] == "v1" and ran.json["only_new_files"] == 1
    assert ran.json["patches"][0]["commit"] == first
    assert (empty.root / "cpp/src/more/n_h").read_text() == "int n = 1;\n"
    assert git(empty.tree, "log", "-2", "--format=%an|%ae|%ad|%B") == git(
        fork, "log", "--format=%an|%ae|%ad|%B", "HEAD", "HEAD~2", "--no-walk"
    )
    assert 'why = "Imported from my-fork, commit ' in (empty.root / "patches/series.toml").read_text()


def test_odd_files_are_carried(empty: Tiny, kvtool: Any, fork: Path) -> None:
    (fork / "src/b.h").chmod(0o755)
    (fork / "link").symlink_to("src/a.cpp")
    (fork / ".github/workflows").mkdir(parents=True)
    (fork / ".github/workflows/mine.yml").write_text("on: push\n")
    (fork / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    (fork / "run.sh").write_text("#!/bin/sh\n")
    (fork / "run.sh").chmod(0o755)
    (fork / "crlf.txt").write_bytes(b"a\r\nb")
    (fork / 'a "name" \\ äöü').write_text("x\n")
    (fork / "vendor/x").mkdir(parents=True)
    git(fork, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},vendor/x")
    commit(fork, "odd: add files")
    git(fork, "rm", "-q", "CMakeLists.txt")
    write_files(fork, {"CMakeLists.txt/inner": "a folder\n"})
    commit(fork, "odd: a folder instead of a file")
    ran = imported(empty, kvtool, fork)
    assert ran.json["notes"] == ["submodules are carried as commit ids only: vendor/x"]
    assert (empty.tree / "link").readlink() == Path("src/a.cpp")
    assert (empty.root / "cpp/picture.png").is_file() and not (empty.root / "cpp/.github").exists()


def test_upstream_merge_keeps_movable_commits(empty: Tiny, kvtool: Any, fork: Path) -> None:
    """Merge v2, which changes line 8 of src/a.cpp and adds a first line. One file merges, and one has a conflict."""
    commit(fork, "h: change the header", ("src/b.h", "bool two;", "bool two; // !"))
    commit(fork, "a: change eight", ("src/a.cpp", "x + 8;", "x + 8 + 8;"))
    commit(fork, "a: change three", ("src/a.cpp", "x + 3;", "x + 33;"))
    assert subprocess.run(["git", "merge", "-q", "v2"], cwd=fork, capture_output=True).returncode != 0
    text = git(fork, "show", "v2:src/a.cpp", strip=False)
    (fork / "src/a.cpp").write_text(text.replace("x + 88;", "x + 888;").replace("x + 3;", "x + 33;"))
    git(fork, "commit", "-qam", "Merge v2")
    commit(fork, "a: change five", ("src/a.cpp", "x + 5;", "x + 55;"))
    before = empty.snapshot()
    dry = kvtool("import", fork, "--dry-run", "--json")
    assert dry.code == 0 and empty.snapshot() == before
    kept = git(fork, "log", "--format=%H", "--grep=a: change").split()[1:]
    told = "\n".join(dry.json["summary"])
    assert "src: " in told and all(commit[:10] in told for commit in kept), "each squashed commit is announced"
    ran = imported(empty, kvtool, fork)
    assert dry.json["patches"] == ran.json["patches"]
    assert ran.json["base"] == "v2" and actions(ran) == [
        ("h: change the header", "moved"),
        ("src: carry the changes of my-fork", "squashed"),
        ("a: change five", "kept"),
    ]
    squashed = (empty.root / "patches/src-carry-the-changes-of-my-fork.patch").read_text()
    assert "a: change eight" in squashed and "a: change three" in squashed


def test_clean_upstream_merge_keeps_commits(empty: Tiny, kvtool: Any, fork: Path) -> None:
    commit(fork, "a: change three", ("src/a.cpp", "x + 3;", "x + 33;"))
    git(fork, "merge", "-q", "--no-ff", "-m", "Merge v2", "v2")
    commit(fork, "a: change five", ("src/a.cpp", "x + 5;", "x + 55;"))
    ran = imported(empty, kvtool, fork)
    assert actions(ran) == [("a: change three", "moved"), ("a: change five", "kept")]
    assert "x + 88" in (empty.tree / "src/a.cpp").read_text()


def test_own_branch_merge_is_one_patch(empty: Tiny, kvtool: Any, fork: Path) -> None:
    git(fork, "checkout", "-qb", "topic")
    commit(fork, "a: one", ("src/a.cpp", "x + 1;", "x + 11;"))
    commit(fork, "a: two", ("src/a.cpp", "x + 2;", "x + 22;"))
    git(fork, "checkout", "-q", "main")
    commit(fork, "h: change the header", ("src/b.h", "bool two;", "bool two; // !"))
    git(fork, "merge", "-q", "--no-ff", "-m", "Merge topic", "topic")
    ran = imported(empty, kvtool, fork)
    assert actions(ran) == [("h: change the header", "kept"), ("Merge topic", "merge")]
    assert len(ran.json["patches"][1]["commits"]) == 2


def test_squash_creates_patch_per_folder(empty: Tiny, kvtool: Any, fork: Path) -> None:
    commit(fork, "a: one", ("src/a.cpp", "x + 1;", "x + 11;"), new_h="int n;\n")
    commit(fork, "cmake: two", ("CMakeLists.txt", "src/a.cpp)", "src/a.cpp src/b.cpp)"))
    commit(fork, "a: three", ("src/a.cpp", "x + 3;", "x + 33;"))
    ran = imported(empty, kvtool, fork, "--squash")
    assert actions(ran) == [
        ("the root folder: carry the changes of my-fork", "squashed"),
        ("src: carry the changes of my-fork", "squashed"),
    ]
    assert [len(patch["commits"]) for patch in ran.json["patches"]] == [1, 2]


def test_invalid_messages_are_changed(empty: Tiny, kvtool: Any, fork: Path) -> None:
    commit(fork, "same\n\nbody\n---\nmore\ndiff -u a b", ("src/a.cpp", "x + 1;", "x + 11;"))
    commit(fork, "same", ("src/a.cpp", "x + 2;", "x + 22;"))
    commit(fork, "fixup! same", ("src/a.cpp", "x + 3;", "x + 33;"))
    commit(fork, "", ("src/a.cpp", "x + 4;", "x + 44;"))
    commit(fork, "[SYCL] tag", ("src/a.cpp", "x + 5;", "x + 55;"))
    ran = imported(empty, kvtool, fork)
    subjects = [subject for subject, _ in actions(ran)]
    assert len(subjects) == len(set(subjects)) == 5 and subjects[-1] == "[SYCL] tag"


def test_base_is_named_or_found(empty: Tiny, kvtool: Any, fork: Path) -> None:
    git(fork, "tag", "-d", "v1", "v2")
    middle = commit(fork, "upstream: untagged", ("src/a.cpp", "x + 1;", "x + 11;"))
    commit(fork, "a: own", ("src/a.cpp", "x + 2;", "x + 22;"))
    ran = kvtool("import", fork, "--json", "--dry-run")
    assert ran.code == 0 and ran.json["found_by"] == "a tree of upstream.lock"
    ran = kvtool("import", fork, "--base", "v2", "--json")
    assert ran.code == 0, "only the lock has the tag: no commit can be kept"
    for file in (empty.root / "patches").glob("*.patch"):
        file.unlink()
    (empty.root / "patches/series.toml").write_text("# empty\n")
    ran = imported(empty, kvtool, fork, "--base", middle[:12])
    assert ran.json["base"] == middle and actions(ran) == [("a: own", "kept")]


def test_unknown_base_is_requested(empty: Tiny, kvtool: Any, fork: Path, tmp_path: Path) -> None:
    git(fork, "remote", "remove", "upstream")
    git(fork, "checkout", "-q", "--orphan", "other")
    commit(fork, "all at once", ("src/a.cpp", "x + 2;", "x + 22;"))
    ran = kvtool("import", fork, "--json")
    assert ran.code == 2 and "--base" in ran.json["error"]["next"]
    ran = imported(empty, kvtool, fork, "--base", "v1")
    assert actions(ran) == [("src: carry the changes of my-fork", "squashed")]
    assert "does not have v1" in ran.json["notes"][0]


def test_base_outside_fork_is_refused(empty: Tiny, kvtool: Any, fork: Path) -> None:
    commit(fork, "a: own", ("src/a.cpp", "x + 2;", "x + 22;"))
    base = git(fork, "rev-parse", "v1")
    ran = kvtool("import", fork, "--base", "upstream/HEAD", "--json")
    assert ran.code == 2 and f"--base {base[:10]}" in ran.json["error"]["next"]


@pytest.mark.parametrize("history", ["upstream's ids", "other ids"])
def test_squashed_upstream_merge_keeps_later_commits(
    empty: Tiny, kvtool: Any, fork: Path, tmp_path: Path, history: str
) -> None:
    """Add upstream's files in a commit that is not a merge, as a squashed pull request does."""
    write_files(empty.upstream, {f"src/part{n}.cpp": f"int part{n};\n" for n in range(6)})
    git(empty.upstream, "add", "-A")
    git(empty.upstream, "commit", "-qm", "parts")
    git(empty.upstream, "tag", "v3")
    if history == "other ids":
        git(fork, "checkout", "-q", "--orphan", "rewritten")
        git(fork, "commit", "-qm", "everything")
    commit(fork, "b: early", ("src/b.h", "    bool two;", "    int two;"), src__own="int own;\n")
    git(fork, "fetch", "-q", "--no-tags", "upstream")
    git(fork, "restore", "--source", "upstream/HEAD", "--staged", "--worktree", "CMakeLists.txt", "src/a.cpp")
    for n in range(6):
        git(fork, "restore", "--source", "upstream/HEAD", "--staged", "--worktree", f"src/part{n}.cpp")
    git(fork, "commit", "-qm", "Merge upstream (#7)")
    commit(fork, "part: late", ("src/part1.cpp", "int part1;", "long part1;"))
    commit(fork, "own: only", ("src/own", "int own;", "long own;"))
    ran = imported(empty, kvtool, fork, "--base", "v3", "--mirror", str(empty.upstream))
    assert actions(ran) == [("src: carry the changes of my-fork", "squashed"), ("part: late", "kept")]
    (note,) = ran.json["notes"]
    assert "(Merge upstream (#7)): 2 files differ there, and are squashed; commits after it: 2" in note
    assert ran.json["new_files"] == 1 and not (empty.root / "cpp/src/part0.cpp").exists()


def test_import_url_bundle_revision(empty: Tiny, kvtool: Any, fork: Path, tmp_path: Path) -> None:
    commit(fork, "a: own", ("src/a.cpp", "x + 2;", "x + 22;"))
    git(fork, "branch", "stable")
    commit(fork, "a: more", ("src/a.cpp", "x + 3;", "x + 33;"))
    git(fork, "bundle", "create", "-q", str(tmp_path / "fork.bundle"), "--all", "HEAD")
    for where in (f"file://{fork}", str(tmp_path / "fork.bundle")):
        ran = kvtool("import", where, "--dry-run", "--json")
        assert ran.code == 0 and len(ran.json["patches"]) == 2, ran
    ran = kvtool("import", f"file://{fork}", "--rev", "stable", "--json")
    assert ran.code == 0 and actions(ran) == [("a: own", "kept")]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "name a fork"),
        (("nowhere",), "there is no nowhere"),
        ((".",), "is not a git repository"),
        (("FORK", "--rev", "nothing"), "has no commit nothing"),
        (("FORK", "--patches", "."), "exclude each other"),
    ],
)
def test_wrong_arguments_are_explained(empty: Tiny, kvtool: Any, fork: Path, args: tuple[str, ...], words: str) -> None:
    before = empty.snapshot()
    ran = kvtool("import", *(str(fork) if arg == "FORK" else arg for arg in args), "--json")
    assert ran.code == 2 and words in ran.json["error"]["what"], ran
    assert empty.snapshot() == before


def test_folder_inside_repository_is_refused(empty: Tiny, kvtool: Any, fork: Path) -> None:
    ran = kvtool("import", fork / "src", "--json")
    assert ran.code == 2 and "inside another repository" in ran.json["error"]["why"]


def test_project_with_series_is_refused(project: Tiny, kvtool: Any, fork: Path) -> None:
    commit(fork, "a: own", ("src/a.cpp", "x + 2;", "x + 22;"))
    before = project.snapshot()
    ran = kvtool("import", fork, "--json")
    assert ran.code == 2 and "kvtool init my-fork --empty" in ran.json["error"]["next"]
    assert project.snapshot() == before


def test_existing_file_is_refused(empty: Tiny, kvtool: Any, fork: Path) -> None:
    commit(fork, "a: own", ("src/a.cpp", "x + 2;", "x + 22;"), src__new_h="int n;\n")
    write_files(empty.root, {"cpp/src/new_h": "int other;\n"})
    before = empty.snapshot()
    ran = kvtool("import", fork, "--json")
    assert ran.code == 2 and "cpp/src/new_h" in ran.json["error"]["what"]
    assert empty.snapshot() == before


def test_failed_import_leaves_nothing(empty: Tiny, kvtool: Any, fork: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(fork, "a: own", ("src/a.cpp", "x + 2;", "x + 22;"), src__new_h="int n;\n")
    before = empty.snapshot()

    def fails(path: Path, change: Any) -> None:
        if path.name == "series.toml" and change.action == "change" and b"a-own" in (change.content or b""):
            raise OSError(28, "No space left on device")
        put_file(path, change)

    monkeypatch.setattr("kvtool.commands.import_.put_file", fails)
    assert kvtool("import", fork).code == 1
    assert empty.snapshot() == before
    monkeypatch.undo()
    monkeypatch.chdir(empty.root)
    monkeypatch.setenv("KVTOOL_UPSTREAM", str(empty.upstream))
    write_files(empty.root, {"cpp/src/new_h": "int n;\n"})  # a killed import left this file
    imported(empty, kvtool, fork)


def test_killed_import_can_be_repeated(empty: Tiny, kvtool: Any, fork: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the import after each file that it writes. The earlier files stay, and nothing is undone."""
    commit(fork, "a: own", ("src/a.cpp", "x + 2;", "x + 22;"), src__new_h="int n;\n")
    commit(fork, "a: more", ("src/a.cpp", "x + 3;", "x + 33;"))
    written: list[str] = []

    def stops(path: Path, change: Any) -> None:
        if killed[0] == 0:
            return
        killed[0] -= 1
        put_file(path, change)
        written.append(change.path)
        if killed[0] == 0:
            raise KeyboardInterrupt

    for count in (1, 2, 3, 4):
        killed = [count]
        with monkeypatch.context() as patch:
            patch.setattr("kvtool.commands.import_.put_file", stops)
            assert kvtool("import", fork, "--base", "v1").code == 130
    assert written[-1] == "patches/upstream.lock"
    imported(empty, kvtool, fork)


def test_incomplete_clone_is_refused(empty: Tiny, kvtool: Any, fork: Path) -> None:
    commit(fork, "a: own", ("src/a.cpp", "x + 2;", "x + 22;"), src__new_h="int n;\n")
    blob = git(fork, "rev-parse", "HEAD:src/new_h")
    (fork / ".git/objects" / blob[:2] / blob[2:]).unlink()
    ran = kvtool("import", fork, "--json")
    assert ran.code == 2 and "src/new_h" in ran.json["error"]["what"]


def test_imported_series_rebases(empty: Tiny, kvtool: Any, fork: Path) -> None:
    commit(fork, "a: eight", ("src/a.cpp", "x + 8;", "x + 8 + 1;"))
    commit(fork, "a: three", ("src/a.cpp", "x + 3;", "x + 33;"))
    imported(empty, kvtool, fork)
    ran = kvtool("rebase", "v2", "--json")
    assert ran.code == 3 and outcomes(ran) == {"a-eight": "conflict", "a-three": "applied"}
