#!/usr/bin/env bash
# Run `make test`: build llama.cpp, then run the Python tests, and then the C++ unit tests of cpp/. After a step that fails, the
# other steps still run. The exit code is not 0 if a step failed. Reports for CI systems are written to report/.
# The unit and repo tests run in one process for each core. The e2e tests run in at most two processes, because they need much
# memory, and some of them need all cores. All tests of a file run in the same process, because they share servers.
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
    # doctor explains which tools are missing; the other steps have printed their errors already
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
