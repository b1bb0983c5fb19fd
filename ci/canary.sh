#!/usr/bin/env bash
# Test with kvtool canary whether the patches still work on upstream's newest tag. The report is report/canary.json. With
# GH_TOKEN, one GitHub issue is opened for each breakage. The project and its upstream.lock do not change.
#   ci/canary.sh [TAG] [OPTION...]      TAG: a tag instead of the newest one; OPTION: an option of kvtool canary
# The exit code is that of kvtool: 3 a patch does not apply, 7 the build failed, 8 verify failed, 9 no network.
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
