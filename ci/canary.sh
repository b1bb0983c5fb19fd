#!/usr/bin/env bash
# Does the patch set still hold on upstream's newest tag? kvtool canary, its report in report/canary.json, and with
# GH_TOKEN one issue per breakage. Nothing here is changed, the lock does not move.
#   ci/canary.sh [TAG] [OPTION...]      as for kvtool canary; TAG: another one than the newest
# The exit code is kvtool's own (3 a patch has no place, 7 the build fails, 8 verify fails, 9 network).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
[ -x .venv/bin/kvtool ] || sh ci/setup.sh || exit
export PATH="$PWD/.venv/bin:$PATH"

report=report/canary.json
mkdir -p report
rm -f "$report"
status=0
kvtool canary "$@" --report "$report" || status=$?
if [ -n "${GH_TOKEN:-}" ] && [ -f "$report" ]; then
    python ci/issue.py "$report" || { [ "$status" != 0 ] || status=1; }
fi
exit "$status"
