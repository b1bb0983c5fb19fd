"""Run the plan of a build: configure if that is needed, then run ninja with a progress bar.

An error shows the command that failed.
"""

import difflib
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtool import process
from kvtool.compile import ninja
from kvtool.compile.cmake import PAGE_ON, Plan
from kvtool.console import Console
from kvtool.errors import BuildError, UsageError
from kvtool.locks import try_lock_dir

_STAMP = "kvtool-configure.json"
# CMake and ninja colour their output if one of these variables is set. GNU make sets the last two in a terminal.
_UNCOLOURED: process.Environment = dict.fromkeys(("CLICOLOR_FORCE", "MAKE_TERMOUT", "MAKE_TERMERR"))


@dataclass(frozen=True)
class Outcome:
    """Report a build.

    steps: the number of ninja's steps that ran
    compiled: the number of steps that compiled a file
    cache_hits: the number of compilations whose result ccache had; 0 without ccache
    cache_misses: the number of compilations whose result ccache did not have
    no_page: if the web page of llama-server could not be built, the reason; "" otherwise
    """

    targets: tuple[str, ...]
    configured: bool = False
    steps: int = 0
    compiled: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    no_page: str = ""


def build_tree(planned: Plan, console: Console) -> Outcome:
    """Run CMake if the options or a CMakeLists.txt changed, then build.

    If a command fails, raise BuildError with its output.

    The build directory is locked, because two builds at the same time would damage each other's files.
    """
    planned.build_dir.mkdir(parents=True, exist_ok=True)
    with try_lock_dir(planned.build_dir, BuildError, "is building or verifying"):
        configured = _configure(planned, console)
        targets = _existing_targets(planned)
        stats = planned.build_dir / "ccache.stats"
        stats.unlink(missing_ok=True)
        done = _build(planned, targets, console)
        # CCACHE_STATSLOG makes ccache write one word for each compilation into this file
        told = stats.read_text("utf-8", "replace").split("\n") if stats.is_file() else []
    hits = sum(told.count(f"{how}_cache_hit") for how in ("direct", "preprocessed"))
    no_page = _no_page(planned, done, console) if planned.page else ""
    return Outcome(targets, configured, done.steps, done.compiled, hits, told.count("cache_miss"), no_page)


def _no_page(planned: Plan, done: ninja.OutputParser, console: Console) -> str:
    """Return the reason why upstream's build made no web page, "" if it made one.

    Upstream's build continues if npm fails. Raises BuildError if the user asked for the page.
    """
    if not any(note.startswith(("no assets available", "provisioning failed")) for note in done.page):
        # delete this folder of 700 MB, because it is needed again only when the sources of the page change
        shutil.rmtree(planned.build_dir / "tools" / "ui" / "ui-src", ignore_errors=True)
        return ""
    why = next((note for note in done.page if "failed" in note or "not found" in note), done.page[0])
    if planned.page_required:
        raise BuildError(
            "llama-server was built without its web page",
            why=why,
            next_step="npm needs its registry (npm ping) and Node.js 20.19 or newer; --no-ui builds without the page",
            output="\n".join(done.tail),
        )
    console.step(console.again(f"llama-server is without its web page ({why}); kvtool build --ui prints the reason"))
    return why


def configured_page(build_dir: Path) -> bool | None:
    """Return whether a build directory was last configured with the web page; None if it was not configured yet."""
    stamp = build_dir / _STAMP
    return PAGE_ON in stamp.read_text() if stamp.is_file() else None


def _configure(planned: Plan, console: Console) -> bool:
    """Run CMake from scratch if the plan changed or the last attempt failed. Return True if that was done.

    Otherwise call ninja, which runs CMake again if a CMakeLists.txt changed.
    """
    stamp, made = planned.build_dir / _STAMP, planned.build_dir / "build.ninja"
    if stamp.is_file() and stamp.read_text() == planned.key and made.is_file():
        # let ninja configure again if a CMakeLists.txt changed, so that the list of targets below is right
        _capture_build((planned.tools.ninja, "-C", planned.build_dir, made.name), planned, "configure failed")
        return False
    stamp.unlink(missing_ok=True)
    console.step(f"configuring {planned.backend}-{planned.preset}")
    _capture_build(planned.configure, planned, "configure failed")
    stamp.write_text(planned.key)
    return True


def _capture_build(argv: Sequence[str | Path], planned: Plan, what: str) -> process.Completed:
    done = process.capture(argv, env={**_UNCOLOURED, **planned.env}, check=False)
    if done.returncode != 0:
        output = (done.stdout + done.stderr).strip()
        raise BuildError(what, why=_cmake_reason(output), next_step=_advice(output), output=output)
    return done


def _cmake_reason(output: str) -> str:
    """Return the first error that CMake prints, or else its last line."""
    if found := re.search(r"^(CMake Error.*?):?(?:\n\s*(.*))?$", output, re.MULTILINE):
        return ": ".join(filter(None, found.groups()))
    return output.rpartition("\n")[2]


def _existing_targets(planned: Plan) -> tuple[str, ...]:
    """Return the targets to build: the targets that the user named or, without names, the default targets that exist.

    Raises UsageError for an unknown name.
    """
    listed = (planned.tools.ninja, "-C", planned.build_dir, "-t", "targets", "all")
    listing = _capture_build(listed, planned, "cannot list the targets")
    known = ninja.parse_targets(listing.stdout) | {"all"}
    if unknown := [target for target in planned.chosen if target not in known]:
        close = difflib.get_close_matches(unknown[0], sorted(known), n=3)
        raise UsageError(
            f"there is no target {unknown[0]}",
            why=f"did you mean {' or '.join(close)}?" if close else "",
            next_step="--target all builds everything",
        )
    # if none of the targets exists, this is not the llama.cpp that kvtool knows, so build everything
    return tuple(target for target in planned.targets if target in known) or ("all",)


def _build(planned: Plan, targets: Sequence[str], console: Console) -> ninja.OutputParser:
    """Run ninja through cmake with a progress bar. Return the parser of its output."""
    parser = ninja.OutputParser()
    # This fixes the form of ninja's status lines, so that they can be parsed.
    env = {**_UNCOLOURED, **planned.env, "NINJA_STATUS": ninja.STATUS_FORMAT}
    with console.progress(f"building {planned.backend}-{planned.preset}") as bar:

        def on_line(line: str) -> None:
            if step := parser.feed(line):
                bar.set_total(step.total)
                bar.update(step.done, f"{step.done}/{step.total} {ninja.short(step.description)}")

        argv = planned.build(targets)
        done = process.stream(argv, env=env, on_line=on_line)
    if done.returncode != 0:
        raise _build_error(parser, argv)
    return parser


def _build_error(parser: ninja.OutputParser, argv: Sequence[str]) -> BuildError:
    names = ", ".join(map(ninja.short, parser.failed))
    text = "\n\n".join("\n".join(lines).strip() for lines in parser.failed.values() or [parser.tail])
    # the first error that a compiler or a linker printed
    markers = ("error: ", "error C", "undefined reference", "undefined symbol")
    errors = (line.strip() for line in text.splitlines() if names and any(marker in line for marker in markers))
    by_hand = f"after a change, run kvtool build again; by hand: {process.quote(argv)}"
    return BuildError(
        f"the build failed at {names}" if names else "the build failed",
        why=next(errors, parser.message),
        next_step=_advice(text) or by_hand,
        output=text,
    )


_ADVICE = (
    ("No space left on device", "free disk space (a build needs up to 1 GB), then run kvtool build again"),
    ("Killed signal terminated program", "the machine ran out of memory: try kvtool build --jobs 1"),
    ("out of memory", "try kvtool build --jobs 1"),
)


def _advice(output: str) -> str:
    return next((advice for needle, advice in _ADVICE if needle in output), "")
