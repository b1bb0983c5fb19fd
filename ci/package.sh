#!/usr/bin/env bash
# Make an archive for a backend in dist/, unpack it, and test its programs: ci/package.sh [cpu|metal|cuda|vulkan]
# This runs kvtool package --check in a clean clone, by default for the CPU. It also works on Windows (in Git's bash).
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${OS:-}" = Windows_NT ]; then
    python -m venv .venv
    .venv/Scripts/python -m pip install --quiet --disable-pip-version-check --editable .
    export PATH="$PWD/.venv/Scripts:$PATH"
else
    sh ci/setup.sh
    export PATH="$PWD/.venv/bin:$PATH"
fi
# a workflow leaves these variables empty if the compiler of the system is used
[ -n "${CC:-}" ] || unset CC
[ -n "${CXX:-}" ] || unset CXX
kvtool fetch
kvtool apply
kvtool package "--${1:-cpu}" --check --out dist
