#!/usr/bin/env bash
# Complete a release: add the wheel to the archives in dist/, and write one SHA256SUMS for all of them. If RELEASE names a tag,
# publish a release with that name, which needs GH_TOKEN. Without RELEASE, nothing is published.
set -euo pipefail
cd "$(dirname "$0")/.."
sh ci/setup.sh
.venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist .
cd dist
files=()
for file in *.tar.gz *.zip *.whl; do if [ -e "$file" ]; then files+=("$file"); fi; done
sha256sum "${files[@]}" >SHA256SUMS
cat SHA256SUMS
if [ -n "${RELEASE:-}" ]; then
    gh release create "$RELEASE" --verify-tag --title "$RELEASE" --generate-notes "${files[@]}" SHA256SUMS
fi
