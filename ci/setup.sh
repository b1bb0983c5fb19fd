#!/bin/sh
# Install kvtool, and the packages that its tests need, into .venv/. make calls this if pyproject.toml has changed.
# Needs Python 3.11 or newer with venv. If it is not on PATH, set the variable PYTHON to the path of its program.
set -eu
cd -P "$(dirname "$0")/.." # with links resolved, as Python sees the path

fail() {
    printf 'error: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '       %s\n' "$line" >&2; done
    exit 7
}

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

python=
for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
    candidate=${PYTHON:-$candidate}
    if command -v "$candidate" >/dev/null 2>&1 && recent "$candidate"; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || fail "no Python 3.11 or newer found (${PYTHON:-python3}: $("${PYTHON:-python3}" --version 2>&1 || true))" \
    "Debian 12, Ubuntu 24.04 or newer: sudo apt-get install python3 python3-venv" \
    "macOS: brew install python" \
    "Windows: winget install Python.Python.3.13" \
    "one that is elsewhere: make PYTHON=/path/to/python3 ..."

# an environment that was moved, or whose Python was removed, cannot be repaired
if [ ! -x .venv/bin/python ] || ! recent .venv/bin/python || ! grep -qF "$PWD/.venv" .venv/bin/activate; then
    echo "making .venv with $($python --version)"
    rm -rf .venv
    "$python" -m venv .venv || fail "$python cannot make a virtual environment" \
        "Debian, Ubuntu: sudo apt-get install python3-venv"
fi

# kvtool fetch can read upstream from an npm package. if npm is not installed, install it from PyPI
extras=dev
command -v npm >/dev/null 2>&1 || extras=dev,npm

echo "installing kvtool into .venv"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$extras]" || fail \
    "pip could not install kvtool into .venv" "the reason stands above; usually there is no network or no package index"
