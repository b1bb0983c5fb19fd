"""Test the options that `kvtool build` accepts and refuses, and what it prints. Nothing is built."""

from __future__ import annotations

import json
import os
import runpy
import shutil
from pathlib import Path

import pytest

from kvtool import cli
from kvtool.commands import build
from kvtool.commands.init import InitResult
from kvtool.commands.rebase_results import RebaseResult
from kvtool.compile import builder, cmake, ninja, toolchain
from kvtool.console import Console
from kvtool.errors import UsageError
from kvtool.machine import cores
from kvtool.package import contents
from kvtool.project import find_project


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "project"
    (root / "patches").mkdir(parents=True)
    (root / "patches" / "series.toml").touch()
    # do not search for the real Vulkan headers, because that needs seconds
    monkeypatch.setattr(toolchain, "PREFIXES", (str(tmp_path / "usr"),))
    return root


@pytest.mark.parametrize("backend", cmake.BACKENDS)
@pytest.mark.parametrize("tools", ["here", "nowhere"])
def test_dry_run_prints_both_commands(
    project: Path, backend: str, tools: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if tools == "nowhere":
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert cli.run(["build", f"--{backend}", "--dry-run", "--project", str(project)]) == 0
    configure, run = capsys.readouterr().out.splitlines()
    directory = project / "llama.cpp" / "build" / f"{backend}-release"
    assert f"cmake --fresh -S {project}/llama.cpp -B {directory} -G Ninja " in configure
    assert all(f"-D{name}={value}" in configure for name, value in cmake.BACKENDS[backend].flags.items())
    assert f"cmake --build {directory} --parallel" in run
    assert not directory.exists(), "a dry run writes nothing"


def test_dry_run_quotes_paths(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = project / "a tree"
    cli.run(["build", "-n", "--project", str(project), "--tree", str(tree)])
    out = capsys.readouterr().out
    assert f"-S '{tree}'" in out
    assert "'-DCMAKE_INSTALL_RPATH=$ORIGIN'" in out or "@loader_path" in out
    assert str(build.Command(("cmake", "a b"), {"CCACHE_BASEDIR": "/a b"})) == "CCACHE_BASEDIR='/a b' cmake 'a b'"


def test_printed_commands_are_quoted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "a b"
    InitResult(place, 0, 0, ()).render(Console())
    assert f"next: cd '{place}' && " in capsys.readouterr().out
    told = RebaseResult("v2", "v1", place, "stopped", stopped_at="use")
    assert all(f"git -C '{place}' s" in said for said in (told._next_after_conflict(), told._next_after_loss()))
    monkeypatch.setattr(toolchain, "SITE", place)
    assert toolchain._unlinked(place)[0].how.startswith(f"cd '{place}' && ")
    monkeypatch.setattr("sys.executable", f"{place}/python")
    typed = f"{place}/python" if os.name == "nt" else f"'{place}/python'"
    assert runpy.run_path(toolchain.__file__)["_PIP"].startswith(f"{typed} -m")


def test_cmake_files_may_be_latin1(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = build.make_plan(find_project(project), build.Options(), toolchain.for_dry_run("cpu"))
    files = plan.build_dir / "CMakeFiles/3.25"
    files.mkdir(parents=True)
    (files / "CMakeCCompiler.cmake").write_bytes(b'# \xe9\nset(CMAKE_C_COMPILER_ID "GNU")\n')
    assert contents._compilers(plan.build_dir) == {"C": "GNU"}
    parser, stats = ninja.OutputParser(), b"# /\xe9.c\ndirect_cache_hit\n"
    monkeypatch.setattr(builder, "_configure", lambda *_: False)
    monkeypatch.setattr(builder, "_existing_targets", lambda *_: ())
    monkeypatch.setattr(builder, "_no_page", lambda *_: "")
    monkeypatch.setattr(builder, "_build", lambda *_: (plan.build_dir / "ccache.stats").write_bytes(stats) and parser)
    assert builder.build_tree(plan, Console()).cache_hits == 1


def test_json_contract(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["build", "-n", "--json", "-t", "llama-server", "-j", "3", "--project", str(project)]) == 0
    doc = json.loads(capsys.readouterr().out)
    commands = doc.pop("commands")
    tree = f"{project}/llama.cpp"
    assert doc == {
        "command": "build",
        "ok": True,
        "tree": tree,
        "build_dir": f"{tree}/build/cpu-release",
        "bin_dir": f"{tree}/build/cpu-release/bin",
        "backend": "cpu",
        "preset": "release",
        "targets": ["llama-server"],
        "jobs": 3,
        "dry_run": True,
        "configured": False,
        "steps": 0,
        "compiled": 0,
        "cache_hits": 0,
        "cache_misses": 0,
        "seconds": doc["seconds"],
        "ui": shutil.which("npm") is not None,
        "no_page": "",
    }
    assert [set(command) for command in commands] == [{"argv", "env"}] * 2
    assert commands[1]["argv"][1:] == [
        "--build", f"{tree}/build/cpu-release", "--parallel", "3", "--target", "llama-server",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--metal", "--cpu"], "--cpu and --metal are two builds"),
        (["--preset", "fast"], "no preset fast"),
        (["-D", "LLAMA_OPENSSL"], "-D LLAMA_OPENSSL is not NAME=VALUE"),
        (["-D", "=ON"], "-D =ON is not NAME=VALUE"),
        (["--jobs", "-2"], "--jobs -2 is negative"),
    ],
)
def test_wrong_arguments_are_refused(
    project: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["build", "-n", *arguments, "--project", str(project)]) == 2
    assert message in capsys.readouterr().err


def test_missing_backend_fails_before_tree_check(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert cli.run(["build", "--metal", "--json", "--project", str(project)]) == 7
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["exit_code"]) == ("missing_tool", 7)
    assert error["what"] == "cannot build --metal here: no Metal"


def test_define_splits_at_first_equals() -> None:
    assert build.parse_defines(["A=1", "B=x=y", "C="]) == {"A": "1", "B": "x=y", "C": ""}
    with pytest.raises(UsageError):
        build.parse_defines(["A"])


def test_jobs_default_to_cores(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["build", "-n", "--json", "--project", str(project)]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"] == cores() >= 1
