#!/usr/bin/env bash
# Does the patch set still hold on upstream's newest tag? Fetch it, apply, build, verify --quick, all in a temporary
# project: nothing here is changed, the lock does not move.
#   ci/newest.sh [TAG]      TAG: another one than the newest
# UPSTREAM: a git repository other than the lock's remote. WORK: where to work, kept afterwards (default: temporary).
# The exit code is kvtool's own (3 a patch conflicts, 7 the build fails, 8 verify fails), so CI says which step broke.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/kvtool ] || sh ci/setup.sh
export PATH="$PWD/.venv/bin:$PATH"

# git must ask nobody for a password, and a user's configuration must not decide
export GIT_TERMINAL_PROMPT=0 GIT_CONFIG_GLOBAL=/dev/null
upstream=${UPSTREAM:-$(python -c 'import tomllib; print(tomllib.load(open("patches/upstream.lock", "rb"))["remote"])')}
tag=${1:-$(git ls-remote --tags --refs --sort=-version:refname "$upstream" 'b[0-9]*' | sed -n '1s,.*refs/tags/,,p')}
[ -n "$tag" ] || { echo "error: $upstream has no tag b<number>; name one: ci/newest.sh TAG" >&2; exit 9; }

work=${WORK:-$(mktemp -d)}
[ -n "${WORK:-}" ] || trap 'rm -rf "$work"' EXIT
mkdir -p "$work"
echo "== upstream $tag from $upstream"
git -c advice.detachedHead=false clone --quiet --depth 1 --branch "$tag" "$upstream" "$work/mirror" || exit 9

cp -R patches cpp "$work/"
python ci/pin.py "$work/patches/upstream.lock" "$tag" "$(git -C "$work/mirror" rev-parse 'HEAD^{tree}')"
run() { echo "== kvtool $*"; kvtool "$@" --project "$work"; }
export KVTOOL_CACHE="$work/cache"
run fetch --mirror "$work/mirror"
run apply
run build
run verify --quick
echo "== the patch set holds on $tag"
