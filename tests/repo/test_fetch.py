"""Test kvtool fetch from mirrors and from the cache, with every kind of bad input.

The cache must be clean afterwards.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kvtool import canary
from kvtool.commands.rebase_results import RebaseResult
from kvtool.gitcmd import sealed_environment
from kvtool.process import redact_urls
from kvtool.upstream import sources
from kvtool.upstream.lock import load_lock
from tests.conftest import Tiny, git
from tests.repo.fetches import assert_clean, cache_of, cached_refs, fake, needs_posix

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


def test_mirror_annotated_tag_in_bare_url(project: Tiny, kvtool, tmp_path: Path) -> None:
    bare = tmp_path / "bare.git"
    git(tmp_path, "clone", "-q", "--bare", str(project.upstream), str(bare))
    ran = kvtool("fetch", "v2", "--mirror", f"file://{bare}", "--json")
    assert ran.code == 0, ran
    assert ran.json["tree"] == git(project.upstream, "rev-parse", "v2^{tree}")


def test_mirror_bundle_without_tag(project: Tiny, kvtool, tmp_path: Path) -> None:
    git(project.upstream, "checkout", "-q", "v1")
    bundle = tmp_path / "one.bundle"
    git(project.upstream, "bundle", "create", "-q", str(bundle), "HEAD")
    assert kvtool("fetch", "v1", "--mirror", bundle).code == 0
    ran = kvtool("fetch", "v2", "--mirror", bundle, "--json")
    assert ran.code == 2 and "no tag v2" in ran.json["error"]["what"]


def test_same_commit_from_every_source(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    first = kvtool("fetch", "--json").json["commit"]
    git(project.upstream, "checkout", "-q", "v1")
    bundle = tmp_path / "one.bundle"
    git(project.upstream, "bundle", "create", "-q", str(bundle), "HEAD")
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "other"))
    assert kvtool("fetch", "--mirror", bundle, "--json").json["commit"] == first


def test_unknown_tag_lists_tags(project: Tiny, kvtool, tmp_path: Path) -> None:
    ran = kvtool("fetch", "v99", "--json")
    assert ran.code == 2
    assert ran.json["error"]["what"] == "unknown upstream tag 'v99'"
    assert "kvtool rebase v99" in ran.json["error"]["next"] and "v1, v2" in ran.json["error"]["next"]


def test_prune_keeps_one_upstream(project: Tiny, kvtool, tmp_path: Path) -> None:
    for tag in ("v1", "v2"):
        kvtool("fetch", tag)
    assert len(cached_refs(tmp_path)) == 2
    lost = git(project.upstream, "rev-parse", "v1:src/a.cpp")
    ran = kvtool("fetch", "v2", "--prune", "--json")
    assert (ran.code, cached_refs(tmp_path)) == (0, ["refs/kvtool/upstream/v2"]) and ran.json["freed"] > 0
    cached = cache_of(tmp_path) / "upstream.git"
    assert subprocess.run(["git", "-C", cached, "cat-file", "-e", lost], capture_output=True).returncode != 0
    assert kvtool("fetch", "v2", "--json").json["source"] == "cache"
    assert kvtool("fetch", "v1", "--json").code == 0


def test_mirror_without_tag(project: Tiny, kvtool, tmp_path: Path) -> None:
    git(project.upstream, "tag", "-d", "v1")
    ran = kvtool("fetch", "--json")
    assert ran.code == 2 and "no tag v1" in ran.json["error"]["what"]
    assert_clean(tmp_path)


@pytest.mark.parametrize("kind", ["missing", "folder", "file"])
def test_invalid_mirror_is_error(project: Tiny, kvtool, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "nothing"
    if kind == "folder":
        place.mkdir()
    if kind == "file":
        place.write_text("not a bundle")
    ran = kvtool("fetch", "--mirror", place, "--json")
    assert ran.code == 2, ran
    assert "mirror" in ran.json["error"]["what"] or "not a git repository" in ran.json["error"]["what"]
    assert_clean(tmp_path)


def test_partial_clone_as_mirror(project: Tiny, kvtool, tmp_path: Path) -> None:
    git(project.upstream, "config", "uploadpack.allowFilter", "true")
    url, partial = f"file://{project.upstream}", tmp_path / "partial"
    git(tmp_path, "clone", "-q", "--no-checkout", "--filter=blob:none", url, str(partial))
    git(partial, "remote", "set-url", "origin", str(tmp_path / "gone"))
    ran = kvtool("fetch", "--mirror", partial, "--json")
    assert ran.code == 2 and "partial clone" in ran.json["error"]["what"]
    assert_clean(tmp_path)


def test_mirror_with_wrong_tree(project: Tiny, kvtool, tmp_path: Path) -> None:
    project.write_lock(v1="0123456789" * 4)
    ran = kvtool("fetch", "--json")
    assert ran.code == 5
    assert ran.json["error"]["code"] == "lock"
    assert "0123456789" * 4 in ran.json["error"]["why"]
    assert_clean(tmp_path)


def test_mirror_with_damaged_object(project: Tiny, kvtool, tmp_path: Path) -> None:
    blob = git(project.upstream, "rev-parse", "v1:src/a.cpp")
    path = project.upstream / ".git/objects" / blob[:2] / blob[2:]
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:20])
    ran = kvtool("fetch", "--json")
    assert ran.code == 5, ran
    assert_clean(tmp_path)


def test_truncated_bundle_is_error(project: Tiny, kvtool, tmp_path: Path) -> None:
    bundle = tmp_path / "one.bundle"
    git(project.upstream, "bundle", "create", "-q", str(bundle), "v1")
    bundle.write_bytes(bundle.read_bytes()[:-60])
    ran = kvtool("fetch", "--mirror", bundle, "--json")
    assert ran.code == 5, ran
    assert_clean(tmp_path)


def test_mirror_by_insteadof_name(project: Tiny, kvtool) -> None:
    git(Path.home(), "config", "--global", f"url.{project.upstream.parent}/.insteadOf", "up:")
    assert kvtool("fetch", "--mirror", f"up:{project.upstream.name}").code == 0


def test_mirror_in_unknown_users_home(project: Tiny, kvtool) -> None:
    ran = kvtool("fetch", "--mirror", "~no-such-user/llama.cpp", "--json")
    assert (ran.code, ran.json["error"]["code"]) == (2, "usage"), ran


@pytest.mark.parametrize("verb", ["fetch", "rebase", "canary"])
def test_url_credentials_are_hidden(project: Tiny, kvtool, tmp_path: Path, verb: str) -> None:
    url, report = "http://me:s3cret@127.0.0.1:9/llama.cpp", tmp_path / "report.json"
    args = {"fetch": ("v1",), "rebase": ("b1", "--dry-run"), "canary": ("b1", "--report", report)}[verb]
    runs = [kvtool(verb, *args, "--mirror", url, *more) for more in ((), ("--json",), ("-v",))]
    written = report.read_text() if report.exists() else ""
    assert "s3cret" not in f"{runs}{written}" and "http://127.0.0.1:9/llama.cpp" in runs[0].err
    assert [ran.code for ran in runs] == [9, 9, 9]
    told = RebaseResult("v2", "v1", tmp_path, "rehearsed", stopped_at="use", mirror=url)
    assert "s3cret" not in f"{told.to_json()}{told._again}"


def test_source_has_no_credentials(project: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "_newest", lambda *_: "b1")
    lock = load_lock(project.root / "patches/upstream.lock")
    assert canary.newest(lock, "https://me:s3@cret@host/x") == ("b1", "https://host/x", "")
    ((name, _),) = sources._attempts(lock, lock.upstream(), "https://s3cret@host/x")
    assert name == "mirror https://host/x"
    assert redact_urls("git@host:x ssh://git@host/x https://host/a@b") == "git@host:x ssh://git@host/x https://host/a@b"


def test_unreachable_url_exits_9(project: Tiny, kvtool, tmp_path: Path) -> None:
    ran = kvtool("fetch", "--mirror", "http://127.0.0.1:9/llama.cpp", "--json")
    assert ran.code == 9 and ran.json["error"]["code"] == "network"
    assert_clean(tmp_path)


@needs_posix
@pytest.mark.parametrize("chosen", ["", "GIT_SSH", "GIT_SSH_COMMAND", "core.sshCommand"])
def test_ssh_runs_in_batch_mode(project: Tiny, kvtool, tmp_path: Path, monkeypatch, chosen: str) -> None:
    said = tmp_path / "said"
    for name in ("ssh", "mine"):
        fake(tmp_path, monkeypatch, name, f'echo {name} "$@" > {said}; exit 255\n')
    if chosen.startswith("GIT"):
        monkeypatch.setenv(chosen, "mine")
    elif chosen:
        git(Path.home(), "config", "--global", chosen, "mine")
    ran = kvtool("fetch", "--mirror", "ssh://host.invalid/llama.cpp", "--json")
    assert ran.code == 9, ran
    words = said.read_text().split()
    assert words[0] == ("mine" if chosen else "ssh") and ("BatchMode=yes" in words) is not bool(chosen)


@needs_posix
@pytest.mark.parametrize("way", ["login", "askpass", "proxy", "insteadOf"])
def test_mirror_uses_git_network_settings(project: Tiny, kvtool, tmp_path: Path, monkeypatch, way: str) -> None:
    """Use git's settings for logins, proxies and replaced addresses. kvtool ignores all other settings of the user."""
    asked: list[tuple[str, str | None]] = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers.get("Authorization")))
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="x"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    for name in ("http_proxy", "https_proxy"):
        monkeypatch.delenv(name)
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        login = ("credential.helper", "!f() { echo username=me; echo password=word; }; f")
        settings = {
            "login": login,
            "proxy": ("http.proxy", here),
            "insteadOf": (f"url.{here}/.insteadOf", "https://away.invalid/"),
        }
        if way == "askpass":
            fake(tmp_path, monkeypatch, "ask", "echo me\n")
            monkeypatch.setenv("GIT_ASKPASS", str(tmp_path / "bin/ask"))
        else:
            git(Path.home(), "config", "--global", *settings[way])
        away = {"proxy": "http://away.invalid", "insteadOf": "https://away.invalid"}
        url = f"{away.get(way, here)}/x.git"
        assert kvtool("fetch", "--mirror", url, "--json").code == 9
        server.shutdown()
    assert asked and any(said for _, said in asked) is (way in ("login", "askpass")), asked


def test_certificate_variables_reach_git(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GIT_SSL_CAINFO", "GIT_SSL_CAPATH", "GIT_SSL_CERT", "GIT_SSL_KEY", "GIT_DIR"):
        monkeypatch.setenv(name, "x")
    assert [name for name, value in sealed_environment().items() if value is None] == ["GIT_DIR"]


def test_changed_lock_is_fetched_again(project: Tiny, kvtool) -> None:
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
def test_cache_without_object_is_replaced(project: Tiny, kvtool, tmp_path: Path, lost: str) -> None:
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


def test_killed_fetch_leftovers_are_removed(project: Tiny, kvtool, tmp_path: Path) -> None:
    left, mine = (cache_of(tmp_path) / name / "killed/half" for name in ("kvtool-tmp", "tmp"))
    for file in (left, mine):
        file.parent.mkdir(parents=True)
        file.write_text("x")
    kvtool("fetch")
    assert not list((cache_of(tmp_path) / "kvtool-tmp").iterdir()) and mine.exists()
    stale = cache_of(tmp_path) / "upstream.git/refs/kvtool/upstream/v2.lock"
    stale.write_text("")
    assert kvtool("fetch", "v2").code == 0


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_cache_is_disk_error(project: Tiny, kvtool, tmp_path: Path) -> None:
    cache_of(tmp_path).mkdir()
    cache_of(tmp_path).chmod(0o500)
    ran = kvtool("fetch", "--json")
    assert ran.code == 1 and ran.json["error"]["code"] == "disk"


def test_cache_as_file_is_disk_error(project: Tiny, kvtool, tmp_path: Path) -> None:
    cache_of(tmp_path).write_text("")
    ran = kvtool("fetch", "--json")
    assert ran.code == 1 and ran.json["error"]["code"] == "disk" and "KVTOOL_CACHE" in ran.json["error"]["next"]


@needs_posix
@pytest.mark.parametrize("said", ["detected dubious ownership in repository", "objects/pack: Permission denied"])
def test_unreadable_cache_is_kept(
    project: Tiny, kvtool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    kvtool("fetch", "v1")
    real = shutil.which("git")
    refused = f"echo 'fatal: {said}' >&2; exit 128"
    fake(tmp_path, monkeypatch, "git", f'case "$*" in *" --objects --all "*) {refused};; esac\nexec {real} "$@"\n')
    ran = kvtool("fetch", "v2", "--json")
    assert (ran.code, ran.json["error"]["code"]) == (1, "disk") and said in ran.json["error"]["output"], ran
    assert cached_refs(tmp_path) == ["refs/kvtool/upstream/v1"]


@needs_posix
def test_full_disk_is_disk_error(project: Tiny, kvtool, tmp_path: Path, monkeypatch) -> None:
    real = shutil.which("git")
    full = "echo 'fatal: write error: No space left on device' >&2; exit 128"
    fake(tmp_path, monkeypatch, "git", f'case "$*" in *" fetch "*) {full};; esac\nexec {real} "$@"\n')
    ran = kvtool("fetch", "--json")
    assert ran.code == 1 and ran.json["error"]["code"] == "disk" and "full" in ran.json["error"]["what"]
    assert_clean(tmp_path)


@needs_posix
def test_missing_git_names_package(project: Tiny, kvtool, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ran = kvtool("fetch", "--json")
    assert ran.code == 7 and ran.json["error"]["code"] == "missing_tool"
    assert all(word in ran.json["error"]["next"] for word in ("Debian", "macOS", "Windows"))


# --- several at once ----------------------------------------------------------------------------------------------


def test_parallel_fetches(project: Tiny, start, tmp_path: Path) -> None:
    running = [start("fetch", tag, "--json") for tag in ("v1", "v2", "v1", "v2")]
    outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0, 0], outputs
    assert cached_refs(tmp_path) == ["refs/kvtool/upstream/v1", "refs/kvtool/upstream/v2"]
