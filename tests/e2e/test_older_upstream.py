"""A patch that an older upstream does not get must not be needed by the files that it does get.

What the series changes and adds is compiled, and not linked, on the upstream before the base;
`ci/nightly.sh older` builds and verifies all of them.
"""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtool.machine import cores
from kvtool.upstream.lock import load_lock
from tests.e2e.conftest import ROOT, kvtool


def test_all_that_the_series_touches_compiles_on_the_upstream_before_the_base(tmp_path: Path) -> None:
    lock = load_lock(ROOT / "patches" / "upstream.lock")
    tags = list(lock.upstreams)
    tag = tags[tags.index(lock.current) - 1]
    tree = tmp_path / "llama.cpp"
    code, applied = kvtool("apply", tag, "--tree", str(tree))
    assert code == 0, applied
    code, planned = kvtool("build", "--no-ui", "--dry-run", "--tree", str(tree))
    configure = planned["commands"][0]["argv"]
    subprocess.run(configure, check=True, capture_output=True)
    diff = ["git", "-C", tree, "diff", "--name-only", applied["base"], "HEAD"]
    ours = {str(tree / name) for name in subprocess.check_output(diff, text=True).splitlines()}
    # a file that two programs have is there twice
    entries = json.loads((Path(planned["build_dir"]) / "compile_commands.json").read_text())
    commands = {entry["file"]: entry for entry in entries if entry["file"] in ours}
    assert {"llama-kv-cache.cpp", "llama-kv-dynamic.cpp", "server-context.cpp"} <= {
        Path(file).name for file in commands
    }

    def compiled(file: str) -> str:
        entry = commands[file]
        argv = f"{entry['command']} -fsyntax-only"
        done = subprocess.run(argv, shell=True, cwd=entry["directory"], stderr=subprocess.PIPE, text=True)
        return done.stderr if done.returncode else ""

    with ThreadPoolExecutor(cores()) as pool:
        wrong = [text for text in pool.map(compiled, commands) if text]
    assert not wrong, f"on {tag}:\n" + "\n".join(wrong)
