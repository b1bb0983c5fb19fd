"""Isolate the tests from the machine: a temporary HOME and cache, fixed dates, an editor that fails, and no network.

`project` is a kvtool project with a tiny upstream, which is created here. `kvtool` runs a command in this process. The
tests of tests/e2e need the real environment, so they are not isolated.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvtool import cli, process

NOWHERE = "http://127.0.0.1:9"  # a closed port, so connections are refused at once


@pytest.fixture(autouse=True)
def sealed(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    if "e2e" in request.node.path.parts:
        yield
        return
    home = tmp_path_factory.mktemp("home")
    editor = home / "editor"
    editor.write_text("#!/bin/sh\necho 'an editor was opened' >&2\nexit 1\n")
    editor.chmod(0o755)
    (home / ".gitconfig").write_text(
        "[user]\nname = Tester\nemail = tester@example.invalid\n[init]\ndefaultBranch = main\n"
    )
    for name in [n for n in os.environ if n.startswith(("KVTOOL_", "GIT_", "PIP_", "npm_config_", "XDG_"))]:
        monkeypatch.delenv(name)
    settings = {
        "HOME": str(home),
        "KVTOOL_CACHE": str(tmp_path / "cache"),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_DATE": "2026-01-02T03:04:05+0100",
        "GIT_COMMITTER_DATE": "2026-01-02T03:04:05+0100",
        "GIT_EDITOR": str(editor),
        "npm_config_registry": NOWHERE,
        "PIP_INDEX_URL": NOWHERE,
        "PIP_CONFIG_FILE": os.devnull,
        "https_proxy": NOWHERE,
        "http_proxy": NOWHERE,
        "no_proxy": "localhost,127.0.0.1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(home)
    yield
    process.on_command(None)


def git(repo: Path, *args: str, strip: bool = True) -> str:
    """Run git with the user's settings, as in a shell, and return its output."""
    done = subprocess.run(["git", "-C", str(repo), *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() if strip else done.stdout


FILES = {
    ".gitignore": "/build*\n",
    "CMakeLists.txt": "project(tiny)\nadd_library(a src/a.cpp)\n",
    "src/a.cpp": "".join(
        f"int function_{n}(int x) {{\n    int y = x + {n};\n    return y;\n}}\n\n" for n in range(1, 9)
    ),
    "src/b.h": "struct params {\n    bool one;\n    bool two;\n    bool three;\n};\n",
    "docs/empty": "",
    "docs/ünï cödé.md": "naïve\n",
    "scripts/run.sh": "#!/bin/sh\nexit 0\n",
}


def write_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
        if name.endswith(".sh"):
            path.chmod(0o755)


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """Create a tiny upstream with the tags v1 and v2."""
    repo = tmp_path / "upstream"
    repo.mkdir()
    git(repo, "init", "-q")
    write_files(repo, FILES)
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "one")
    git(repo, "tag", "v1")
    path = repo / "src/a.cpp"
    path.write_text("// a comment on top\n" + path.read_text().replace("x + 8", "x + 88"))
    git(repo, "commit", "-qam", "two")
    git(repo, "tag", "-am", "annotated", "v2")
    return repo


@dataclass
class Tiny:
    """Describe a kvtool project with the tiny upstream. The names of paths are those of kvtool.project.Project."""

    root: Path
    upstream: Path
    sources: str = ""
    patches: list[tuple[str, str]] = field(default_factory=list)

    @property
    def tree(self) -> Path:
        return self.root / "llama.cpp"

    @property
    def state(self) -> Path:
        return self.tree / ".git" / "kvtool"

    def write_lock(self, current: str = "v1", **trees: str) -> None:
        """Write upstream.lock. `trees` has wrong tree ids for some tags."""
        text = f'current = "{current}"\nremote = "{self.root / "no-remote"}"\n'
        for day, tag in enumerate(("v1", "v2"), 1):
            tree = trees.get(tag) or git(self.upstream, "rev-parse", f"{tag}^{{tree}}")
            text += (
                f'[[upstream]]\ntag = "{tag}"\ndate = "2026-01-0{day}"\ntree = "{tree}"\nsources = [{self.sources}]\n'
            )
        (self.root / "patches/upstream.lock").write_text(text)

    def add_patch(
        self, name: str, *edits: tuple[str, str, str], extra: str = "", message: str = "", u: int = 1
    ) -> None:
        """Add a patch that makes the edits (path, old, new) on top of v1 and the earlier patches."""
        work = self.root.parent / "patch-work"
        if not work.exists():
            git(self.upstream, "worktree", "add", "-q", "--detach", str(work), "v1")
        for path, old, new in edits:
            text = (work / path).read_text()
            assert text.count(old) == 1, (path, old)
            (work / path).write_text(text.replace(old, new))
        git(work, "commit", "-qam", message or f"{name}: a patch")
        flags = (f"-U{u}", "--zero-commit", "--full-index", "--no-signature", "-k")
        mail = git(work, "format-patch", "--stdout", "-1", *flags, strip=False)
        (self.root / f"patches/{name}.patch").write_text(mail)
        with (self.root / "patches/series.toml").open("a") as file:
            file.write(f'\n[[patch]]\nid = "{name}"\nwhy = "because of {name}"\n{extra}')

    def snapshot(self) -> dict[str, bytes]:
        """Return all files of patches/ and cpp/."""
        folders = (self.root / "patches", self.root / "cpp")
        return {
            str(p.relative_to(self.root)): p.read_bytes() for f in folders for p in sorted(f.rglob("*")) if p.is_file()
        }


@pytest.fixture
def project(tmp_path: Path, upstream: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """Create a project with two patches and two new files. KVTOOL_UPSTREAM names the tiny upstream as the mirror."""
    tiny = Tiny(tmp_path / "project", upstream)
    write_files(
        tiny.root,
        {
            "patches/series.toml": "# the series\n",
            "cpp/README.md": "about\n",
            "cpp/src/new.cpp": "int brand_new;\n",
            "cpp/tools/check/run.sh": "#!/bin/sh\n",
        },
    )
    tiny.write_lock()
    tiny.add_patch("flag", ("src/b.h", "    bool two;\n", "    bool two;\n    bool dynamic;\n"))
    tiny.add_patch(
        "use",
        ("src/a.cpp", "int y = x + 2;", "int y = x + 2 + grown();"),
        ("CMakeLists.txt", "src/a.cpp)", "src/a.cpp src/new.cpp)"),
    )
    monkeypatch.chdir(tiny.root)
    monkeypatch.setenv("KVTOOL_UPSTREAM", str(upstream))
    return tiny


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def kvtool(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs a kvtool command in this process.

    kvtool("apply", "--json") returns a Ran: the exit code and the output.
    """

    def run(*args: str | Path) -> Ran:
        capsys.readouterr()
        code = cli.run([str(a) for a in args])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def start() -> Any:
    """Return a function that starts kvtool as a process, for tests of kills and races: start("fetch")."""
    started: list[subprocess.Popen[str]] = []

    def run(*args: str | Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        running = subprocess.Popen(
            [sys.executable, "-m", "kvtool", *(str(a) for a in args)],
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(running)
        return running

    yield run
    for running in started:
        if running.poll() is None:
            running.kill()
        running.communicate()
