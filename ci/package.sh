#!/usr/bin/env bash
# An archive of a backend in dist/, unpacked and tried: ci/package.sh [cpu|metal|cuda|vulkan]
# Also on Windows (Git's bash). Without arguments it is what kvtool package --check does, from a clean clone.
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
# a workflow's matrix leaves them empty where the system's compiler serves
[ -n "${CC:-}" ] || unset CC
[ -n "${CXX:-}" ] || unset CXX
kvtool fetch
kvtool apply
kvtool package "--${1:-cpu}" --check --out dist
