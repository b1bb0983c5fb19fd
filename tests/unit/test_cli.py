"""Test the command line: help, errors with exit codes, and that nothing but JSON is printed to stdout."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvtool import cli, console, errors, project
from kvtool.errors import KvtoolError, UsageError
from kvtool.result import PatchOutcome, Result, to_plain


def every_error() -> list[type[KvtoolError]]:
    return [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, KvtoolError)]


def test_exit_codes_are_frozen() -> None:
    assert {e.__name__: (e.exit_code, e.code) for e in every_error()} == {
        "KvtoolError": (1, "internal"),
        "DiskError": (1, "disk"),
        "UsageError": (2, "usage"),
        "ConflictError": (3, "conflict"),
        "TreeError": (4, "tree"),
        "LockError": (5, "lock"),
        "DriftError": (6, "drift"),
        "LintError": (6, "lint"),
        "BisectBad": (1, "bad"),
        "BisectSkip": (125, "skip"),
        "BisectAbort": (128, "abort"),
        "BuildError": (7, "build"),
        "MissingToolError": (7, "missing_tool"),
        "VerifyError": (8, "verify"),
        "MeasureError": (8, "measure"),
        "NetworkError": (9, "network"),
    }


def test_help_has_panels_and_no_types(kvtool: Any) -> None:
    text = kvtool("--help").out
    assert [panel for panel in cli.PANELS if f"─ {panel} ─" in text] == list(cli.PANELS)
    for command in cli.COMMANDS:
        assert not re.search("<(bool|str|path|int)>", kvtool(command, "--help").out), command
    assert all(re.search(rf"(^| ) *{code} +[a-z]", text, re.MULTILINE) for code in (*range(10), 130))


def test_version(kvtool: Any) -> None:
    assert kvtool("--version").out.startswith("kvtool ")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nonsense"], "nonsense"),
        (["status", "--nope"], "--nope"),
        (["fetch", "a", "b"], "b"),
        (["fetch", "--mirror"], "--mirror"),
    ],
)
def test_usage_errors_exit_2(kvtool: Any, args: list[str], says: str) -> None:
    ran = kvtool(*args)
    assert ran.code == 2 and says in ran.err and ran.out == "" and "--help" in ran.err
    ran = kvtool(*args, "--json")
    assert ran.code == 2 and ran.json["ok"] is False and ran.json["error"]["code"] == "usage"


def test_common_options_before_verb(kvtool: Any, tmp_path: Path) -> None:
    assert kvtool("--json", "-v", "--project", tmp_path, "status").json["command"] == "status"
    assert kvtool(f"--project={tmp_path}", "-q", "status").code == 2
    assert kvtool("-v").out == kvtool().out and kvtool("-v", "--version").out.startswith("kvtool ")


def test_console_prints_text_verbatim(capsys: pytest.CaptureFixture[str]) -> None:
    said, texts = console.Console(), ("user:x:1000 a:b:c :bug:", "[x] \\[y]", "#define A \\", "all:\t\tb", "c\r", "")
    for text in texts:
        said.line(text)
        said.line(text, "red")
        said.step(text)
        said.error(UsageError(text))
    out, err = capsys.readouterr()
    assert out == "".join(f"{text}\n" * 2 for text in texts)
    assert err == "".join(f"{text}\nerror: {text}\n" for text in texts)
    said.table(("a:b:c",), [("a:b:c \\",)])
    assert capsys.readouterr().out.split() == ["a:b:c", "a:b:c", "\\"]


def test_log_skips_unchanged_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console, "_QUIET_SECONDS", -1.0)
    with console.Console().progress("working", 4) as bar:
        for done in (1, 1, 1, 2):
            bar.update(done)
    assert capsys.readouterr().err.splitlines() == ["working", "working 25%", "working 50%"]


def test_long_note_leaves_percentage_and_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("COLUMNS", "80"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    with console.Console().progress("kv-check on 130 models", 4) as bar:
        bar.update(2, "llama-dense/retype/inplace/fa-on, qwen35-dense/retype/copy-streams/fa-off")
    shown = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", capsys.readouterr().err)
    assert " 50% 0:00:00 llama-dense/" in shown


def test_error_document_is_frozen(kvtool: Any, tmp_path: Path) -> None:
    ran = kvtool("status", "--json", "--project", tmp_path)
    assert ran.json == {
        "command": "status",
        "ok": False,
        "error": {
            "code": "usage",
            "exit_code": 2,
            "what": f"{tmp_path} is not a kvtool project",
            "why": "it has no patches/series.toml",
            "next": "name the directory that has one with --project DIR or KVTOOL_PROJECT",
            "output": "",
        },
    }
    human = kvtool("status", "--project", tmp_path)
    assert human.code == 2 and human.out == ""
    assert "error: " in human.err and "why:  " in human.err and "next: " in human.err


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_json_in_every_encoding(tmp_path: Path, encoding: str) -> None:
    place = tmp_path / "prüfung 😀"
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    argv = [sys.executable, "-m", "kvtool", "status", "--json", "--project", str(place)]
    ran = subprocess.run(argv, env=env, capture_output=True)
    assert str(place) in json.loads(ran.stdout)["error"]["what"]


@pytest.mark.parametrize(
    ("error", "code"), [(ZeroDivisionError("oh"), "internal"), (OSError(28, "No space left on device"), "disk")]
)
def test_traceback_only_for_internal_errors(
    kvtool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, code: str
) -> None:
    from kvtool.commands import status

    def broken(_project: object) -> None:
        raise error

    monkeypatch.setattr(status, "load_lock", broken)
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches/series.toml").write_text("")
    ran = kvtool("status", "--json", "--project", tmp_path)
    assert ran.code == 1 and ran.json["error"]["code"] == code and ("Traceback" in ran.err) == (code == "internal")


def test_bisect_usage_error_exits_128(kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    judging = (("bisect", "id", "--at", "HEAD", "--nope"), ("bisect", "id", "--att", "HEAD"), ("b", "--at=HEAD"))
    for args in judging:
        assert kvtool(*args).code == 128, args
    for other in (("bisect",), ("bisect", "id", "--nope"), ("bisect", "id", "--good")):
        assert kvtool(*other).code == 2, other
    monkeypatch.setattr(cli, "show_result", lambda *_: 1 / 0)
    monkeypatch.setattr("kvtool.commands.bisect.judge_commit", lambda *_: None)
    assert kvtool("bisect", "id", "--at", "HEAD").code == 128


def test_next_command_names_program_outside_path(kvtool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["my tools/bin/kvtool"])
    monkeypatch.setenv("PATH", "")
    said = console.Console(places=" --tree DIR").again("cd kvtool && kvtool init; kvtool build, then kvtool top")
    tool = "'my tools/bin/kvtool'"
    assert said == f"cd kvtool && {tool} init; {tool} build --tree DIR, then {tool} top"
    assert f"next: {tool} build --help" in kvtool("build", "--nope").err
    (tmp_path / "kvtool").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "next: kvtool build --help" in kvtool("build", "--nope").err


def test_missing_and_non_utf8_places(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"odd-\xff")
    odd.mkdir()
    ran = subprocess.run([sys.executable, "-m", "kvtool", "status", "--project", odd], capture_output=True)
    assert ran.returncode == 2 and b"odd-" in ran.stderr and b"internal" not in ran.stderr, ran
    gone = f"cd {tmp_path} && mkdir gone && cd gone && rmdir ../gone && exec {sys.executable} -m kvtool status"
    ran = subprocess.run(["sh", "-c", gone], capture_output=True)
    assert ran.returncode == 2 and b"does not exist any more" in ran.stderr, ran


@pytest.mark.parametrize("variable", ["KVTOOL_PROJECT", "KVTOOL_TREE", "KVTOOL_CACHE"])
def test_place_of_unknown_user(kvtool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str) -> None:
    monkeypatch.chdir(make(tmp_path / "one"))
    monkeypatch.setenv(variable, "~no-such-user/x")
    ran = kvtool("status", "--json")
    assert ran.code == 2 and ran.json["error"]["what"] == "there is no ~no-such-user/x", ran


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
@pytest.mark.parametrize("json", [(), ("--json",)])
def test_closed_pipe_and_full_disk(json: tuple[str, ...]) -> None:
    """Expect the usual exit code if the reader of the pipe has ended, and an error if the disk is full."""
    argv = [sys.executable, "-m", "kvtool", "lint", *json]
    reader, writer = os.pipe()
    os.close(reader)
    gone = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (gone.returncode, gone.stderr) == (0, b"")
    if Path("/dev/full").exists():
        with Path("/dev/full").open("wb") as full:
            told = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE)
        assert told.returncode == 1 and b"No space left" in told.stderr and b"Traceback" not in told.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="descriptors of POSIX")
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_descriptors_are_ignored(closed: str) -> None:
    ran = subprocess.run(["sh", "-c", f"{sys.executable} -m kvtool lint {closed}"], capture_output=True)
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_interrupt_exits_130(kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(only: str = "") -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build_app", interrupted)
    assert kvtool("status").code == 130


# --- results ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Inner:
    outcome: PatchOutcome
    path: Path


@dataclasses.dataclass(frozen=True)
class Sample(Result):
    command: ClassVar[str] = "sample"
    inner: tuple[Inner, ...]
    bad: bool = False

    @property
    def failure(self) -> KvtoolError | None:
        return UsageError("no") if self.bad else None


def test_result_as_json() -> None:
    doc = Sample((Inner(PatchOutcome.APPLIED, Path("a") / "b"),)).to_json()
    assert doc == {
        "command": "sample",
        "ok": True,
        "inner": [{"outcome": "applied", "path": str(Path("a/b"))}],
        "bad": False,
    }
    assert json.loads(json.dumps(doc)) == doc
    assert Sample((), True).to_json()["error"]["code"] == "usage"
    assert to_plain({Path("x"): {1}}) == {"x": [1]}


# Scripts read the document of each command. So fields may be added here, but never renamed.
CONTRACT = {
    "init.InitResult": "project patches new_files files",
    "fetch.FetchResult": "tag tree commit source cache freed",
    "apply.ApplyResult": "tag tree outcome base head changed_files upstream_lines patches groups upstream",
    "status.StatusResult": "state tag locked tree head branch why next dirty commits upstream_lines groups "
    "goal_lines new_files unlisted patches reasons only",
    "import_.ImportResult": "source head base found_by tree dry_run patches new_files only_new_files notes summary",
    "export.ExportResult": "tag tree head check files mailbox patches losses",
    "diff.DiffResult": "before after same patches diff",
    "bisect.BisectResult": "patch good bad last_good first_bad suspects why trials",
    "bisect.BisectAt": "patch commit verdict outcome why seconds",
    "canary.CanaryResult": "schema tag tag_from tag_why tree locked key steps breakages patches",
    "lint.LintResult": "patches findings",
    "top.TopResult": "url server",
}


@pytest.mark.parametrize("name", CONTRACT)
def test_fields_are_frozen(name: str) -> None:
    module, _, cls = name.partition(".")
    result = getattr(importlib.import_module(f"kvtool.commands.{module}"), cls)
    assert [f.name for f in dataclasses.fields(result) if f.name != "error"] == CONTRACT[name].split()
    assert result.command == module.rstrip("_")


# --- finding the project ------------------------------------------------------------------------------------------


def make(path: Path) -> Path:
    (path / "patches").mkdir(parents=True)
    (path / "patches/series.toml").write_text("")
    return path


def test_project_lookup_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = (make(tmp_path / name) for name in ("one", "two", "three"))
    (one / "deep/er").mkdir(parents=True)
    monkeypatch.chdir(one / "deep/er")
    assert project.find_project().root == one
    monkeypatch.setenv("KVTOOL_PROJECT", str(two))
    assert project.find_project().root == two
    assert project.find_project(three).root == three
    found = project.find_project(three)
    assert (found.tree, found.lock) == (three / "llama.cpp", three / "patches/upstream.lock")
    monkeypatch.setenv("KVTOOL_TREE", str(tmp_path / "t"))
    assert project.find_project().tree == tmp_path / "t"
    assert project.find_project(None, tmp_path / "u").tree == tmp_path / "u"


def test_project_defaults_to_package_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert project.find_project().root == Path(project.__file__).parents[1]
    monkeypatch.setattr(project, "_PACKAGE", tmp_path / "site/kvtool")
    monkeypatch.setattr(project, "PACKAGED", tmp_path / "site/kvtool/_data")
    with pytest.raises(UsageError, match="no kvtool project"):
        project.find_project()
    make(tmp_path / "site/kvtool/_data")
    # the folder for data in a wheel must not contain a tree
    assert project.find_project().tree == tmp_path / "llama.cpp"


@pytest.mark.parametrize("args", [("rebase", "v2"), ("rebase", "--abort"), ("export",)])
def test_installed_series_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvtool: Any, args: tuple[str, ...]
) -> None:
    monkeypatch.setattr(project, "PACKAGED", make(tmp_path / "_data"))
    ran = kvtool(*args, "--project", tmp_path / "_data", "--json")
    assert ran.code == 2 and "kvtool init DIR" in ran.json["error"]["next"]
