"""Test the help of each command, its examples and the shell completion."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest
import typer

from kvtool import cli, options


@pytest.mark.parametrize("verb", cli.COMMANDS)
def test_help_of_each_command(verb: str, kvtool: Any) -> None:
    ran = kvtool(verb, "--help")
    text = " ".join(ran.out.replace("│", " ").split())
    assert ran.code == 0
    assert all(option in text for option in ("--json", "--project", "--tree", "--quiet", "--verbose"))
    command = importlib.import_module(cli.module_of(verb)).command
    assert len((command.__doc__ or "").strip().splitlines()) > 2, "one line is not enough"


def helps_of(make: Any) -> Iterator[str]:
    """Yield the help text of each parameter in the source."""
    for hint in get_type_hints(make, include_extras=True).values():
        if hasattr(hint, "__metadata__"):
            (info,) = hint.__metadata__
            yield info.help


def bare(text: str) -> str:
    return re.sub(r"[\s│]", "", text)


@pytest.mark.parametrize("verb", cli.COMMANDS)
def test_help_keeps_text_in_brackets(verb: str, kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    command = importlib.import_module(cli.module_of(verb)).command
    shown = bare(kvtool(verb, "--help").out)
    assert bare(inspect.getdoc(command) or "") in shown
    helps = [*helps_of(command), *helps_of(options.make_env)]
    assert any("[llama.cpp in the project]" in text for text in helps)
    assert [text for text in helps if bare(text) not in shown] == []


@pytest.mark.parametrize("verb", cli.COMMANDS)
def test_examples_can_be_pasted(verb: str) -> None:
    doc = inspect.getdoc(importlib.import_module(cli.module_of(verb)).command) or ""
    examples = [line.strip() for line in doc.splitlines() if line.startswith("    kvtool")]
    assert examples
    app = typer.main.get_command(cli.build_app(verb))
    for example in examples:
        assert "|" not in example
        words = shlex.split(example, comments=True)
        assert words[:2] == ["kvtool", verb]
        app.commands[verb].make_context(verb, words[2:])  # type: ignore[attr-defined]  # raises if it cannot parse


def test_help_lists_commands_in_order(kvtool: Any) -> None:
    for args in (("--help",), ("-h",), ()):
        out = kvtool(*args).out
        at = [out.index(f"│ {verb} ") for verb in cli.COMMANDS]
        assert at == sorted(at)
        assert "doctor" in out and "then fetch, apply, build, verify" in " ".join(out.split())


def test_shell_completes_verbs_and_options() -> None:
    def completes(words: str) -> list[str]:
        said = {"_KVTOOL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        code = "import sys; sys.argv = ['kvtool']; from kvtool import cli; cli.main()"
        run = [sys.executable, "-c", code]
        return subprocess.run(run, env={**os.environ, **said}, capture_output=True, text=True).stdout.split()

    assert completes("kvtool st") == ["status"]
    assert completes("kvtool rebase --acc") == ["--accept-shrink"]
