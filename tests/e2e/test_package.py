"""Unpack an archive of the real build in another folder. There, it must compare the caches and serve requests."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from kvtool.compile.builder import configured_page
from tests.e2e.conftest import Real, kvtool


def test_archive_of_build_runs(real: Real, tmp_path: Path) -> None:
    # with the web page only if the build has it, because building the page needs minutes
    ui = "--ui" if configured_page(real.build) else "--no-ui"
    code, made = kvtool("package", "--preset", "release", ui, "--check", "--out", str(tmp_path))
    assert (code, made["checked"]) == (0, True), made
    with tarfile.open(made["archive"]) as tar:
        file = tar.extractfile(f"llama-{made['tag']}/manifest.json")
        assert file is not None
        manifest = json.load(file)
    assert (manifest["page"], manifest["preset"]) == (ui == "--ui", "release")
    assert {"llama-server", "kv-check", "LICENSE", "SHA256SUMS"} <= set(made["files"])
