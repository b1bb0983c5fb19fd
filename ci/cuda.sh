#!/usr/bin/env bash
# Compile the files of ggml-cuda that the patches change or add, on a machine without a GPU. NVIDIA's compiler is installed
# from PyPI into .venv. The files are compiled for one kind of GPU, with virtual memory and without. Nothing is linked and
# nothing runs. ci/gpu.sh runs the checks on a machine with a GPU.
#   ci/cuda.sh [ARCHITECTURE]      default: 90
# Needs the patched tree (kvtool apply), and 1.2 GB of disk for the compiler.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/kvtool ] || sh ci/setup.sh
arch=${1:-90} version=13.0 tree=$PWD/llama.cpp
export PATH="$PWD/.venv/bin:$PATH"
[ -f "$tree/CMakeLists.txt" ] || { echo "error: no patched tree at $tree (kvtool fetch && kvtool apply)" >&2; exit 4; }

# each package is named with its version, because the packages do not pin the versions of each other
packages=()
for part in cuda-nvcc cuda-crt nvvm cuda-runtime cuda-cccl cublas; do packages+=("nvidia-$part==$version.*"); done
python -m pip install --quiet --disable-pip-version-check "${packages[@]}"
toolkit=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu${version%.*}
# use this compiler, even if the machine has another one
export CUDACXX=$toolkit/bin/nvcc

# make the links that the packages do not have, with the command that kvtool doctor prints
missing() {
    kvtool doctor --cuda --json | python -c '
import json, sys
print(*(c["how"] for c in json.load(sys.stdin)["checks"] if c["name"] == "links to CUDA'"'"'s libraries"), sep="\n")'
}
how=$(missing || true)
[ -z "$how" ] || bash -c "$how"
kvtool doctor --cuda >/dev/null

objects=()
for source in $({ git -C "$tree" ls-files ggml/src/ggml-cuda/pages.cu
    sed -n 's,^+++ b/\(ggml/src/ggml-cuda/.*\.cu\)$,\1,p' patches/*.patch; } | sort -u); do
    objects+=("ggml/src/ggml-cuda/CMakeFiles/ggml-cuda.dir/$(basename "$source").o")
done
[ "${#objects[@]}" -ge 2 ] || { echo "error: no patch changes ggml-cuda" >&2; exit 4; }

compile() { # NAME OF THE BUILD, CMAKE-OPTION...
    local dir=$tree/build/$1 configure
    shift
    mkdir -p "$tree/build" # the folder is missing if the tree was never built
    configure=$(kvtool build --cuda --no-ui --dry-run -D "CMAKE_CUDA_ARCHITECTURES=$arch" "$@" | sed -n 1p)
    eval "${configure//"$tree/build/cuda-release"/"$dir"}" >"$dir.log" 2>&1 || { tail -30 "$dir.log"; return 7; }
    ninja -C "$dir" "${objects[@]}"
}

echo "== $("$CUDACXX" --version | sed -n 's/.*release //p'), sm_$arch: ${objects[*]##*/}"
compile cuda-objects
echo "== the same without virtual memory"
compile cuda-objects-no-vmm -D GGML_CUDA_NO_VMM=ON
