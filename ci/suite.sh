#!/usr/bin/env bash
# Run `make test`: build llama.cpp, then run the Python tests, then our C++ unit tests. A step that fails does
# not hide the others; the exit code is non-zero if any step failed. Reports for machines are in report/.
# The unit and repo tests run in a process per core. The e2e tests need memory, and some of them all cores: two processes at
# most, and a file stays in one of them, because its tests share servers.
set -u
cd "$(dirname "$0")/.." || exit 1
export PATH="$PWD/.venv/bin:$PATH"
status=0
mkdir -p report
rm -f report/*.xml report/*.json

section() { printf '\n== %s\n' "$*"; }

section "build the patched tree"
build=
if kvtool doctor --json >report/doctor.json && kvtool fetch && kvtool apply && kvtool build --no-ui; then
    build=$(python -c 'import json, subprocess
print(json.loads(subprocess.check_output(["kvtool", "build", "--dry-run", "--json"]))["build_dir"])')
else
    status=1
    # doctor explains missing tools; other steps have printed their errors already
    kvtool doctor --quiet || true
fi

section "pytest tests/unit tests/repo"
pytest tests/unit tests/repo --numprocesses auto --dist worksteal --junitxml=report/pytest.xml || status=1

if [ -n "$build" ]; then
    section "pytest tests/e2e"
    pytest tests/e2e --numprocesses auto --maxprocesses 2 --dist loadfile --no-loadscope-reorder \
        --durations=15 --junitxml=report/pytest-e2e.xml || status=1
    section "ctest: the C++ unit tests"
    ctest --test-dir "$build" --label-regex '^kvtool$' --no-tests=error --output-on-failure --parallel 2 \
        --output-junit "$PWD/report/ctest.xml" || status=1
else
    echo "NOT RUN: ctest and tests/e2e, because there is no build (see above); this run has failed"
fi

if [ "$status" != 0 ]; then echo "make test: FAILED"; fi
exit "$status"
