#!/usr/bin/env bash
# Prepare the machine, and run `make lint` and `make test`. CI runs this in a clean clone, and a user can run it, too.
# Needs git, Python 3.11 or newer with venv, and a C++ compiler. Everything else is installed into .venv/.
set -u
cd "$(dirname "$0")/.." || exit 1
status=0

# The test of builds in two folders needs ccache, and the tests of kvtool top in a terminal need tmux. Without them, these tests
# are skipped.
lacking=()
for tool in ccache tmux; do command -v "$tool" >/dev/null || lacking+=("$tool"); done
if [ -n "${CI:-}" ] && [ ${#lacking[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing ${lacking[*]}"
    { timeout 300 apt-get update -qq && timeout 300 apt-get install -y -qq "${lacking[@]}"; } </dev/null >/dev/null 2>&1 ||
        echo "${lacking[*]} could not be installed: the tests that need them will be skipped"
fi

# this also works on a machine that has a compiler but no make
part() {
    if command -v make >/dev/null; then make --no-print-directory "$1"; else sh ci/setup.sh && bash "ci/$2"; fi
}

part lint lint.sh </dev/null || status=1
part test suite.sh </dev/null || status=1
exit "$status"
