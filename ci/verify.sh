#!/usr/bin/env bash
# Build a backend and prove quickly that its dynamic cache equals the static one. The results are in report/.
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
