"""Test hunks whose code is twice in upstream, or was.

A hunk must stay with its own code. If that code was removed, the hunk must fail. Each case has the place at which git
applies the hunk, and the verdict that the check must return.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.placing import judge


def put(text: str, line: str, after: str) -> str:
    """Insert `line` into the text after the first occurrence of `after`."""
    assert after in text
    return text.replace(after, after + line, 1)


@dataclass(frozen=True)
class Case:
    """Describe a hunk that adds `line` after `after` in `base`, and that git applies to `target`.

    says: a part of the expected HunkPlacement.wrong or HunkPlacement.note
    """

    name: str
    base: str
    target: str
    line: str
    after: str
    says: str
    path: str = "f.cpp"


PAIR = (
    "void f(int x) {\n    clear(a);\n    check(x);\n    run();\n    done(a);\n\n    clear(b);\n    check(x);\n"
    "    run();\n    done(b);\n}\n"
)
CASES = (
    "bool run(int n) {\n    switch (n) {\n%s        case EXPORT:\n            {\n                check(id);\n"
    "                write(id);\n            } break;\n    }\n}\n"
)
SAVE = (
    "        case SAVE:\n            {\n                check(id);\n                write(id);\n            } break;\n"
)
REWRITTEN = [
    Case(
        "statements",
        PAIR,
        PAIR.replace("check(x);\n    run();\n    done(a);", "check(x, 1);\n    run2();\n    done(a);"),
        "    mine();\n",
        "    check(x);\n",
        "which was line 8; it belongs in 'void f(int x) {', where upstream rewrote its lines",
    ),
    Case(
        "a case that is gone",
        CASES % SAVE,
        CASES % "",
        "                mine();\n",
        "                check(id);\n",
        "where upstream rewrote its lines",
    ),
]


def klass(name: str, arguments: str, more: str = "") -> str:
    return (
        f"struct {name} : base {{\n    int a;\n\n    int run({arguments}) override {{\n        check(n{more});\n"
        f"        write(n{more});\n        return n{more};\n    }}\n}};\n\n"
    )


A, A_AS_IT_IS, COPY = klass("A", "int n"), klass("A", "int n, int m", ", m"), klass("B", "int n")
CLASSES = [
    Case(
        f"class, the copy {where}",
        A,
        target,
        "        mine(n);\n",
        "        check(n);\n",
        "it belongs in 'struct A : base {'",
    )
    for where, target in (("first", COPY + A_AS_IT_IS), ("last", A_AS_IT_IS + COPY))
]

OLD = "    load(x);\n    mul(x, y);\n    store(x);\n"
NEW = "    mmload(x2);\n    mmmul(x2, y);\n    mmstore(x2);\n"
SCALAR = "#else\n    scalar(x);\n#endif\n}\n"
BRANCH = f"void f(int x) {{\n#ifdef __AVX2__\n{OLD}{SCALAR}"
WHOLE = "#if defined({})\nstatic void f(int x) {{\n{}}}\n"
REST = "#else\nstatic void f(int x) {\n    scalar(x);\n}\n#endif\n"
MUL = ("    mine(x);\n", "    mul(x, y);\n")
BRANCHES = [
    Case(
        "branch, the copy first",
        BRANCH,
        BRANCH.replace("#ifdef __AVX2__\n" + OLD, f"#ifdef __AVX512F__\n{OLD}#endif\n#ifdef __AVX2__\n{NEW}"),
        *MUL,
        "it belongs in '#ifdef __AVX2__'",
    ),
    Case(
        "branch, the copy last",
        BRANCH,
        BRANCH.replace(OLD, f"{NEW}#elif defined(__ARM_NEON)\n{OLD}"),
        *MUL,
        "it belongs in '#ifdef __AVX2__'",
    ),
    Case(
        "function of a branch, the copy first",
        WHOLE.format("__AVX2__", OLD) + REST,
        WHOLE.format("__AVX512F__", OLD) + "#el" + WHOLE.format("__AVX2__", NEW)[1:] + REST,
        *MUL,
        "it belongs in '#if defined(__AVX2__)'",
    ),
]


def option(name: str, lines: str) -> str:
    return (
        f'    add_opt(common_arg(\n        {{"--{name}"}}, "N",\n        "help",\n'
        f"        [](common_params & params, int value) {{\n{lines}        }}\n    ));\n"
    )


def loop(of: str, more: str = "") -> str:
    return (
        f"    for (auto & l : layers)\n    {{\n        auto * t = l.{of};\n        check(t{more});\n"
        f"        size(t{more});\n        write(t{more});\n    }}\n"
    )


def method(name: str, more: str = "") -> str:
    return f"    def {name}(self, n):\n        check(n{more})\n        size(n{more})\n        write(n{more})\n\n"


def condition(of: str, more: str = "") -> str:
    return f"    if ({of})\n        find(a{more})\n        link(a{more})\n        def(a{more})\n    endif()\n"


PARSED = (
    "            if (value < 0) {\n                refuse();\n            }\n            params.n = value;\n"
    "            params.set = true;\n"
)
PARSED_NOW = (
    "            params.v = parse(value);\n            if (!params.v) {\n                params.bad = 1;\n"
    "            }\n"
)
INIT, LOOPS, PYTHON = (
    "void init() {{\n{}}}\n",
    "void f() {{\n{}}}\n",
    "class A:\n    x = 1\n\n{}    def last(self):\n        pass\n",
)
CMAKE = "if (TOP)\n{}endif()\n"
HEADS = [
    *(
        Case(
            f"option, the copy {where}",
            INIT.format(option("ctx", PARSED)),
            INIT.format(target),
            "            mine();\n",
            "refuse();\n            }\n",
            """with '{"--ctx"}, "N",'""",
        )
        for where, target in (
            ("first", option("ctx-draft", PARSED) + option("ctx", PARSED_NOW)),
            ("last", option("ctx", PARSED_NOW) + option("ctx-draft", PARSED)),
        )
    ),
    Case(
        "loops with one head",
        LOOPS.format(loop("k")),
        LOOPS.format(loop("v") + loop("k", ", 1")),
        "        mine();\n",
        "        size(t);\n",
        "with 'auto * t = l.k;', which is in line 9",
    ),
    Case(
        "method of Python",
        PYTHON.format(method("save")),
        PYTHON.format(method("export") + method("save", ", 1")),
        "        mine(n)\n",
        "        size(n)\n",
        "it belongs in 'def save(self, n):'",
        "f.py",
    ),
    Case(
        "condition of CMake",
        CMAKE.format(condition("A")),
        CMAKE.format(condition("B") + condition("A", "2")),
        "        mine()\n",
        "        link(a)\n",
        "it belongs in 'if (A)'",
        "CMakeLists.txt",
    ),
]


@pytest.mark.parametrize("case", [*REWRITTEN, *CLASSES, *BRANCHES, *HEADS], ids=lambda case: case.name)
def test_hunk_in_twin_is_wrong(tmp_path: Path, case: Case) -> None:
    base, target = (put(text, case.line, case.after) for text in (case.base, case.target))
    (found,) = judge(tmp_path, base, case.target, target, case.base, case.path)
    assert case.says in found.wrong, found


ROW = (
    "bool f(int n) {\n    switch (n) {\n        case A:\n        case B:\n            {\n                one();\n"
    "                two();\n            } break;\n        default:\n            break;\n    }\n}\n"
)
STEPS = "".join(f"            step_{n}(x);\n" for n in range(12))
SPLIT = (
    "struct s {{\nprivate:\n    void update() {{\n        idle();\n{}        for (auto & x : all) {{\n"
    "            check(x);\n" + STEPS + "        }}\n{}    }}\n}};\n"
)
ELSEWHERE = (
    "void g(int n) {{\n{}    b(n);\n}}\n\nvoid f(int n) {{\n    if ({}) {{\n        check(n);\n        write(n);\n"
    "        size(n);\n    }}\n}}\n"
)
FLUSH = (
    "class c {\n    c(\n            const M & model,\n                int   type,\n               bool   flag,\n"
    "               bool   more);\n};\n"
)
PYTHON_TWO = "def g(n):\n{}    b(n)\n\n\ndef f(n):\n    if {}:\n        check(n)\n        write(n)\n        size(n)\n"
HIP = f"#ifdef GGML_USE_HIP\n{OLD}#else\n{NEW}#endif\n"
STAYS = [
    Case(
        "a label more in a row",
        ROW,
        ROW.replace("        case B:\n", "        case B:\n        case C:\n"),
        "                mine();\n",
        "                one();\n",
        "",
    ),
    Case(
        "a method that was split",
        SPLIT.format("", "        decode();\n"),
        SPLIT.format("        prepare();\n        decode();\n    }\n\n    void prepare() {\n", ""),
        "            mine();\n",
        "            check(x);\n",
        "recorded in 'void update() {', landed in 'void prepare() {'",
    ),
    Case(
        "a head that reads so in another function",
        ELSEWHERE.format("    a(n);\n", "rot"),
        ELSEWHERE.format("    if (rot) {\n        a(n);\n    }\n", "n_rot"),
        "        mine();\n",
        "        check(n);\n",
        "",
    ),
    Case(
        "arguments set flush right",
        FLUSH,
        FLUSH.replace("model,\n", "model,\n          const H & hparams,\n"),
        "               bool   mine,\n",
        "               bool   flag,\n",
        "",
    ),
    Case(
        "put into a new #ifdef",
        f"void f(int x) {{\n{OLD}}}\n",
        f"void f(int x) {{\n{HIP}}}\n",
        *MUL,
        "look at it: its place is in '#ifdef GGML_USE_HIP' now",
    ),
    Case(
        "a block of which upstream made two",
        LOOPS.format(loop("k")),
        LOOPS.format(
            loop("k").replace("        size(t);\n", "    }\n    for (auto & l : layers)\n    {\n        size(t);\n")
        ),
        "        mine();\n",
        "        write(t);\n",
        "",
    ),
    Case(
        "behind try: of Python",
        "import os\n\ntry:\n    import a\n    import b\nexcept ImportError:\n    pass\n",
        "import os\nimport sys\n\ntry:\n    import a\n    import b\nexcept ImportError:\n    pass\n",
        "    import mine\n",
        "    import a\n",
        "",
        "f.py",
    ),
    Case(
        "a head that reads so in another function of Python",
        PYTHON_TWO.format("    a(n)\n", "rot"),
        PYTHON_TWO.format("    if rot:\n        a(n)\n", "n_rot"),
        "        mine(n)\n",
        "        check(n)\n",
        "",
        "f.py",
    ),
]


@pytest.mark.parametrize("case", STAYS, ids=lambda case: case.name)
def test_hunk_with_own_lines_is_right(tmp_path: Path, case: Case) -> None:
    base, target = (put(text, case.line, case.after) for text in (case.base, case.target))
    (found,) = judge(tmp_path, base, case.target, target, case.base, case.path)
    assert not found.wrong
    assert (case.says in found.note) if case.says else not found.note
