"""Moving a whole series at once gives what moving it patch by patch gives, to the commit id, or stands back."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from kvtool.tree import rehearse
from kvtool.tree.together import nearest
from tests.conftest import FILES, Tiny, git
from tests.repo.rebases import release

SECOND = "int function_2(int x) {\n    int y = x + 2;\n    return y;\n}\n\n"


@pytest.fixture(autouse=True)
def more_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hunk at an end of its file is never moved at once; the patches of the tiny project shall not have one."""
    monkeypatch.setitem(FILES, "CMakeLists.txt", "# the start\n" + FILES["CMakeLists.txt"] + "# the end\n")
    block = "    a();\n    b();\n    c();\n"
    pads = "".join(f"    pad_{n}();\n" for n in range(6))
    monkeypatch.setitem(FILES, "src/c.cpp", f"int same() {{\n{block}{pads}{block}}}\n")


@pytest.fixture
def ways(project: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """ways(tag) rehearses twice: as it comes, and patch by patch; (was it at once?, both results equal?)."""
    real = rehearse.move_all

    def run(tag: str = "v3", *args: str) -> tuple[bool, bool]:
        at_once: list[bool] = []

        def watched(*given: Any) -> Any:
            made = real(*given)
            at_once.append(made is not None)
            return made

        results = []
        for move_all in (watched, lambda *_: None):
            monkeypatch.setattr(rehearse, "move_all", move_all)
            ran = kvtool("rebase", tag, "--dry-run", "--keep-going", "--json", *args)
            results.append((ran.code, re.sub(r'"seconds": [\d.e-]+', "", ran.out)))
        return at_once == [True], results[0] == results[1]

    return run


def rewrite(project: Tiny, change: Any, path: str = "src/a.cpp") -> None:
    """A release v3 in which upstream changed a file as a whole."""
    file = project.upstream / path
    file.write_text(change(file.read_text()))
    release(project, "v3")


def test_moved_lines(project: Tiny, ways: Any) -> None:
    project.add_patch(
        "more", ("src/a.cpp", "x + 2 + grown();", "x + 2 + 2 * grown();"), ("src/a.cpp", "x + 7", "x + 77")
    )
    rewrite(project, lambda text: "// one\n// two\n" + text.replace("x + 5;", "x + 55;"))
    assert ways() == (True, True)


def test_back_to_an_older_one(project: Tiny, ways: Any) -> None:
    project.write_lock("v2")
    assert ways("v1") == (True, True)


def test_patches_that_only_one_upstream_wants(project: Tiny, ways: Any) -> None:
    project.add_patch("old", ("src/a.cpp", "x + 4;", "x + 44;"), extra='until = "v3"\n')
    project.add_patch("away", ("src/a.cpp", "x + 6;", "x + 66;"))
    rewrite(project, lambda text: "// one\n" + text)
    assert ways() == (True, True)
    series = project.root / "patches/series.toml"
    series.write_text(series.read_text().replace('until = "v3"', 'from = "v3"'))
    assert ways() == (False, True)  # there is nothing to move `old` from


def test_a_patch_on_top_of_one_that_is_not_wanted(project: Tiny, ways: Any) -> None:
    project.add_patch("old", ("src/a.cpp", "x + 4;\n", "x + 4;\n    y++;\n"), extra='until = "v3"\n')
    project.add_patch("upon", ("src/a.cpp", "    y++;\n", "    y++;\n    y--;\n"))
    release(project, "v3")
    assert ways() == (False, True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (SECOND, "int twin(int x) {\n    int y = x + 2;\n    return y;\n}\n\n" + SECOND),
        (SECOND, SECOND.replace("    return y;", "\treturn y;")),
        (SECOND, SECOND.replace("function_2(int x)", "function_2(long x)")),
        (SECOND, SECOND.replace("    int y", "    x--;\n    int y")),
        (SECOND, SECOND.replace("    int y", "again:\n    int y")),
        (SECOND, SECOND.replace("    return", "    x--;\n    return")),
        (SECOND, SECOND.replace("x + 2;", "x + 2 + grown();")),
        (SECOND, ""),
    ],
    ids=["twin", "context", "heading", "above", "label", "below", "merged", "gone"],
)
def test_what_leaves_something_to_decide(project: Tiny, ways: Any, old: str, new: str) -> None:
    rewrite(project, lambda text: "".join(f"// {n}\n" for n in range(4)) + text.replace(old, new))
    assert ways() == (False, True)


def test_a_twin_that_is_nearer(project: Tiny, ways: Any) -> None:
    """Both in one function: only that the plain patch would go to the other one tells that there is a choice."""
    project.add_patch("second", ("src/c.cpp", "pad_5();\n    a();\n    b();\n", "pad_5();\n    a();\n    B();\n"))
    rewrite(project, lambda text: "// one\n" + text, "src/c.cpp")
    assert ways() == (True, True)
    file = project.upstream / "src/c.cpp"
    file.write_text("// more\n" * 7 + file.read_text())
    release(project, "v4")
    assert ways("v4") == (False, True)


def test_a_function_that_was_moved(project: Tiny, ways: Any) -> None:
    rewrite(project, lambda text: text.replace(SECOND, "") + SECOND)
    assert ways()[1]


def test_files_that_changed_otherwise(project: Tiny, ways: Any) -> None:
    (project.upstream / "src/a.cpp").chmod(0o755)
    release(project, "v3")
    assert ways() == (False, True)
    git(project.upstream, "mv", "src/a.cpp", "src/core.cpp")
    release(project, "v4")
    assert ways("v4") == (False, True)


def test_an_end_of_the_file(project: Tiny, ways: Any) -> None:
    project.add_patch("top", ("src/a.cpp", "int function_1(int x) {\n", "// top\nint function_1(int x) {\n"))
    release(project, "v3")
    assert ways() == (False, True)


def test_what_a_person_decided(project: Tiny, ways: Any) -> None:
    release(project, "v3")
    assert ways("v3") == (True, True)
    assert ways("v3", "--skip", "use") == (False, True)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_upstream_does(project: Tiny, ways: Any, seed: int) -> None:
    """Lines of upstream's file are taken out, doubled and put in at random."""
    chance = random.Random(seed)

    def change(text: str) -> str:
        lines = text.splitlines(keepends=True)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(lines))
            lines[at : at + 1] = chance.choice(
                ([], [lines[at]] * 2, [lines[at], "    x++;\n"], ["// new\n", lines[at]])
            )
        return "".join(lines)

    project.add_patch("more", ("src/a.cpp", "x + 5;\n", "x + 5;\n    y++;\n"))
    rewrite(project, change)
    assert ways()[1]


@pytest.mark.parametrize(
    ("start", "found"), [(0, 1), (1, 1), (2, 1), (3, 5), (4, 5), (5, 5), (9, 5)], ids=lambda value: str(value)
)
def test_nearest(start: int, found: int) -> None:
    lines = [b"-", b"a", b"b", b"-", b"-", b"a", b"b", b"a"]
    assert nearest(lines, [b"a", b"b"], start) == found  # 3: as far from 1 as from 5, and git looks forwards first


def test_nearest_that_is_nowhere() -> None:
    assert nearest([b"a"], [b"a", b"b"], 0) is None


def test_nearest_is_gits(tmp_path: Path) -> None:
    """git apply puts a hunk where nearest() says."""
    git(tmp_path, "init", "-q")
    block = ["a\n", "b\n", "c\n"]
    for seed in range(12):
        chance = random.Random(seed)
        lines = [line for _ in range(8) for line in (block if chance.random() < 0.4 else ["-\n"])] + block
        start = chance.randrange(2, len(lines))
        (tmp_path / "f").write_text("".join(lines))
        patch = f"--- a/f\n+++ b/f\n@@ -{start + 1},3 +{start + 1},3 @@\n a\n-b\n+B\n c\n"
        (tmp_path / "p").write_text(patch)
        git(tmp_path, "apply", "-C1", "p")
        place = (tmp_path / "f").read_text().splitlines().index("B") - 1
        assert nearest([line.encode() for line in lines], [line.encode() for line in block], start) == place
