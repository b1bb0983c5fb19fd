"""Read upstream's tree from a package: a file of an npm package, or a folder of a source archive."""

import lzma
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from kvtool.errors import LockError


@contextmanager
def _reading(path: Path) -> Iterator[tarfile.TarFile]:
    """Open a tar archive. Raise LockError if it is damaged."""
    try:
        with tarfile.open(path) as tar:
            yield tar
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as err:
        if isinstance(err, OSError) and err.errno is not None:
            raise  # an error of the disk, not of the archive
        raise LockError(f"{path.name} is damaged", why=str(err) or type(err).__name__, next_step="fetch again") from err


def extract_file(package: Path, member: str, target: Path) -> None:
    """Copy one regular file out of a tar archive."""
    with _reading(package) as tar:
        try:
            source = tar.extractfile(member)
        except KeyError:
            source = None
        if source is None:
            raise LockError(f"{package.name} has no {member}", next_step="correct the path in patches/upstream.lock")
        with source, target.open("wb") as out:
            shutil.copyfileobj(source, out)


def write_import(package: Path, folder: str, target: Path, ref: str) -> None:
    """Convert a folder of a source archive into a stream for `git fast-import`, with one commit at `ref`.

    Because the folder is not unpacked, .gitignore, settings for line ends and the file system do not affect the tree. A
    .git at the top of the folder, which points to a submodule, is left out.
    """
    count = 0
    with _reading(package) as tar, target.open("wb") as out:
        out.write(f"commit {ref}\ncommitter kvtool <kvtool@localhost> 0 +0000\ndata 0\n".encode())
        for member in tar:
            # the path without the top folder of the archive
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if member.isdir() or PurePosixPath(folder) not in path.parents or path.is_relative_to(f"{folder}/.git"):
                continue
            _write_entry(tar, member, str(path.relative_to(folder)), out)
            count += 1
        out.write(b"done\n")
    if count == 0:
        raise LockError(f"{package.name} has no folder {folder}", next_step="correct the path in patches/upstream.lock")


def _write_entry(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str, out: IO[bytes]) -> None:
    if path.startswith('"') or "\n" in path or ".." in path.split("/"):
        raise LockError(f"the archive has a file with an unusable name: {path!r}")
    if member.issym():
        data, mode = member.linkname.encode("utf-8", "surrogateescape"), "120000"
    else:
        source = tar.extractfile(member)
        if source is None:
            raise LockError(f"the archive has something that is not a plain file: {path!r}")
        data, mode = source.read(), "100755" if member.mode & 0o111 else "100644"
    out.write(f"M {mode} inline {path}\ndata {len(data)}\n".encode("utf-8", "surrogateescape"))
    out.write(data)
    out.write(b"\n")
