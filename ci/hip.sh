#!/usr/bin/env bash
# Compile the files of ggml-cuda that the patches change or add for HIP, on a machine without a GPU. Only the code for the host
# is compiled, with clang and ROCm's headers, with virtual memory and without. Nothing is linked and nothing runs.
#   ci/hip.sh        ROCM_PATH: the folder that has include/hip (/opt/rocm or /usr); CXX: a clang++
# Needs the patched tree (kvtool apply). If ROCm is older than ggml requires, only pages.cu is compiled.
set -euo pipefail
cd "$(dirname "$0")/.."
src=$PWD/llama.cpp/ggml/src/ggml-cuda
[ -f "$src/pages.cu" ] || { echo "error: no patched tree at $PWD/llama.cpp (kvtool fetch && kvtool apply)" >&2; exit 4; }

clang=${CXX:-$({ compgen -c clang++ || true; } | sort -Vr | head -n 1)}
rocm=${ROCM_PATH:-/opt/rocm}
[ -f "$rocm/include/hip/hip_version.h" ] || rocm=/usr
for need in "$rocm/include/hip/hip_version.h" "$rocm/include/hipblas/hipblas.h"; do
    [ -f "$need" ] || { echo "error: no $need (Debian 13, Ubuntu 24.04: apt-get install libamdhip64-dev libhipblas-dev)" >&2; exit 7; }
done
command -v "${clang:-clang++}" >/dev/null || { echo "error: no clang++ (apt-get install clang)" >&2; exit 7; }

version() { sed -n 's/^#define HIP_VERSION_'"$1"' \([0-9]*\).*/\1/p' "$rocm/include/hip/hip_version.h"; }
have=$(version MAJOR).$(version MINOR)
least=$(sed -n 's/.*hip_VERSION} VERSION_LESS \([0-9.]*\)).*/\1/p' "$src/../ggml-hip/CMakeLists.txt" | head -n 1)
sources=(pages.cu)
if [ "$(printf '%s\n' "$least" "$have" | sort -V | head -n 1)" = "$least" ]; then
    mapfile -t -O 1 sources < <(sed -n 's,^+++ b/ggml/src/ggml-cuda/\(.*\.cu\)$,\1,p' patches/*.patch | sort -u)
else
    echo "NOT COMPILED: the patched files, because ggml needs ROCm $least, and this is $have"
fi

cd "$src"
# clang's own headers need this wrapper for HIP, but clang leaves it out if no device libraries are installed
flags=(-x hip --offload-host-only -nogpulib "--rocm-path=$rocm" -include __clang_hip_runtime_wrapper.h -std=c++17
    -D__HIP_PLATFORM_AMD__ -DGGML_USE_HIP -I.. -I../../include -fsyntax-only)
[ "$rocm" = /usr ] || flags+=(-isystem "$rocm/include") # if /usr/include were named, it would have priority over the headers of C++
for vmm in "" -DGGML_HIP_NO_VMM; do
    for source in "${sources[@]}"; do
        echo "$("$clang" -dumpversion), ROCm $have: $source $vmm"
        "$clang" "${flags[@]}" $vmm "$source"
    done
done
