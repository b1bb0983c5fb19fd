"""Test the projects that kvtool init makes, with this series or empty, from the first apply to a rebase."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtool.commands import init
from tests.conftest import Tiny, git

ROOT = Path(__file__).parents[2]


def copy_pages(root: Path) -> None:
    """Copy the guides from this repository."""
    for page in init._PAGES:
        (root / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / page, root / page)


def made(project: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch, *options: str) -> Path:
    root = project.root.parent / "mine"
    ran = kvtool("init", root, *options, "--json")
    assert ran.code == 0, ran
    monkeypatch.chdir(root)
    return root


def test_init_copies_this_series(project: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root = made(project, kvtool, monkeypatch)
    assert Tiny(root, project.upstream).snapshot() == project.snapshot()
    assert kvtool("apply", "--json").json["head"] == kvtool("apply", "--project", project.root, "--json").json["head"]
    assert kvtool("export", "--check").code == 0
    assert "make check" in (root / ".github/workflows/kvtool.yml").read_text()


def test_empty_project_gets_first_patch(project: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root = made(project, kvtool, monkeypatch, "--empty")
    verified = kvtool("verify", "--quick", "--json")
    assert verified.code == 2 and "nothing to verify" in verified.json["error"]["what"]
    assert kvtool("apply", "--json").code == 0
    tree = root / "llama.cpp"
    assert git(tree, "rev-parse", "HEAD^{tree}") == git(project.upstream, "rev-parse", "v1^{tree}")
    assert kvtool("lint").code == 0
    (tree / "src/a.cpp").write_text((tree / "src/a.cpp").read_text().replace("x + 5", "x + 55"))
    (tree / "src/mine.cpp").write_text("int mine;\n")
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "add fifty")
    assert kvtool("export").code == 0
    assert [p.name for p in (root / "patches").glob("*.patch")] == ["add-fifty.patch"]
    assert (root / "cpp/src/mine.cpp").read_text() == "int mine;\n"
    ran = kvtool("rebase", "v2", "--json")
    assert ran.code == 0, ran
    shutil.rmtree(root / "cpp")  # git does not clone empty folders, so cpp/ may be missing
    assert kvtool("canary", "v1", "--to", "rebase").code == 0
    assert "x + 55" in (tree / "src/a.cpp").read_text() and "a comment on top" in (tree / "src/a.cpp").read_text()


def test_empty_and_fully_merged_series_rebase(project: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect that kvtool handles an empty range of commits, for which git has no range-diff."""
    root = made(project, kvtool, monkeypatch, "--empty")
    tree = root / "llama.cpp"
    assert kvtool("apply").code == kvtool("rebase", "v2").code == kvtool("rebase", "v1").code == 0
    (tree / "src/a.cpp").write_text((tree / "src/a.cpp").read_text().replace("x + 8", "x + 88"))
    git(tree, "commit", "-qam", "eight")
    assert kvtool("export").code == 0
    ran = kvtool("rebase", "v2", "--json")
    assert ran.code == 0 and ran.json["patches"][0]["outcome"] == "merged"
    assert kvtool("status", "--json").json["state"] == "clean"


def test_gitattributes_change_no_byte(project: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root = made(project, kvtool, monkeypatch)
    picture = b"\x89PNG\r\n\x1a\n\0"
    (root / "cpp/docs").mkdir()
    (root / "cpp/docs/a.png").write_bytes(picture)
    git(root, "init", "-q")
    git(root, "-c", "core.autocrlf=true", "-c", "core.safecrlf=false", "add", "-A")
    stored = subprocess.run(["git", "cat-file", "blob", ":cpp/docs/a.png"], cwd=root, capture_output=True).stdout
    assert stored == picture


def test_user_ignore_file_keeps_patches(
    project: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = made(project, kvtool, monkeypatch)
    (tmp_path / "ignored").write_text("*.patch\n*.orig\n")
    git(root, "init", "-q")
    git(root, "-c", f"core.excludesFile={tmp_path / 'ignored'}", "add", ".")
    assert {"patches/flag.patch", "patches/use.patch"} <= set(git(root, "ls-files").split())


@pytest.mark.parametrize("options", [(), ("--empty",), ("--empty", "--remote", "x/zlib")], ids=str)
def test_pages_have_valid_links(
    project: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    copy_pages(project.root)
    root = made(project, kvtool, monkeypatch, *options)
    pages = list(root.rglob("*.md"))
    assert {str(page.relative_to(root)) for page in pages} >= {*init._PAGES, "README.md"}
    for page in pages:
        links = re.findall(r"\]\((?!https?:)([^)#]*)", page.read_text())
        assert all((page.parent / target).exists() for target in links), page
    assert "[" in (root / "patches/README.md").read_text()


def test_existing_guide_is_kept(project: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_pages(project.root)
    guide = project.root.parent / "mine/docs/guides/follow-upstream.md"
    guide.parent.mkdir(parents=True)
    guide.write_text("mine\n")
    made(project, kvtool, monkeypatch)
    assert guide.read_text() == "mine\n" and (guide.parent / "submit-a-patch.md").exists()


def test_existing_files_are_not_touched(project: Tiny, kvtool: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/Makefile").write_text("mine\n")
    ran = kvtool("init", tmp_path / "mine", "--json")
    assert ran.code == 2 and "Makefile" in ran.json["error"]["what"]
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["Makefile"]
    (tmp_path / "mine/Makefile").rename(tmp_path / "mine/README.md")
    assert kvtool("init", tmp_path / "mine").code == 0
    assert (tmp_path / "mine/README.md").read_text() == "mine\n", "the files of a new repository stay"
    (tmp_path / "file").touch()
    assert kvtool("init", tmp_path / "file" / "x").code == 1


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("options", "proof"), [((), "kvtool verify --cpu --quick"), (("--empty",), "nothing to verify")]
)
def test_created_makefile(
    project: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], proof: str
) -> None:
    (project.root / "cpp/tools/kv-check").mkdir(parents=True)
    (project.root / "cpp/tools/kv-check/kv-check.cpp").write_text("int main() {}\n")
    made(project, kvtool, monkeypatch, *options)
    command = f"KVTOOL={sys.executable} -m kvtool"
    ran = subprocess.run(["make", "check", command], capture_output=True, text=True, env=os.environ)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = subprocess.run(["make", "-n", "verify"], capture_output=True, text=True).stdout
    assert "kvtool build --cpu" in said and proof in said
    assert "make canary" in subprocess.run(["make"], capture_output=True, text=True).stdout
