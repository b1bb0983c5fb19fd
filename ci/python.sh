#!/usr/bin/env bash
# Run the unit and repo tests of kvtool. They need git and Python, but no build. This also works on Windows (in Git's bash).
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p report
if [ "${OS:-}" = Windows_NT ]; then
    python -m venv .venv
    bin=.venv/Scripts
    "$bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
else
    sh ci/setup.sh
    bin=.venv/bin
fi
"$bin/python" -m pytest tests/unit tests/repo --junitxml=report/pytest.xml "$@"
