#!/usr/bin/env bash
# kvtool alone: its unit and repo tests, which need git and Python and no build. Also on Windows (Git's bash).
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
