"""Test the parser of ninja's output."""

from __future__ import annotations

import pytest

from kvtool.compile.ninja import BuildStep, OutputParser, parse_targets, short


def feed(text: str) -> tuple[OutputParser, list[BuildStep]]:
    parser = OutputParser()
    steps = [step for line in text.splitlines() if (step := parser.feed(line))]
    return parser, steps


def test_counters_and_descriptions() -> None:
    parser, steps = feed("[1/3] Building CXX object a.cpp.o\n[2/3] Building C object b.c.o\n[3/3] Linking CXX x\n")
    assert steps == [
        BuildStep(1, 3, "Building CXX object a.cpp.o"),
        BuildStep(2, 3, "Building C object b.c.o"),
        BuildStep(3, 3, "Linking CXX x"),
    ]
    assert (parser.steps, parser.failed, parser.message) == (3, {}, "")


def test_total_changes_after_cmake_rerun() -> None:
    parser, steps = feed("[0/1] Re-running CMake...\n-- Configuring done\n[1/220] Building x.o\n")
    assert [(s.done, s.total) for s in steps] == [(0, 1), (1, 220)]
    assert parser.steps == 1, "the announcement of CMake is not a finished step"


def test_no_work_to_do() -> None:
    parser, steps = feed("ninja: no work to do.\n")
    assert (steps, parser.steps, parser.message) == ([], 0, "no work to do.")


# ninja 1.12 and later print the exit code
@pytest.mark.parametrize("code", ["", "[code=1] ", "[code=-9] "])
def test_failed_step_keeps_output(code: str) -> None:
    parser, _ = feed(
        "[1/3] Building CXX object a.cpp.o\n"
        "warning: that was fine\n"
        "[2/3] Building CXX object b.cpp.o\n"
        f"FAILED: {code}b.cpp.o \n"
        "c++ -c b.cpp -o b.cpp.o\n"
        "b.cpp:1:1: error: no\n"
        "    1 | x\n"
        "\n"
        "ninja: build stopped: subcommand failed.\n"
    )
    assert parser.failed == {"b.cpp.o": ["c++ -c b.cpp -o b.cpp.o", "b.cpp:1:1: error: no", "    1 | x", ""]}
    assert parser.message == "build stopped: subcommand failed."
    assert list(parser.tail) == ["warning: that was fine"]


def test_two_failures_are_separated() -> None:
    parser, _ = feed(
        "FAILED: a.o\ncc a.c\na is wrong\n"
        "[3/9] Building C object c.o\nc warns\n"
        "FAILED: b.o\ncc b.c\nb is wrong\n"
        "ninja: build stopped: cannot make progress due to previous errors.\n"
    )
    assert parser.failed == {"a.o": ["cc a.c", "a is wrong"], "b.o": ["cc b.c", "b is wrong"]}


def test_failure_without_output() -> None:
    parser, _ = feed("FAILED: [code=1] custom\n")
    assert parser.failed == {"custom": []}


def test_tail_is_bounded() -> None:
    parser, _ = feed("\n".join(f"line {n}" for n in range(1000)))
    assert parser.tail[-1] == "line 999"
    assert len(parser.tail) == 40


def test_targets_exclude_files() -> None:
    listing = "llama-server: phony\nbin/llama-server: CXX_EXECUTABLE\nall: phony\nsrc\\x.obj: CXX\nC:/x: y\n\n"
    assert parse_targets(listing) == {"llama-server", "all"}


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ("Building CXX object src/CMakeFiles/llama.dir/llama-kv-cache.cpp.o", "llama-kv-cache.cpp"),
        ("Building C object a\\b.c.obj", "b.c"),
        ("Linking CXX shared library bin/libllama.so.0.5.0", "libllama.so.0.5.0"),
        ("Re-running CMake...", "CMake..."),
        ("", ""),
    ],
)
def test_short_description(description: str, expected: str) -> None:
    assert short(description) == expected
