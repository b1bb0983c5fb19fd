"""Measure how plain the texts of this repository are.

Usage: python ci/prose.py [--worst N] [--only GLOB]

Counts how many phrases hide the subject or the verb of a sentence, per 1000 words of docstrings, comments and pages.
Prints this rate for each group of files, and then the texts with the highest rate. tests/unit/test_prose.py limits the
rate. A low rate does not prove that a text is clear; only a reader can decide that.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GROUPS = {
    "kvtool": r"kvtool/.*\.py",
    "cpp": r"cpp/.*\.(cpp|h|cu|hip)",
    "tests": r"tests/.*\.py",
    "ci": r"ci/.*\.(py|sh)",
    "docs": r"docs/.*\.md|(.*/)?README\.md|CHANGELOG\.md|CONTRIBUTING\.md",
    "patches": r"patches/.*\.(patch|toml)",
}
MARKERS = re.compile(
    r"\b(?:that|which|what|who) (?:is|are|was|were) there\b|\bthat there (?:is|are|was|were)\b"
    r"|\bwhat (?:is|was|are|were|it|they|the|a|an|has|have|had|upstream|goes|comes|stands|to|that|this|git|one|of)\b"
    r"|\bnobody\b|\bsomebody\b|\bwhoever\b|\bfor who\b"
    r"|\b(?:told|tells?|says?|said)\b"
    r"|\b(?:goes|go|comes|come|stands|stand|lies|takes?|gives?|gave|went|gone)\b"
    r"|\bof (?:which|whom|whose|what)\b"
    r"|\banew\b|\bbesides?\b|\ball the same\b|\bmended\b"
    r"|\b(?:is|are|was|were) to\b"
    r"|\bone that\b|\bthose that\b|\bthose of\b|\bas one\b|\bthat of\b",
    re.IGNORECASE,
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Piece:
    """Hold one text: a docstring, a comment, or a line of a page. `line` is its first line, counted from 1."""

    path: str
    line: int
    text: str

    @property
    def words(self) -> int:
        """Return the number of words."""
        return len(re.findall(r"[A-Za-z']+", self.text))

    @property
    def markers(self) -> int:
        """Return the number of phrases that should be avoided."""
        return len(MARKERS.findall(self.text))


def files_of(pattern: str, root: Path = ROOT) -> list[str]:
    """Return the files that git tracks and whose whole path matches a pattern."""
    listed = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True, check=True).stdout
    return [path for path in listed.splitlines() if re.fullmatch(pattern, path)]


def pieces(path: str, text: str) -> Iterator[Piece]:
    """Yield the docstrings, comments and lines of a file."""
    lines = text.splitlines()
    if path.endswith(".py"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, DOCUMENTED) and (doc := ast.get_docstring(node)):
                yield Piece(path, node.body[0].lineno, doc)
    if path.endswith(".md"):
        code = re.sub(r"```.*?```", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
        yield from (Piece(path, n, line) for n, line in enumerate(code.splitlines(), 1) if not line.startswith("    "))
    elif path.endswith(".patch"):
        message = text.partition("\ndiff --git")[0].splitlines()
        yield from (Piece(path, n, line) for n, line in enumerate(message, 1) if n > 3)
    else:
        mark = r"#\s+|^why = \"" if path.endswith((".py", ".sh", ".toml")) else r"//[/!]?\s?"
        for n, line in enumerate(lines, 1):
            if found := re.search(rf"(?:^|\s)(?:{mark})(.*)$", line):
                yield Piece(path, n, found[1])


def measure(group: str, only: str = "*") -> list[Piece]:
    """Return the texts of a group of files."""
    return [
        piece
        for path in files_of(GROUPS[group])
        if fnmatch.fnmatch(path, only)
        for piece in pieces(path, (ROOT / path).read_text(encoding="utf-8", errors="replace"))
    ]


def rate(found: list[Piece]) -> float:
    """Return how many phrases of the texts should be avoided, per 1000 words of text; 0 if there are no words."""
    return 1000 * sum(piece.markers for piece in found) / max(1, sum(piece.words for piece in found))


def main() -> int:
    """Print the rates, and the texts with the highest rates."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worst", type=int, default=20, help="number of texts to print (default 20)")
    parser.add_argument("--only", default="*", help="only files that match this glob")
    args = parser.parse_args()
    everything: list[Piece] = []
    for group in GROUPS:
        if found := measure(group, args.only):
            print(f"{group:8} {sum(piece.words for piece in found):6} words  {rate(found):5.1f} markers per 1000")
        everything += found
    worst = sorted((piece for piece in everything if piece.markers), key=lambda p: p.markers / max(p.words, 8))
    for piece in reversed(worst[-args.worst :] if args.worst else []):
        print(f"{piece.path}:{piece.line}: {' '.join(piece.text.split())[:160]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
