"""Write and unpack archives. Their names and their layout are those of upstream's release archives.

The same contents always produce the same bytes. An archive is a .tar.gz with one folder, llama-TAG/. For Windows it is
a .zip without a folder.
"""

import gzip
import hashlib
import io
import os
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvtool.errors import writing

_SYSTEMS = {"Linux": "ubuntu", "Darwin": "macos", "Windows": "win"}
_MACHINES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64"}
SUMS = "SHA256SUMS"


@dataclass(frozen=True)
class Entry:
    """Describe a file of the archive: its content or, for a link, the name of the file that it points to."""

    name: str
    content: bytes = b""
    executable: bool = False
    link: str = ""


def archive_name(tag: str, system: str, machine: str, backend: str, preset: str) -> str:
    """Return the name that upstream would use for an archive of this build. A preset other than "dist" is appended."""
    usual = {"Linux": "cpu", "Darwin": "metal"}.get(system)
    what = [_SYSTEMS.get(system, system.lower()), *([backend] if backend != usual else [])]
    what += [_MACHINES.get(machine.lower(), machine.lower()), *([preset] if preset != "dist" else [])]
    return f"llama-{tag}-bin-{'-'.join(what)}.{'zip' if system == 'Windows' else 'tar.gz'}"


def sums(entries: Sequence[Entry]) -> Entry:
    """Return the file with checksums for `sha256sum -c`.

    Links are left out, because the files they point to are listed.
    """
    lines = (f"{hashlib.sha256(e.content).hexdigest()}  {e.name}\n" for e in entries if not e.link)
    return Entry(SUMS, "".join(lines).encode())


def _tar(file: IO[bytes], folder: str, entries: Sequence[Entry], when: int) -> Iterator[Entry]:
    with (
        gzip.GzipFile("", "wb", 9, file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for entry in entries:
            info = tarfile.TarInfo(f"{folder}/{entry.name}")
            info.mtime, info.size = when, len(entry.content)
            info.mode = 0o755 if entry.executable else 0o644
            if entry.link:
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.link, 0o777
            tar.addfile(info, io.BytesIO(entry.content))
            yield entry


def _zip(file: IO[bytes], _folder: str, entries: Sequence[Entry], when: int) -> Iterator[Entry]:
    with zipfile.ZipFile(file, "w") as packed:
        for entry in entries:
            info = zipfile.ZipInfo(entry.name, time.gmtime(when)[:6])
            info.create_system, info.external_attr = 3, (0o755 if entry.executable else 0o644) << 16
            packed.writestr(info, entry.content, zipfile.ZIP_DEFLATED, 9)
            yield entry


def write(out: Path, folder: str, entries: Sequence[Entry], when: int, on_bytes: Callable[[int], None]) -> str:
    """Write the archive under a temporary name, and rename it. Return its SHA-256. Raise DiskError if that fails.

    when: the time stamp of every file in the archive
    on_bytes: called with the number of bytes written so far
    """
    partial, done = out.with_name(f".{out.name}.{os.getpid()}"), 0
    with writing(str(out), "name another place with --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                for entry in (_zip if out.suffix == ".zip" else _tar)(file, folder, entries, when):
                    done += len(entry.content)
                    on_bytes(done)
            digest = hashlib.sha256(partial.read_bytes()).hexdigest()
            partial.replace(out)
        finally:
            partial.unlink(missing_ok=True)
    return digest


def unpack(archive: Path, place: Path) -> Path:
    """Unpack an archive into `place`. Return the folder with the programs."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(place)
        return place
    with tarfile.open(archive) as tar:
        # Python has this filter since 3.11.4, and newer versions warn if it is not set
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(place)
    return next(place.iterdir())
