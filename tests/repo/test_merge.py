"""What is no conflict: lines that upstream only re-aligned, lines put in at one place. And what is one all the same."""

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
    """pick(base, patched, upstream, path="f.cpp"): the file with the patch of base on upstream, None for a conflict."""
    repo = tmp_path / "repo"
    repo.mkdir()
    git(repo, "init", "-q")

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


def test_files_by_name_in_one_call(tmp_path: Path) -> None:
    repo = Git.create(tmp_path / "repo")
    one, empty = (repo.line("hash-object", "-w", "--stdin", input=text) for text in ("one\ntwo missing\n", ""))
    entries = [f"100644 blob {one}\ta\nb", f"100644 blob {empty}\tnone", f"160000 commit {40 * '1'}\tmodule"]
    entries.append(f"040000 tree {repo.line('mktree', '-z', input=f'100644 blob {one}{chr(9)}c{chr(0)}')}\tfolder")
    tree = repo.line("mktree", "-z", "--missing", input="".join(f"{entry}\0" for entry in entries))
    names = ("a\nb", "gone\nfor good", "module", "none", "folder", "folder/c")
    content = (one, b"one\ntwo missing\n")
    there = [content, ("", b""), ("", b""), (empty, b""), ("", b""), content]
    assert repo.blobs(*(f"{tree}:{name}" for name in names)) == there


# --- only re-aligned ----------------------------------------------------------------------------------------------


def test_the_patch_takes_the_new_alignment(pick: Pick) -> None:
    upstream = BASE.replace("one =", "one   =").replace("two =", "two   =")
    text, done = pick(BASE, PATCH, upstream)
    assert text == upstream.replace("= 1;\n", "= 1;\n    int new   = 3;\n")
    assert done.notes == (
        "f.cpp: merged, look at it: upstream re-aligned lines there; 1 of the patch's took the new alignment",
    )


def test_a_line_that_the_patch_replaces(pick: Pick) -> None:
    text, _ = pick(BASE, BASE.replace("one = 1;", "one = 11; // new"), BASE.replace("int one =", "int     one   ="))
    assert text == BASE.replace("int one = 1;", "int     one   = 11; // new")


def test_each_line_follows_the_one_it_replaces(pick: Pick) -> None:
    upstream = BASE.replace("one =", "one  =").replace("two =", "two    =")
    text, _ = pick(BASE, BASE.replace("= 1;", "= a;").replace("= 2;", "= b;"), upstream)
    assert text == upstream.replace("= 1;", "= a;").replace("= 2;", "= b;")


def test_a_block_that_was_put_one_deeper(pick: Pick) -> None:
    upstream = BASE.replace("    int one", "    {\n        int one").replace(
        "    int two = 2;", "        int two = 2;\n    }"
    )
    text, _ = pick(BASE, PATCH, upstream)
    assert text == upstream.replace("= 1;\n", "= 1;\n        int new = 3;\n")


def test_tabs_are_merged_but_not_guessed(pick: Pick) -> None:
    upstream = BASE.replace("    int one", "\tint one").replace("    int two", "\tint two")
    text, _ = pick(BASE, PATCH, upstream)
    assert text == upstream.replace("= 1;\n", "= 1;\n    int new = 3;\n")


def test_white_space_at_the_end_of_a_line(pick: Pick) -> None:
    base, patch = (text.replace("= 1;", "= 1;  ") for text in (BASE, PATCH))
    assert pick(base, patch, BASE)[0] == PATCH


def test_an_apostrophe_in_a_comment_hides_nothing(pick: Pick) -> None:
    base, patch = (text.replace("= 1;", "= 1; // don't").replace("= 2;", "= 2; // won't") for text in (BASE, PATCH))
    assert "new   =" in str(pick(base, patch, base.replace("one =", "one   ="))[0])


@pytest.mark.parametrize("path", ["f.py", "Makefile", "CMakeLists.txt", "f.yml", "f"])
def test_white_space_that_may_mean_something_there(pick: Pick, path: str) -> None:
    text, done = pick(BASE, PATCH, BASE.replace("    int one", "        int one"), path)
    assert text is None and done.failed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('const char * a = "x y";', 'const char * a = "x  y";'),
        ("char a = ' ';", "char a = '  ';"),
        ('auto a = R"(\n  a  b\n)";', 'auto a = R"(\n  a b\n)";'),
        ('auto a = R"x(")\n  a b\n)x";', 'auto a = R"x(")\n    a b\n)x";'),
        ('auto a = "x\\\n  y";', 'auto a = "x\\\n    y";'),
        ("#define F (x)", "#define F(x)"),
        ("a = b - 1;", "a = b -1;"),
        ("#define F x \\\n  y", "#define F x \\ \n  y"),
        ("  a();", "a();"),
    ],
)
def test_white_space_that_means_something(pick: Pick, old: str, new: str) -> None:
    """The line beside the patch changed, so the merge must not pass it off as the same one."""
    for base in (f"{old}\nint end;\n", f"int top;\n{old}\n"):
        patched = base.replace(f"{old}\n", f"{old}\nint more;\n" if "end" in base else f"int more;\n{old}\n")
        text, done = pick(base, patched, base.replace(old, new))
        assert text is None or "re-aligned" not in str(done.notes)


def test_what_changed_besides_the_alignment_is_a_conflict(pick: Pick) -> None:
    text, done = pick(BASE, BASE.replace("= 1;", "= 11;"), BASE.replace("one = 1;", "one   = 12;"))
    assert text is None and done.failed


# --- put in at one place -----------------------------------------------------------------------------------------


def upstream_puts(*lines: str, base: str = BASE) -> str:
    return base.replace("int one = 1;\n", "int one = 1;\n" + "".join(f"{line}\n" for line in lines))


def test_both_stay_and_upstreams_are_first(pick: Pick) -> None:
    text, done = pick(BASE, PATCH, upstream_puts("    int theirs = 4;", "    int also = 5;"))
    assert text == upstream_puts("    int theirs = 4;", "    int also = 5;", "    int new = 3;")
    assert done.notes == ("f.cpp: merged, look at it: it stands behind 2 lines that upstream put in at the same place",)


def test_both_where_the_lines_around_were_re_aligned(pick: Pick) -> None:
    upstream = upstream_puts("    int its   = 4;").replace("one =", "one   =").replace("two =", "two   =")
    text, done = pick(BASE, PATCH, upstream)
    assert text == upstream.replace("= 4;\n", "= 4;\n    int new   = 3;\n")
    assert len(done.notes) == 2


def test_two_functions_at_one_place(pick: Pick) -> None:
    base = BASE + "\n" + BASE.replace("f(", "g(")
    patch, theirs = (f"int {name}() {{\n    return {name[-1]};\n}}\n\n" for name in ("h1", "h2"))
    text, done = pick(base, base.replace("int g", patch + "int g"), base.replace("int g", theirs + "int g"))
    assert text == base.replace("int g", theirs + patch + "int g") and done.notes


def test_a_comment_that_upstream_began_and_ended(pick: Pick) -> None:
    """Each is a comment line by itself; what stands between them would be one as well."""
    base = BASE.replace("two = 2;\n", "two = 2;\n    // old */\n")
    text, done = pick(
        base, PATCH.replace("two = 2;\n", "two = 2;\n    // old */\n"), upstream_puts("    /*", base=base)
    )
    assert text is None and "is not whole" in done.failed[0].reason


@pytest.mark.parametrize(
    "lines",
    [
        ["    if (n) {"],
        ["    if (n)"],
        ["    }", "    {"],
        ["    for (;;)", "        n++;", "    do"],
        ["#ifdef X"],
        ["#endif", "#ifdef X"],
        ["#else"],
        ["private:"],
        ["    case 2:"],
        ["    case 2: n++;"],
        ["    call(n,", '    ")",'],
        ["    n ="],
        ["    /* what follows", "    int x; "],
        ["    // goes on \\"],
    ],
    ids=lambda lines: " ".join(lines),
)
def test_what_upstream_put_in_is_not_whole(pick: Pick, lines: list[str]) -> None:
    text, done = pick(BASE, PATCH, upstream_puts(*lines))
    assert text is None and "is not whole" in done.failed[0].reason


@pytest.mark.parametrize(
    "line", ["    else", "    else { n++; }", "    + 1,", "    . f(),", "    if (n)", "    ) {", "a:"]
)
def test_what_the_patch_puts_in_is_not_whole(pick: Pick, line: str) -> None:
    text, done = pick(BASE, upstream_puts(line), upstream_puts("    int theirs = 4;"))
    assert (text is None) == (line != "    + 1,")
    assert text or "is not whole" in done.failed[0].reason


def test_upstream_took_a_part_of_the_patch(pick: Pick) -> None:
    patched = upstream_puts("    int new = 3;", "    int more = 4;")
    text, done = pick(BASE, patched, upstream_puts("    int   new = 30;", "    int more = 4;"))
    assert text is None and "some of the same lines" in done.failed[0].reason
    text, done = pick(BASE, patched, patched)
    assert text == patched


def test_a_line_beside_them_that_upstream_touched(pick: Pick) -> None:
    for old, new in (("one = 1;", "one = 10;"), ("two = 2;", "two = 20;")):
        text, done = pick(BASE, PATCH, upstream_puts("    int theirs = 4;").replace(old, new))
        assert text is None and done.failed


def test_a_line_that_the_patch_touches_as_well(pick: Pick) -> None:
    text, done = pick(BASE, PATCH.replace("two = 2;", "two = 20;"), upstream_puts("    int theirs = 4;"))
    assert text is None and done.failed


def test_lines_in_another_order(pick: Pick) -> None:
    swapped = BASE.replace("    int one = 1;\n    int two = 2;\n", "    int two = 2;\n    int one = 1;\n")
    text, done = pick(BASE, PATCH, swapped)
    assert text is None and done.failed


@pytest.mark.parametrize("path", ["f.py", "f.md", "CMakeLists.txt"])
def test_only_in_c(pick: Pick, path: str) -> None:
    text, done = pick(BASE, PATCH, upstream_puts("    int theirs = 4;"), path)
    assert text is None and done.failed


def test_which_of_several_braces_is_which_is_not_guessed(pick: Pick) -> None:
    """Without their white space they are one line; upstream took the first one away, and re-aligned none."""
    base = "int f() {\n    if (a) {\n        if (b) {\n            c();\n        }\n    }\n    return 1;\n}\n"
    patched = base.replace("        }\n    }\n", "        }\n    new_one();\n    }\n")
    upstream = base.replace("        }\n    }\n", "    }\n")
    text, _ = pick(base, patched, upstream)
    assert text in (None, upstream.replace("    }\n", "    new_one();\n    }\n"))


# --- whatever upstream does --------------------------------------------------------------------------------------


def changed(chance: random.Random, base: list[str], at: int) -> list[tuple[int, str]]:
    """Upstream's lines, each with its number in base (-1 for a new one): taken out, doubled, put in, re-aligned."""
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
def test_what_is_merged_is_between_the_lines_it_was_put_between(pick: Pick, seed: int) -> None:
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


# --- a copy of a block, and code that upstream switched off ---------------------------------------------------------

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
def test_a_copied_block_does_not_take_the_hunk_from_the_one_it_was_copied_from(
    pick: Pick, kind: str, order: str
) -> None:
    """A diff takes the copy for the original where upstream rewrote that."""
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
def test_code_that_upstream_switched_off(pick: Pick, start: str, end: str, what: str) -> None:
    fresh = "int g(int n) {\n    return n + 1;\n}\n"
    text, done = pick(BASE, PATCH, start + BASE + end + fresh)
    assert text is None and f"which upstream put into {what}" in done.failed[0].reason
    text, _ = pick(start + BASE + end, start + PATCH + end, fresh + start + BASE + end)
    assert text == fresh + start + PATCH + end, "it was so before"
    text, _ = pick(BASE, PATCH, "#if 0\n#else\n" + BASE + end + fresh if what == "an #if 0" else BASE + fresh)
    assert text is not None


def test_upstream_put_the_same_lines_in_at_another_place(pick: Pick) -> None:
    upstream = BASE.replace("    return n;\n", "    int new = 3;\n    return n;\n")
    text, done = pick(BASE, PATCH, upstream)
    assert text is not None and done.notes == (
        "f.cpp: look at it: upstream has put in the same lines, at another place",
    )


def test_an_attribute_before_a_function(pick: Pick) -> None:
    top = "int e() {\n    return 0;\n}\n\n"
    upstream = top + BASE.replace("int f(", "[[nodiscard]] int f(")
    text, done = pick(top + BASE, top + PATCH, upstream)
    assert text == top + PATCH.replace("int f(", "[[nodiscard]] int f("), done


@pytest.mark.parametrize("indent", ["", "    "])
@pytest.mark.parametrize("head", ["if (n)", "for (int i = 0; i < n; ++i)"])
def test_a_statement_that_upstream_made_conditional(pick: Pick, head: str, indent: str) -> None:
    """What stands behind it would not be, and was indented as if it were."""
    upstream = BASE.replace("    int one = 1;\n", f"    {head}\n    {indent}int one = 1;\n")
    text, done = pick(BASE, PATCH, upstream)
    assert text is None and "without braces" in done.failed[0].reason
    base, patched = (side.replace("    int one", f"    {head}\n        int one") for side in (BASE, PATCH))
    text, _ = pick(base, patched, "int e;\n" + base)
    assert text == "int e;\n" + patched, "it was so before"


def test_an_empty_line_is_in_the_block_of_what_follows(pick: Pick) -> None:
    """Above it stands what can be indented as a block, and is none."""
    base = "int g(int n) {\n    const auto x = foo(n,\n                       2);\n\n    y();\n    return x;\n}\n"
    patched = base.replace("    y();", "    mine();\n    y();")
    upstream = base.replace("2);\n", "2);\n    z();\n").replace("return x;", "return x + 1;")
    text, done = pick(base, patched, upstream)
    assert text == upstream.replace("    y();", "    mine();\n    y();"), done


def test_what_stands_behind_code_that_was_switched_off_is_compiled(pick: Pick) -> None:
    base = "int g(int n) {\n#ifdef OLD\n    n++;\n#endif\n    return n;\n}\n"
    patched = base.replace("    return n;", "    n *= 2;\n    return n;")
    upstream = base.replace("#ifdef OLD", "#if 0")
    text, done = pick(base, patched, upstream)
    assert text == upstream.replace("    return n;", "    n *= 2;\n    return n;"), done
