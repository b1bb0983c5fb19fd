"""Make a patch from two texts, apply it to another text, and return the verdict of check_placement()."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kvtool.series.patchfile import hunks_of, parse_diff, pieces_of
from kvtool.series.placement import HunkPlacement, LineMap, check_placement
from kvtool.series.source import SourceFile

BASE = [f"int f{n}() {{\n    int y = {n};\n    use(y);\n    return y;\n}}\n\n" for n in range(1, 5)]


def diff(tmp_path: Path, old: str, new: str, context: int) -> bytes:
    (tmp_path / "old").write_text(old)
    (tmp_path / "new").write_text(new)
    argv = ["git", "diff", "--no-index", f"-U{context}", "--histogram", "--no-indent-heuristic", "old", "new"]
    return subprocess.run(argv, cwd=tmp_path, capture_output=True).stdout


def judge(
    tmp_path: Path, patched: str, target: str, result: str, base: str = "", path: str = "f.cpp"
) -> list[HunkPlacement]:
    """Return the verdict on each hunk of the patch from `base` to `patched`, which turned `target` into `result`."""
    base = base or "".join(BASE)
    pieces = pieces_of(parse_diff(diff(tmp_path, base, patched, 1))[0])
    before, after, moved, applied = (SourceFile(text.encode(), path) for text in (base, patched, target, result))
    lines = LineMap(hunks_of(diff(tmp_path, base, target, 0))).with_keys(before.keys, moved.keys)
    return list(check_placement(before, after, moved, applied, pieces, lines))
