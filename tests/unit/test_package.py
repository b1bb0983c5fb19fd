"""Test the archive of a build: its name, its bytes, which must always be the same, and the check of its contents."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

from kvtool.errors import DiskError, VerifyError
from kvtool.package import archive, check
from kvtool.package.archive import Entry
from kvtool.result import CheckOutcome
from kvtool.verify.checks import Finding

ENTRIES = (
    Entry("llama-server", b"\x7fELF", executable=True),
    Entry("libllama.so", link="libllama.so.0"),
    Entry("libllama.so.0", b"library", executable=True),
    Entry("licenses/LICENSE-x", b"free"),
)


@pytest.mark.parametrize(
    ("system", "machine", "backend", "preset", "name"),
    [
        ("Linux", "x86_64", "cpu", "dist", "ubuntu-x64.tar.gz"),
        ("Linux", "aarch64", "cpu", "dist", "ubuntu-arm64.tar.gz"),
        ("Linux", "x86_64", "vulkan", "dist", "ubuntu-vulkan-x64.tar.gz"),
        ("Darwin", "arm64", "metal", "dist", "macos-arm64.tar.gz"),
        ("Windows", "AMD64", "cpu", "dist", "win-cpu-x64.zip"),
        ("Linux", "x86_64", "cpu", "release", "ubuntu-x64-release.tar.gz"),
    ],
)
def test_archive_names_match_upstream(system: str, machine: str, backend: str, preset: str, name: str) -> None:
    assert archive.archive_name("b11549", system, machine, backend, preset) == f"llama-b11549-bin-{name}"


def write(out: Path) -> Path:
    archive.write(out, "llama-b1", [*ENTRIES, archive.sums(ENTRIES)], 1767225600, lambda _done: None)
    return out


@pytest.mark.parametrize("name", ["a.tar.gz", "a.zip"])
def test_archive_is_reproducible(name: str, tmp_path: Path) -> None:
    first, second = write(tmp_path / "one" / name), write(tmp_path / "two" / name)
    assert first.read_bytes() == second.read_bytes()


def test_tar_has_folder_and_links(tmp_path: Path) -> None:
    with tarfile.open(write(tmp_path / "a.tar.gz")) as tar:
        members = {member.name: member for member in tar}
    assert {name.split("/")[0] for name in members} == {"llama-b1"}
    assert members["llama-b1/libllama.so"].linkname == "libllama.so.0"
    assert members["llama-b1/llama-server"].mode == 0o755
    assert {(m.uid, m.gid, m.uname, m.gname) for m in members.values()} == {(0, 0, "", "")}


def test_zip_has_no_folder(tmp_path: Path) -> None:
    with zipfile.ZipFile(write(tmp_path / "a.zip")) as packed:
        assert "llama-server" in packed.namelist()


def test_changed_file_fails_checksum(tmp_path: Path) -> None:
    folder = archive.unpack(write(tmp_path / "a.tar.gz"), tmp_path / "there")
    check._sums(folder)
    (folder / "licenses" / "LICENSE-x").write_bytes(b"bound")
    with pytest.raises(VerifyError, match="LICENSE-x"):
        check._sums(folder)


def test_full_disk_keeps_old_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = write(tmp_path / "a.tar.gz")
    before = out.read_bytes()

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    with pytest.raises(DiskError, match="No space left"):
        write(out)
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]


def test_failed_finding_is_error() -> None:
    check._passed(Finding("kv-check/package", "kv-check", "", CheckOutcome.PASSED, "same"))
    with pytest.raises(VerifyError, match="differs"):
        check._passed(Finding("kv-check/package", "kv-check", "", CheckOutcome.FAILED, "differs", "why"))
    with pytest.raises(VerifyError, match="no-cache"):
        check._passed(Finding("kv-check/package", "kv-check", "", CheckOutcome.SKIPPED, "no-cache"))
