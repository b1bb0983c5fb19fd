"""Test the merge of one patch into another upstream.

The cases are changes that upstream has already, conflicts, and the places of hunks.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtool.gitcmd import Git, Scratch
from kvtool.replay.apply import Builder, commits_of
from kvtool.replay.merge import PickResult, cherry_pick
from tests.conftest import git

Pick = Callable[..., tuple[str | None, PickResult]]

BASE = """int f(int n) {
    int one = 1;
    int two = 2;
    return n;
}
"""
PATCH = BASE.replace("int one = 1;\n", "int one = 1;\n    int new = 3;\n")


@pytest.fixture
def pick(tmp_path: Path) -> Pick:
    """Return a function that merges a patch: pick(base, patched, upstream, path="f.cpp").

    The patch is the change from `base` to `patched`. The function returns two values: the resulting text, which is None
    if there is a conflict, and the PickResult.
    """
    repo = tmp_path / "repo"
    repo.mkdir()
    git(repo, "init", "-q", "--bare")

    def commit(path: str, text: str, *parent: str) -> str:
        blob = subprocess.run(
            ["git", "-C", repo, "hash-object", "-w", "--stdin"], input=text.encode(), capture_output=True, check=True
        )
        index = f"100644,{blob.stdout.decode().strip()},{path}"
        git(repo, "read-tree", "--empty")
        git(repo, "update-index", "--add", "--cacheinfo", index)
        parents = [word for one in parent for word in ("-p", one)]
        return git(repo, "commit-tree", git(repo, "write-tree"), *parents, "-m", "x")

    def run(base: str, patched: str, upstream: str, path: str = "f.cpp") -> tuple[str | None, PickResult]:
        old, new = commit(path, base), commit(path, upstream)
        patch = commit(path, patched, old)
        (origin,) = commits_of(Git(repo), old, patch)
        done = cherry_pick(Builder(Scratch(repo), new), origin)
        return (git(repo, "show", f"{done.tree}:{path}", strip=False) if done.tree else None), done

    return run


def test_read_files_in_one_call(tmp_path: Path) -> None:
    repo = Git.create(tmp_path / "repo")
    one, empty = (repo.line("hash-object", "-w", "--stdin", input=text) for text in ("one\ntwo missing\n", ""))
    entries = [f"100644 blob {one}\ta\nb", f"100644 blob {empty}\tnone", f"160000 commit {40 * '1'}\tmodule"]
    entries.append(f"040000 tree {repo.line('mktree', '-z', input=f'100644 blob {one}{chr(9)}c{chr(0)}')}\tfolder")
    tree = repo.line("mktree", "-z", "--missing", input="".join(f"{entry}\0" for entry in entries))
    names = ("a\nb", "gone\nfor good", "module", "none", "folder", "folder/c")
    content = (one, b"one\ntwo missing\n")
    there = [content, ("", b""), ("", b""), (empty, b""), ("", b""), content]
    assert repo.blobs(*(f"{tree}:{name}" for name in names)) == there


# --- hunks that upstream has ---------------------------------------------------------------------------------------

TWO = BASE + "\nint g(int n) {\n    int four = 4;\n    return n;\n}\n"
BOTH = TWO.replace("one = 1;\n", "one = 1;\n    total += n;\n").replace("four = 4;", "four = 44;")


@pytest.mark.parametrize(
    "line", ["    total += n;", "    total  += n;", "    total += n; ", "  total += n;", "\ttotal\t+=  n;"]
)
def test_hunk_in_upstream_with_other_space(pick: Pick, line: str) -> None:
    patched = BASE.replace("one = 1;\n", "one = 1;\n    total += n;\n")
    upstream = BASE.replace("one = 1;\n", f"one = 1;\n{line}\n")
    assert pick(BASE, patched, upstream)[0] == upstream
    text, done = pick(TWO, BOTH, TWO.replace("one = 1;\n", f"one = 1;\n{line}\n"))
    assert text == TWO.replace("one = 1;\n", f"one = 1;\n{line}\n").replace("four = 4;", "four = 44;")
    assert done.notes == ("f.cpp hunk 1: upstream already has it",)
    for path in ("f.py", "f.txt", "CMakeLists.txt", "Makefile"):
        text, _ = pick(BASE, patched, upstream, path)
        assert text == (upstream if line == "    total += n;" else None)


@pytest.mark.parametrize("line", ["total+=n;", "    total += n;\n    log(n);", "    log(n);\n    total  += n;"])
def test_hunk_in_upstream_in_other_form(pick: Pick, line: str) -> None:
    patched = BASE.replace("one = 1;\n", "one = 1;\n    total += n;\n")
    text, done = pick(BASE, patched, BASE.replace("one = 1;\n", f"one = 1;\n{line}\n"))
    assert text is None and done.failed[0].cause == "already upstream"


@pytest.mark.parametrize("old", ["    return n;\n", "    int two = 2;\n    return n;\n"])
def test_hunk_elsewhere_in_upstream_conflicts(pick: Pick, old: str) -> None:
    """Let upstream have the lines of the patch at another place of the same function.

    Expect a conflict, because otherwise the file would have the lines twice.
    """
    patched = BASE.replace("int one = 1;\n", "int one = 1;\n    int fresh = 3;\n    call(fresh);\n")
    for more in (
        "    int fresh = 3;\n    call(fresh);\n",
        "    int  fresh = 3;\n    call(fresh);\n",
        "    call(fresh);\n",
    ):
        text, done = pick(BASE, patched, BASE.replace(old, old.replace("    return", more + "    return")))
        assert text is None and "the same lines" in done.failed[0].reason


def test_realigned_line_is_kept(pick: Pick) -> None:
    patched = BASE.replace("one = 1", "one   = 1")
    assert pick(BASE, patched, "// top\n" + BASE)[0] == "// top\n" + patched
    assert pick(BASE, patched, patched)[0] == patched
    text, done = pick(BASE, patched, BASE.replace("one = 1", "one    = 1"))
    assert text is None and done.failed[0].cause == "white space"


def test_report_names_conflicting_hunks(pick: Pick) -> None:
    """Expect that the report leaves out the hunk that was merged and the hunk that upstream has."""
    names = ("one", "two", "three", "four")
    base = "".join(f"int {name}(int n) {{\n    n += 1;\n    return {name};\n}}\n\n" for name in names)
    patched = base
    for name in names:
        patched = patched.replace(f"return {name};", f"return {name} + n;")
    upstream = base.replace("return one;", "return one + n;").replace("return three;", "return other;")
    upstream = upstream.replace("return four;", "return  four  ;")
    text, done = pick(base, patched, upstream)
    assert text is None and [hunk.number for hunk in done.failed] == [3, 4]
    assert done.notes == ("f.cpp hunk 1: upstream already has it",)


# --- insertions at one place --------------------------------------------------------------------------------------


def upstream_puts(*lines: str, base: str = BASE) -> str:
    return base.replace("int one = 1;\n", "int one = 1;\n" + "".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize(
    "theirs", ["break;", "return n;", "goto end;", "throw 1;", "continue;", "}", "#else", "int a;"]
)
@pytest.mark.parametrize("path", ["f.cpp", "f.py"])
def test_insertions_at_one_place_conflict(pick: Pick, theirs: str, path: str) -> None:
    for mine, other in ((upstream_puts("    mine();"), upstream_puts(theirs)), (upstream_puts(theirs), PATCH)):
        text, done = pick(BASE, mine, other, path)
        assert text is None and done.failed[0].cause == "inserted lines"


def test_functions_at_one_place_conflict(pick: Pick) -> None:
    base = BASE + "\n" + BASE.replace("f(", "g(")
    patch, theirs = (f"int {name}() {{\n    return {name[-1]};\n}}\n\n" for name in ("h1", "h2"))
    text, _ = pick(base, base.replace("int g", patch + "int g"), base.replace("int g", theirs + "int g"))
    assert text is None


# --- the cause of a conflict --------------------------------------------------------------------------------------

CALL = BASE.replace("    int two = 2;\n", "    int two = compute(n, one);\n")
WANTED = CALL.replace("compute(n, one)", "compute(n + 1, one)")


@pytest.mark.parametrize(
    ("upstream", "cause", "reason"),
    [
        (CALL.replace("\n", "\r\n"), "line ends", "upstream's lines end in CR LF now"),
        (CALL.replace("two = compute", "two  =  compute"), "white space", "only the white space"),
        (CALL.replace("compute(", "reckon("), "renamed identifier", "renamed compute to reckon"),
        (CALL.replace("    int two = compute(n, one);\n", ""), "deleted lines", "removed a line"),
        (CALL.replace("compute(n, one)", "compute(n + 1, one) + 1"), "changed lines", "changed the same lines"),
        (CALL.replace("compute(n, one)", "table[n] * one"), "changed lines", "changed the same lines"),
        (CALL.replace("compute(n, one)", "one(n, compute)"), "changed lines", "changed the same lines"),
    ],
)
def test_conflict_names_its_cause(pick: Pick, upstream: str, cause: str, reason: str) -> None:
    text, done = pick(CALL, WANTED, upstream)
    assert text is None
    (hunk,) = done.failed
    assert (hunk.cause, reason in hunk.reason) == (cause, True), hunk
    removed, added = ([row[1:] for row in hunk.diff if row[0] == sign] for sign in "-+")
    if cause != "line ends":
        assert set(removed) <= set(CALL.splitlines()) and set(added) <= set(upstream.splitlines())
        assert len(hunk.diff) <= 2 * 3 + len(removed) + len(added)


@pytest.mark.parametrize(
    ("theirs", "cause"),
    [("total += n;", "already upstream"), ("return n;", "inserted lines")],
    ids=["a new line", "a line that the file had before"],
)
def test_equal_lines_of_two_insertions(pick: Pick, theirs: str, cause: str) -> None:
    """Let the patch and upstream insert different lines at one place. One line is the same in both."""
    mine, other = (f"one = 1;\n    {name}();\n    {theirs}\n" for name in ("mine", "other"))
    text, done = pick(*(BASE, BASE.replace("one = 1;\n", mine), BASE.replace("one = 1;\n", other)))
    assert text is None and done.failed[0].cause == cause, done.failed[0]


def test_added_line_end_is_the_cause(pick: Pick) -> None:
    text, done = pick("one\ntwo", "one\ntwo\nthree", "one\ntwo\n", path="list.txt")
    assert text is None and (done.failed[0].cause, done.failed[0].diff) == ("line ends", ())
    assert done.failed[0].reason == "upstream ends the last line of the file now"


def test_diff_shows_the_nearest_lines_of_a_large_change(pick: Pick) -> None:
    """Let upstream change every line of a table."""
    base = [f"{{ {n}, 0x{n} }},\n" for n in range(400)]
    patched = [*base[:200], "{ 2000, 0xabc },\n", *base[200:]]
    fresh = [line.replace("0x", "0x00") for line in base]
    text, done = pick(*("".join(lines) for lines in (base, patched, fresh)), path="table.inc")
    assert text is None
    added = [row for row in done.failed[0].diff if row.startswith("+")]
    assert "+{ 200, 0x00200 }," in added and len(added) < 12, added


# --- random changes of upstream ------------------------------------------------------------------------------------


def changed(chance: random.Random, base: list[str], at: int) -> list[tuple[int, str]]:
    """Return upstream's lines after a random change, with their numbers in `base` (-1 for new lines).

    The change removes, doubles or inserts lines, or changes only their white space.
    """
    lines = list(enumerate(base))
    for _ in range(chance.randint(1, 3)):
        near = min(len(lines) - 2, max(1, at + chance.randint(-2, 2)))
        number, text = lines[near]
        kind = chance.randrange(5)
        if kind == 0:
            del lines[near]
        elif kind == 1:
            lines.insert(near, (-1, chance.choice([text, "    z();\n", "    if (z) {\n", "    }\n"])))
        elif kind == 2:
            lines[near] = (number, text.replace(" = ", "   = ").replace(", ", ",  "))
        else:
            deeper = range(near, min(len(lines) - 1, near + chance.randint(1, 4)))
            lines = [(n, f"    {line}" if k in deeper else line) for k, (n, line) in enumerate(lines)]
    return lines


@pytest.mark.parametrize("seed", range(40))
def test_merged_hunk_stays_between_neighbours(pick: Pick, seed: int) -> None:
    chance = random.Random(seed)
    choice = ["    a();\n", "    b(1, 2);\n", "    int y = 3;\n", "    if (x) {\n", "    }\n", "    x++;\n"]
    base = ["int f() {\n", *(chance.choice(choice) for _ in range(8)), "    return x;\n", "}\n"]
    at = chance.randrange(2, 9)
    upstream = changed(chance, base, at)
    there = [text for _, text in upstream]
    text, done = pick("".join(base), "".join([*base[:at], "    fresh();\n", *base[at:]]), "".join(there))
    if not done.notes or text is None:
        return
    made = text.splitlines(keepends=True)
    place = next(n for n, line in enumerate(made) if line.strip() == "fresh();")
    assert made[:place] + made[place + 1 :] == there
    before, after = ([n for n, _ in part if n >= 0] for part in (upstream[:place], upstream[place:]))
    assert max(before) < at <= min(after)


# --- copied blocks, and disabled code -------------------------------------------------------------------------------

OLD = ("int id = task.id;", "check(id);", "if (busy()) {", "    break;", "}", "write(id);", "send(id);")
MINE = (*OLD[:5], "load(id);", *OLD[5:])
NEW = ("check(task.id);", "if (busy()) {", "    defer();", "}", "write(task.id, task.flags);", "done();")
HEADS = {
    "case": (
        "bool run(int n) {\n    switch (n) {\n",
        "        case %s:\n            {\n",
        "            } break;\n",
        "    }\n}\n",
    ),
    "lambda": ("void init() {\n", "    this->%s = [this](int n) {\n", "    };\n\n", "}\n"),
    "struct": ("class all {\npublic:\n", "    struct %s {\n", "    };\n\n", "    int last;\n};\n"),
}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("order", ["copy first", "copy last"])
def test_hunk_stays_in_original_block(pick: Pick, kind: str, order: str) -> None:
    """Rewrite the original block, so that a diff mistakes its copy for the original."""
    start, head, end, stop = HEADS[kind]

    def block(name: str, lines: tuple[str, ...]) -> str:
        return head % name + "".join(f"{' ' * 16}{line}\n" for line in lines) + end

    old, copied = block("SAVE", NEW), block("EXPORT", OLD)
    upstream = start + (copied + old if order == "copy first" else old + copied) + stop
    text, done = pick(start + block("SAVE", OLD) + stop, start + block("SAVE", MINE) + stop, upstream)
    assert text is None and "it belongs in" in done.failed[0].reason and "SAVE" in done.failed[0].reason
    untouched = start + copied.replace("check", "check2") + block("SAVE", OLD) + stop
    text, _ = pick(start + block("SAVE", OLD) + stop, start + block("SAVE", MINE) + stop, untouched)
    assert text == untouched.replace(block("SAVE", OLD), block("SAVE", MINE))


@pytest.mark.parametrize(
    ("start", "end", "what"), [("#if 0\n", "#endif\n", "an #if 0"), ("/* as it was:\n", "*/\n", "a comment")]
)
def test_hunk_in_disabled_code(pick: Pick, start: str, end: str, what: str) -> None:
    fresh = "int g(int n) {\n    return n + 1;\n}\n"
    text, done = pick(BASE, PATCH, start + BASE + end + fresh)
    assert text is None and f"which upstream put into {what}" in done.failed[0].reason
    text, _ = pick(start + BASE + end, start + PATCH + end, fresh + start + BASE + end)
    assert text == fresh + start + PATCH + end, "the code was already disabled or conditional"
    text, _ = pick(BASE, PATCH, "#if 0\n#else\n" + BASE + end + fresh if what == "an #if 0" else BASE + fresh)
    assert text is not None


def test_attribute_before_function(pick: Pick) -> None:
    top = "int e() {\n    return 0;\n}\n\n"
    upstream = top + BASE.replace("int f(", "[[nodiscard]] int f(")
    text, done = pick(top + BASE, top + PATCH, upstream)
    assert text == top + PATCH.replace("int f(", "[[nodiscard]] int f("), done


@pytest.mark.parametrize("indent", ["", "    "])
@pytest.mark.parametrize("head", ["if (n)", "for (int i = 0; i < n; ++i)"])
def test_statement_made_conditional(pick: Pick, head: str, indent: str) -> None:
    """Let upstream make a statement conditional, and let the patch insert a line after this statement.

    Without braces the line would not be conditional, although its indentation suggests that.
    """
    upstream = BASE.replace("    int one = 1;\n", f"    {head}\n    {indent}int one = 1;\n")
    text, done = pick(BASE, PATCH, upstream)
    assert text is None and (indent or "without braces" in done.failed[0].reason)
    base, patched = (side.replace("    int one", f"    {head}\n        int one") for side in (BASE, PATCH))
    text, _ = pick(base, patched, "int e;\n" + base)
    assert text == "int e;\n" + patched, "the code was already disabled or conditional"


def test_empty_line_belongs_to_next_block(pick: Pick) -> None:
    """Add a line after an empty line. The lines before the empty line are indented, but they are not a block."""
    base = "int g(int n) {\n    const auto x = foo(n,\n                       2);\n\n    y();\n    return x;\n}\n"
    patched = base.replace("    y();", "    mine();\n    y();")
    upstream = base.replace("2);\n", "2);\n    z();\n").replace("return x;", "return x + 1;")
    text, done = pick(base, patched, upstream)
    assert text == upstream.replace("    y();", "    mine();\n    y();"), done


def test_code_after_disabled_code_is_compiled(pick: Pick) -> None:
    base = "int g(int n) {\n#ifdef OLD\n    n++;\n#endif\n    return n;\n}\n"
    patched = base.replace("    return n;", "    n *= 2;\n    return n;")
    upstream = base.replace("#ifdef OLD", "#if 0")
    text, done = pick(base, patched, upstream)
    assert text == upstream.replace("    return n;", "    n *= 2;\n    return n;"), done
