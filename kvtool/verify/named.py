"""Find and run the tests that series.toml names for a patch: kinds of checks of verify, and C++ unit tests."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import get_args

from kvtool.errors import UsageError
from kvtool.series.series import Patch, patch_named
from kvtool.verify.checks import Check, Finding, Kind, passed, skipped
from kvtool.verify.trial import LOG, Failed, run_trial, trial

CHECK_KINDS: tuple[str, ...] = tuple(kind for kind in get_args(Kind) if kind != "unit")
PRESET = "apple-metal-release"
UNIT_SECONDS = 600.0


def unit_tests(cpp: Path) -> tuple[str, ...]:
    """Return the names of the C++ unit tests of cpp/, as ctest lists them."""
    return tuple(sorted(path.stem for path in (cpp / "tests").glob("test-*.cpp")))


def known_tests(cpp: Path) -> tuple[str, ...]:
    """Return all names of tests that may be in series.toml."""
    return (*CHECK_KINDS, *unit_tests(cpp))


def tests_of(patches: Collection[Patch], patch_id: str, cpp: Path) -> frozenset[str]:
    """Return the names of the tests that series.toml lists for a patch.

    Raises UsageError if the patch is unknown, has no tests, or names an unknown test.
    """
    patch = patch_named(patches, patch_id)
    if not patch.tests:
        raise UsageError(
            f"patches/series.toml names no test for {patch_id!r}",
            next_step=f"add tests = [...] to its entry, from {', '.join(known_tests(cpp))}; or run kvtool verify",
        )
    if unknown := [test for test in patch.tests if test not in known_tests(cpp)]:
        raise UsageError(f"there is no test {unknown[0]!r}", why=f"{patch_id!r} names it", next_step="kvtool lint")
    return frozenset(patch.tests)


# Some kinds of checks need a group of patches in the tree. Kinds that are not listed need the flag --kv-dynamic, which
# is in the group `core`.
NEEDED_GROUP = {"retype": "types", "parts": "server"}


def kinds_for(kinds: Collection[str], groups: Collection[str]) -> tuple[str, ...]:
    """Return the kinds of checks that can run in a tree with these groups; all kinds if `groups` is empty."""
    return tuple(kind for kind in kinds if not groups or NEEDED_GROUP.get(kind, "core") in groups)


# the program that each kind of check runs
PROGRAMS = {
    "kv-check": "kv-check",
    "retype": "kv-check",
    "completion": "llama-completion",
    "bench": "llama-bench",
    "server": "llama-server",
    "parts": "llama-server",
}


def targets(kinds: Collection[str], cpp: Path) -> tuple[str, ...]:
    """Return the build targets for these kinds of checks and unit tests.

    kv-check is always one of them, because it also lists the devices.
    """
    programs = [name for kind, run in PROGRAMS.items() if kind in kinds for name in ("test-llama-archs", run)]
    units = [name for name in unit_tests(cpp) if name in kinds]
    return tuple(dict.fromkeys(("kv-check", *programs, *units)))


@trial
def unit(check: Check) -> Finding:
    """Run one C++ unit test, the check's `model`. It passes if its exit code is 0."""
    done = run_trial(check, [check.model])
    if done.returncode == 0:
        return passed(check, "exit code 0")
    log = (done.stdout + done.stderr)[-LOG:]
    reason = next((line for line in reversed(log.splitlines()) if line.strip()), "it printed nothing")
    raise Failed("unit-fails", f"exit code {done.returncode}: {reason.strip()}", {"log": log})


@trial
def preset(check: Check, cmake: Path | None) -> Finding:
    """Check that CMake can read a tree's presets, and that the preset for Metal is among them.

    The preset is read from the file, because CMake hides it on machines that do not meet its condition.
    """
    if cmake is None:
        return skipped(check, "cmake is not installed; kvtool doctor explains the installation")
    done = run_trial(check, [cmake, "--list-presets"], cwd=check.model)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["cmake gave no reason"])[0]
        raise Failed("preset-fails", f"cmake cannot read CMakePresets.json: {said}")
    presets = json.loads((check.model / "CMakePresets.json").read_text(encoding="utf-8"))
    if not any(entry.get("name") == PRESET for entry in presets.get("configurePresets", [])):
        raise Failed("preset-fails", f"CMakePresets.json has no preset {PRESET}")
    return passed(check, f"cmake --preset {PRESET} is there")
