#!/usr/bin/env bash
# Build a backend, and prove with kvtool verify --quick that its dynamic cache gives the same results as the static cache. The
# results are written to report/.
#   ci/verify.sh [cpu|metal|cuda|vulkan]
set -euo pipefail
cd "$(dirname "$0")/.."
backend=${1:-cpu}
sh ci/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
mkdir -p report
kvtool fetch
kvtool apply
kvtool build "--$backend" --no-ui
kvtool verify "--$backend" --quick --json --junit report/verify.xml | tee report/verify.json
