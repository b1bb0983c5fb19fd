"""Check that the programs of an archive work elsewhere: unpack it into a new folder, and run it with new models."""

import hashlib
import json
import tempfile
from functools import partial
from pathlib import Path

from kvtool import process
from kvtool.errors import VerifyError
from kvtool.package.archive import SUMS, unpack
from kvtool.package.contents import MANIFEST
from kvtool.result import CheckOutcome
from kvtool.verify import models, runner, texts
from kvtool.verify.checks import Check, Finding
from kvtool.verify.server import Request, llama_server

_program = partial(process.require_program, error=VerifyError, next_step="")
_SMALL = models.Geometry("package", layers=2, kv_heads=2, head_size=32)


def check(archive: Path, vocabulary: Path) -> None:
    """Raise VerifyError if a file does not match SHA256SUMS, or if a program of the unpacked archive fails."""
    with tempfile.TemporaryDirectory(prefix="kvtool-package-") as place:
        work = Path(place) / "models"
        folder = unpack(archive, Path(place) / "unpacked")
        _sums(folder)
        model = models.cache_model(_SMALL, work, models.CONTEXT)
        compared = Check("kv-check/package", "kv-check", model, args=("--quick",))
        _passed(runner.kv_check(compared, _program(folder, "kv-check")))
        speaker = models.text_model(model, vocabulary, work)
        asked = Check("completion/package", "completion", speaker)
        _passed(texts.completion(asked, _program(folder, "llama-completion"), work))
        _serves(folder, speaker, work)


def _sums(folder: Path) -> None:
    for line in (folder / SUMS).read_text("utf-8").splitlines():
        digest, _, name = line.partition("  ")
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            raise VerifyError(f"{name} of the archive does not match {SUMS}")


def _passed(found: Finding) -> None:
    if found.outcome is not CheckOutcome.PASSED:
        raise VerifyError(f"{found.id} from the archive: {found.status}", why=found.reason)


def _serves(folder: Path, speaker: Path, work: Path) -> None:
    """Check that llama-server prints its version and answers a request.

    If the manifest says that the web page is included, check that the server delivers the page.
    """
    server = _program(folder, "llama-server")
    process.capture([server, "--version"], error=VerifyError, timeout=60)
    arguments = [texts.FLAG, "-c", "2048", "-t", "1", "--no-warmup"]
    with llama_server(server, speaker, arguments, work / "server.log") as running:
        running.complete(Request("one two three", 8))
        if json.loads((folder / MANIFEST).read_bytes())["page"] and "<html" not in running.get("/").lower():
            raise VerifyError("llama-server from the archive has no web page", why="the manifest lists a web page")
