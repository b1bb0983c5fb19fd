#!/usr/bin/env bash
# Compile for other systems on this machine, so that mistakes are found before the runners of those systems find them. zig's
# compilers compile cpp/ and every upstream file that a patch changes, and link the C++ unit tests and kv-check. If an
# emulator is installed (wine, qemu-user), they also run.
#   ci/cross.sh [macos|windows|linux-arm64]...      without names, all three
# Needs the patched tree (kvtool apply). kv-check reads models that a build of this system makes (kvtool build). Without such
# a build, and for macOS, kv-check is only compiled and linked.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/kvtool ] || sh ci/setup.sh
python=$PWD/.venv/bin/python tree=$PWD/llama.cpp zig=0.17.1
export PATH="$PWD/.venv/bin:$PATH"
[ -f "$tree/CMakeLists.txt" ] || { echo "error: no patched tree at $tree (kvtool fetch && kvtool apply)" >&2; exit 4; }
[ "$(python -m ziglang version 2>/dev/null)" = "$zig" ] || python -m pip install --quiet "ziglang==$zig"

base=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["base"])' "$tree/.git/kvtool/state.json")

# zig keeps its builds of the C and C++ libraries here, next to the other builds
export ZIG_GLOBAL_CACHE_DIR="$tree/build/zig" ZIG_LOCAL_CACHE_DIR="$tree/build/zig"
export CCACHE_COMPILERTYPE=clang CCACHE_COMPILERCHECK=content CCACHE_BASEDIR="$tree" CCACHE_NOHASHDIR=1
export WINEPREFIX="$tree/build/wine" WINEDEBUG=-all WINEDLLOVERRIDES="mscoree,mshtml="
mkdir -p "$tree/build/zig"

# make a program of one word for each of zig's tools, because CMake and ccache need that
tool() { # NAME ARGUMENT...
    local path="$tree/build/zig/$1"
    shift
    # shellcheck disable=SC2016
    printf '#!/bin/sh\n# zig %s\nexec "%s" -m ziglang %s "$@"\n' "$zig" "$python" "$*" >"$path"
    chmod +x "$path"
}

configure() { # DIR TARGET CMAKE-OPTION...
    local dir=$1 target=$2 launcher=()
    shift 2
    tool "cc-$target" cc -target "$target"
    tool "c++-$target" c++ -target "$target"
    tool ar ar
    tool ranlib ranlib
    tool rc rc
    command -v ccache >/dev/null && launcher=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
    cmake -S "$tree" -B "$dir" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_EXPORT_COMPILE_COMMANDS=ON \
        -DCMAKE_C_COMPILER="$tree/build/zig/cc-$target" -DCMAKE_CXX_COMPILER="$tree/build/zig/c++-$target" \
        -DCMAKE_AR="$tree/build/zig/ar" -DCMAKE_RANLIB="$tree/build/zig/ranlib" -DCMAKE_RC_COMPILER="$tree/build/zig/rc" \
        -DCMAKE_INSTALL_NAME_TOOL="$(command -v true)" -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF \
        -DGGML_METAL=OFF -DGGML_BLAS=OFF -DGGML_ACCELERATE=OFF -DGGML_CCACHE=OFF -DLLAMA_OPENSSL=OFF \
        -DLLAMA_USE_PREBUILT_UI=OFF "${launcher[@]}" "$@" >"$dir.log" 2>&1 || { tail -30 "$dir.log"; return 1; }
}

# print what ninja compiles from the C++ files of cpp/ and the patched C++ files
objects() { # DIR
    git -C "$tree" diff --name-only "$base" HEAD -- '*.cpp' >"$1.sources"
    python - "$1" "$tree" <<'END'
import json, pathlib, sys

directory, tree = map(pathlib.Path, sys.argv[1:])
wanted = {tree / line for line in pathlib.Path(f"{directory}.sources").read_text().split()}
for unit in json.loads((directory / "compile_commands.json").read_text()):
    if pathlib.Path(unit["file"]).resolve() in wanted:
        print((directory / unit["output"]).relative_to(directory))
END
}

# with the given emulator, measure a context, and run kv-check --quick on one model of each memory class
quick() { # KV-CHECK RUNNER...
    local check=$1 model failed=0
    shift
    if [ ! -x "$tree/build/cpu-release/bin/test-llama-archs" ]; then
        echo "NOT RUN: kv-check, because there is no build that writes its models (kvtool build)"
        return
    fi
    python - "$tree/build" >"$tree/build/cross-models" <<'END'
import pathlib, sys
from kvtool.verify import checks, models

build = pathlib.Path(sys.argv[1])
toys = models.toys(build / "cpu-release" / "bin" / "test-llama-archs", build / "verify")
print(models.cache_model(models.QWEN35_27B, build / "verify"), *checks.named_toys(toys, checks.CLASS_TOYS), sep="\n")
END
    {
        # --memory decodes nothing, so only the first rows of this cache of 2 GiB may use memory
        read -r model
        timeout 300 "$@" "$check" -m "$model" --memory --kv-dynamic on -c 32768 </dev/null \
            >"$tree/build/cross-result" 2>/dev/null || failed=1
        python - "$tree/build/cross-result" <<'END' || failed=1
import json, sys

said = json.load(open(sys.argv[1]))
print(f"  of {said['reserved'] >> 20} MiB of cells {said['committed'] >> 20} are there, {said['rss_context'] >> 20} resident")
sys.exit(said["rss_context"] > said["reserved"] // 8)
END
        while read -r model; do
            timeout 900 "$@" "$check" -m "$model" --quick </dev/null >"$tree/build/cross-result" 2>/dev/null || failed=1
            printf '  %s: %s\n' "$(basename "$model" .gguf)" \
                "$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["status"])' "$tree/build/cross-result" 2>/dev/null || echo died)"
        done
    } <"$tree/build/cross-models"
    return "$failed"
}

system() { # NAME
    local dir=$tree/build/cross-$1 unit suffix="" runner=() programs=(kv-check)
    case $1 in
    macos) configure "$dir" aarch64-macos -DCMAKE_SYSTEM_NAME=Darwin -DCMAKE_SYSTEM_PROCESSOR=arm64 -DCMAKE_OSX_SYSROOT= ;;
    windows)
        configure "$dir" x86_64-windows-gnu -DCMAKE_SYSTEM_NAME=Windows -DCMAKE_SYSTEM_PROCESSOR=AMD64
        suffix=.exe runner=(wine) ;;
    linux-arm64)
        # with musl the programs are static, so the emulator needs no files of such a system
        configure "$dir" aarch64-linux-musl -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
            -DCMAKE_EXE_LINKER_FLAGS=-static
        runner=(qemu-aarch64) ;;
    *) echo "error: no system $1 (macos, windows, linux-arm64)" >&2; return 2 ;;
    esac
    for unit in cpp/tests/test-kv-*.cpp; do programs+=("$(basename "$unit" .cpp)"); done
    objects "$dir" | xargs ninja -C "$dir" >"$dir.log" 2>&1 || { grep -A20 '^FAILED' "$dir.log"; return 1; }
    echo "  compiled $(objects "$dir" | wc -l) files, $(grep -c 'warning:' "$dir.log" || true) warnings"
    grep 'warning:' "$dir.log" | sort -u || true
    ninja -C "$dir" "${programs[@]}" >"$dir.log" 2>&1 || { grep -A20 '^FAILED' "$dir.log"; return 1; }
    echo "  linked ${programs[*]}"
    [ "${#runner[@]}" -gt 0 ] || return 0
    command -v "${runner[0]}" >/dev/null || { echo "NOT RUN: ${runner[0]} is not installed"; return 0; }
    for unit in "${programs[@]:1}"; do
        # qemu-user reports success for calls that it ignores
        if [ "${runner[0]} $unit" = "qemu-aarch64 test-kv-pages" ]; then
            echo "  $unit: NOT RUN, as qemu-user has no MADV_POPULATE_WRITE and no RLIMIT_AS"
            continue
        fi
        timeout 300 "${runner[@]}" "$dir/bin/$unit$suffix" </dev/null >"$dir.log" 2>&1 ||
            { tail -20 "$dir.log"; echo "  $unit FAILED"; return 1; }
        echo "  $unit: $(tail -1 "$dir.log")"
    done
    quick "$dir/bin/kv-check$suffix" "${runner[@]}"
}

status=0
[ $# -gt 0 ] || set -- macos windows linux-arm64
for name; do
    echo "== $name"
    # use a subshell, because set -e has no effect on the left side of ||
    (set -e; system "$name") &
    wait $! || { echo "$name: FAILED"; status=1; }
done
exit "$status"
