"""kvtool fetch: every source, every kind of bad input, with message and exit code. The cache stays clean."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.conftest import FILES, Tiny, git

needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="stands in for a program with a shell script")


def cache_of(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def cached_refs(tmp_path: Path) -> list[str]:
    repo = cache_of(tmp_path) / "upstream.git"
    return git(repo, "for-each-ref", "--format=%(refname)").split() if repo.exists() else []


def assert_clean(tmp_path: Path) -> None:
    """Nothing half done is left."""
    assert cached_refs(tmp_path) == []
    left = cache_of(tmp_path) / "tmp"
    assert not left.exists() or not list(left.iterdir())


# --- mirrors ------------------------------------------------------------------------------------------------------


def test_mirror_by_path_then_cache(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    ran = kvtool("fetch", "--json")
    assert (ran.code, ran.json["tag"], ran.json["source"]) == (0, "v1", f"mirror {project.upstream}")
    assert cached_refs(tmp_path) == ["refs/kvtool/upstream/v1"]
    monkeypatch.delenv("KVTOOL_UPSTREAM")
    shutil.rmtree(project.upstream)
    again = kvtool("fetch", "--json")
    assert (again.code, again.json["source"]) == (0, "cache")
    assert again.json["commit"] == ran.json["commit"]


def test_mirror_annotated_tag_bare_and_url(project: Tiny, kvtool, tmp_path: Path) -> None:
    bare = tmp_path / "bare.git"
    git(tmp_path, "clone", "-q", "--bare", str(project.upstream), str(bare))
    ran = kvtool("fetch", "v2", "--mirror", f"file://{bare}", "--json")
    assert ran.code == 0, ran
    assert ran.json["tree"] == git(project.upstream, "rev-parse", "v2^{tree}")


def test_mirror_bundle_without_a_tag(project: Tiny, kvtool, tmp_path: Path) -> None:
    git(project.upstream, "checkout", "-q", "v1")
    bundle = tmp_path / "one.bundle"
    git(project.upstream, "bundle", "create", "-q", str(bundle), "HEAD")
    assert kvtool("fetch", "v1", "--mirror", bundle).code == 0
    ran = kvtool("fetch", "v2", "--mirror", bundle, "--json")
    assert ran.code == 2 and "no tag v2" in ran.json["error"]["what"]


def test_same_commit_whatever_the_source(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    first = kvtool("fetch", "--json").json["commit"]
    git(project.upstream, "checkout", "-q", "v1")
    bundle = tmp_path / "one.bundle"
    git(project.upstream, "bundle", "create", "-q", str(bundle), "HEAD")
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "other"))
    assert kvtool("fetch", "--mirror", bundle, "--json").json["commit"] == first


def test_unknown_tag(project: Tiny, kvtool, tmp_path: Path) -> None:
    ran = kvtool("fetch", "v99", "--json")
    assert ran.code == 2
    assert ran.json["error"]["what"] == "unknown upstream tag 'v99'"
    assert "v1, v2" in ran.json["error"]["next"]


def test_mirror_lacks_the_tag(project: Tiny, kvtool, tmp_path: Path) -> None:
    git(project.upstream, "tag", "-d", "v1")
    ran = kvtool("fetch", "--json")
    assert ran.code == 2 and "no tag v1" in ran.json["error"]["what"]
    assert_clean(tmp_path)


@pytest.mark.parametrize("kind", ["missing", "folder", "file"])
def test_mirror_is_none(project: Tiny, kvtool, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "nothing"
    if kind == "folder":
        place.mkdir()
    if kind == "file":
        place.write_text("not a bundle")
    ran = kvtool("fetch", "--mirror", place, "--json")
    assert ran.code == 2, ran
    assert "mirror" in ran.json["error"]["what"] or "not a git repository" in ran.json["error"]["what"]
    assert_clean(tmp_path)


def test_mirror_with_the_wrong_tree(project: Tiny, kvtool, tmp_path: Path) -> None:
    project.write_lock(v1="0123456789" * 4)
    ran = kvtool("fetch", "--json")
    assert ran.code == 5
    assert ran.json["error"]["code"] == "lock"
    assert "0123456789" * 4 in ran.json["error"]["why"]
    assert_clean(tmp_path)


def test_mirror_with_a_damaged_object(project: Tiny, kvtool, tmp_path: Path) -> None:
    blob = git(project.upstream, "rev-parse", "v1:src/a.cpp")
    path = project.upstream / ".git/objects" / blob[:2] / blob[2:]
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:20])
    ran = kvtool("fetch", "--json")
    assert ran.code == 5, ran
    assert_clean(tmp_path)


def test_bundle_that_is_truncated(project: Tiny, kvtool, tmp_path: Path) -> None:
    bundle = tmp_path / "one.bundle"
    git(project.upstream, "bundle", "create", "-q", str(bundle), "v1")
    bundle.write_bytes(bundle.read_bytes()[:-60])
    ran = kvtool("fetch", "--mirror", bundle, "--json")
    assert ran.code == 5, ran
    assert_clean(tmp_path)


def test_unreachable_url(project: Tiny, kvtool, tmp_path: Path) -> None:
    ran = kvtool("fetch", "--mirror", "http://127.0.0.1:9/llama.cpp", "--json")
    assert ran.code == 9 and ran.json["error"]["code"] == "network"
    assert_clean(tmp_path)


def test_lock_that_moved_on_is_fetched_anew(project: Tiny, kvtool) -> None:
    kvtool("fetch")
    git(project.upstream, "tag", "-f", "v1", "v2^{commit}")
    project.write_lock()
    ran = kvtool("fetch", "--json")
    assert ran.code == 0 and ran.json["source"].startswith("mirror")


# --- the cache ----------------------------------------------------------------------------------------------------


def test_damaged_cache_is_replaced(project: Tiny, kvtool, tmp_path: Path) -> None:
    kvtool("fetch")
    for pack in (cache_of(tmp_path) / "upstream.git/objects/pack").iterdir():
        pack.chmod(0o644)
        pack.write_bytes(b"")
    ran = kvtool("fetch", "--json")
    assert (ran.code, ran.json["source"]) == (0, f"mirror {project.upstream}")
    assert kvtool("apply").code == 0


@pytest.mark.parametrize("lost", ["src", "src/a.cpp"])
def test_cache_that_lost_an_object_is_replaced(project: Tiny, kvtool, tmp_path: Path, lost: str) -> None:
    kvtool("fetch")
    repo = cache_of(tmp_path) / "upstream.git"
    for pack in list((repo / "objects/pack").glob("*.pack")):
        aside = pack.rename(tmp_path / "aside.pack")
        with aside.open("rb") as file:
            subprocess.run(["git", "-C", str(repo), "unpack-objects", "-q"], stdin=file, check=True)
    name = git(repo, "rev-parse", f"refs/kvtool/upstream/v1:{lost}")
    (repo / "objects" / name[:2] / name[2:]).unlink()
    ran = kvtool("fetch", "--json")
    assert (ran.code, ran.json["source"]) == (0, f"mirror {project.upstream}")
    assert git(repo, "fsck", "--no-dangling") == ""


def test_leftovers_of_a_killed_fetch_go(project: Tiny, kvtool, tmp_path: Path) -> None:
    left = cache_of(tmp_path) / "tmp/killed/half"
    left.parent.mkdir(parents=True)
    left.write_text("x")
    kvtool("fetch")
    assert not list((cache_of(tmp_path) / "tmp").iterdir())
    stale = cache_of(tmp_path) / "upstream.git/refs/kvtool/upstream/v2.lock"
    stale.write_text("")
    assert kvtool("fetch", "v2").code == 0


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_cache_that_cannot_be_written(project: Tiny, kvtool, tmp_path: Path) -> None:
    cache_of(tmp_path).mkdir()
    cache_of(tmp_path).chmod(0o500)
    ran = kvtool("fetch", "--json")
    assert ran.code == 1 and ran.json["error"]["code"] == "disk"


def test_cache_is_a_file(project: Tiny, kvtool, tmp_path: Path) -> None:
    cache_of(tmp_path).write_text("")
    ran = kvtool("fetch", "--json")
    assert ran.code == 1 and ran.json["error"]["code"] == "disk" and "KVTOOL_CACHE" in ran.json["error"]["next"]


def fake(tmp_path: Path, monkeypatch, name: str, script: str) -> None:
    """A program on PATH before all others."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n" + script)
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@needs_posix
def test_disk_full(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    real = shutil.which("git")
    full = "echo 'fatal: write error: No space left on device' >&2; exit 128"
    fake(tmp_path, monkeypatch, "git", f'case "$*" in *" fetch "*) {full};; esac\nexec {real} "$@"\n')
    ran = kvtool("fetch", "--json")
    assert ran.code == 1 and ran.json["error"]["code"] == "disk" and "full" in ran.json["error"]["what"]
    assert_clean(tmp_path)


@needs_posix
def test_no_git(project: Tiny, kvtool, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ran = kvtool("fetch", "--json")
    assert ran.code == 7 and ran.json["error"]["code"] == "missing_tool"
    assert all(word in ran.json["error"]["next"] for word in ("Debian", "macOS", "Windows"))


# --- npm ----------------------------------------------------------------------------------------------------------


def npm_package(
    project: Tiny, tmp_path: Path, *, cut: bool = False, cut_bundle: int = 0, member: str = "package/up.bundle"
) -> Path:
    """A tarball as `npm pack` leaves it, with v1's tree as a git bundle."""
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
def test_npm_package(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    package = npm_package(project, tmp_path)
    use_npm(project, tmp_path, monkeypatch, package, sha512(package))
    ran = kvtool("fetch", "--json")
    assert (ran.code, ran.json["source"]) == (0, "npm package tiny 1.0.0"), ran


@needs_posix
@pytest.mark.parametrize(
    ("damage", "digest"),
    [({"cut": True}, True), ({"cut": True}, False), ({"cut_bundle": 40}, False), ({"member": "package/other"}, False)],
)
def test_npm_package_that_is_damaged(project: Tiny, kvtool, tmp_path: Path, monkeypatch, damage, digest) -> None:
    whole = npm_package(project, tmp_path)
    integrity = sha512(whole) if digest else ""
    use_npm(project, tmp_path, monkeypatch, npm_package(project, tmp_path, **damage), integrity)
    ran = kvtool("fetch", "--json")
    assert ran.code == 5, ran
    assert "tiny" in ran.json["error"]["why"]
    assert_clean(tmp_path)


@needs_posix
def test_npm_that_says_integrity_failed(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    use_npm(project, tmp_path, monkeypatch, npm_package(project, tmp_path))
    fake(tmp_path, monkeypatch, "npm", "echo 'npm error code EINTEGRITY' >&2; exit 1\n")
    assert kvtool("fetch").code == 5


@needs_posix
def test_damaged_first_source_does_not_stop_the_second(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    use_npm(project, tmp_path, monkeypatch, npm_package(project, tmp_path, cut=True))
    text = (project.root / "patches/upstream.lock").read_text()
    (project.root / "patches/upstream.lock").write_text(
        text.replace(str(project.root / "no-remote"), str(project.upstream))
    )
    ran = kvtool("fetch", "--json")
    assert (ran.code, ran.json["source"]) == (0, str(project.upstream))


@needs_posix
def test_nothing_reachable_and_nothing_cached(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    use_npm(project, tmp_path, monkeypatch, npm_package(project, tmp_path))
    fake(tmp_path, monkeypatch, "npm", "echo 'npm error network ECONNREFUSED' >&2; exit 1\n")
    ran = kvtool("fetch", "--json")
    assert ran.code == 9
    error = ran.json["error"]
    assert error["code"] == "network" and "--mirror PATH" in error["next"]
    assert "npm package tiny 1.0.0" in error["why"] and "no-remote" in error["why"]
    assert_clean(tmp_path)


@needs_posix
def test_missing_npm_is_told_and_the_rest_is_tried(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    use_npm(project, tmp_path, monkeypatch, npm_package(project, tmp_path))
    folder = tmp_path / "only-git"
    folder.mkdir()
    (folder / "git").symlink_to(shutil.which("git") or "")
    monkeypatch.setenv("PATH", str(folder))
    if (Path(sys.executable).parent / "npm").exists():
        pytest.skip("this environment brings its own npm")
    ran = kvtool("fetch", "--json")
    assert ran.code == 9 and "kvtool[npm]" in ran.json["error"]["why"]


# --- sdist --------------------------------------------------------------------------------------------------------


def sdist(folder: Path, *, change: str = "", leave_out: str = "") -> Path:
    """A source archive with v1's tree as a plain folder, and a build backend that must not run."""
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


def test_sdist(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    package = sdist(tmp_path / "links")
    use_sdist(project, monkeypatch, tmp_path / "links", "sha256-" + hashlib.sha256(package.read_bytes()).hexdigest())
    ran = kvtool("fetch", "--json")
    assert (ran.code, ran.json["source"]) == (0, "sdist package tinyllama 2026.1.1"), ran


@pytest.mark.parametrize("bad", [{"change": "x"}, {"leave_out": "docs/empty"}])
def test_sdist_with_another_tree(project: Tiny, kvtool, tmp_path: Path, monkeypatch, bad) -> None:
    sdist(tmp_path / "links", **bad)
    use_sdist(project, monkeypatch, tmp_path / "links")
    ran = kvtool("fetch", "--json")
    assert ran.code == 5 and "not llama.cpp v1" in ran.json["error"]["why"]
    assert_clean(tmp_path)


def test_sdist_with_another_digest(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    sdist(tmp_path / "links")
    use_sdist(project, monkeypatch, tmp_path / "links", "sha256-" + "0" * 64)
    ran = kvtool("fetch", "--json")
    assert ran.code == 5 and "damaged" in ran.json["error"]["why"]


def test_sdist_without_the_folder(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    sdist(tmp_path / "links")
    use_sdist(project, monkeypatch, tmp_path / "links", path="third/other")
    assert kvtool("fetch").code == 5


def test_sdist_that_is_not_there(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "links").mkdir()
    use_sdist(project, monkeypatch, tmp_path / "links")
    ran = kvtool("fetch", "--json")
    assert ran.code == 9, ran


# --- several at once, and kills -----------------------------------------------------------------------------------


def test_two_fetches_at_once(project: Tiny, start, tmp_path: Path) -> None:
    running = [start("fetch", tag, "--json") for tag in ("v1", "v2", "v1", "v2")]
    outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0, 0], outputs
    assert cached_refs(tmp_path) == ["refs/kvtool/upstream/v1", "refs/kvtool/upstream/v2"]


@needs_posix
def test_second_waits_for_the_first_and_says_so(project: Tiny, start, tmp_path: Path, monkeypatch) -> None:
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
