#!/usr/bin/env bash
# Run the checks that need a GPU, on a machine with nvcc, cmake, ninja and python3, and no network.
#   ci/gpu.sh pack FILE       on a machine with the patched tree: pack all that the other machine needs (18 MB)
#   ci/gpu.sh [run] [FILE]    on the machine with the GPU: build for this GPU only, and run the checks, the important ones first
# A run ends after at most LIMIT seconds (580). If there is more to do, run it again, and it continues. The build continues after
# the run has ended.
# Each result is written to the folder OUT (report/gpu) at once. results.jsonl has a line for each step, summary.txt is for
# people, failed.log has the output of failed steps, and build.log has the output of the build. Results are kept until FILE
# changes or llama.cpp/build/gpu is removed.
# If a comparison finds a difference, a static cache is compared with itself, because a backend may not repeat its results.
#   BIN=DIR       use the programs of this build instead of building
#   DEVICE=NAME   device of the checks, default: the first GPU (CUDA0). With CPU, the script itself can be tested.
# Exit codes: 0 all steps passed, 1 a step failed, 3 there is more to do (run it again), 4 the checks cannot run here.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 4
out=${OUT:-$PWD/report/gpu} end=$((SECONDS + ${LIMIT:-580})) device=${DEVICE:-CUDA0}
export PATH=$PATH:/usr/local/cuda/bin
tree=$PWD/llama.cpp build=$PWD/llama.cpp/build/gpu
bin=${BIN:-$build/bin} state=$build/$device
model=$tree/build/cache-qwen3.5-27b.gguf
classes="llama-dense qwen35-dense gemma3-dense lfm2-dense deepseek2-moe minimax-m3-moe dots3note-moe qwen4exp-moe deepseek32-moe deepseek4-moe"

say() { printf '%s\n' "$*" | tee -a "$out/summary.txt"; }
left() { echo $((end - SECONDS)); }

pack() { # FILE
    local work
    work=$(mktemp -d)
    PATH="$PWD/.venv/bin:$PATH" python - "$work" "$(basename "$model")" <<'END' || return 4
import pathlib, sys
from kvtool.verify import models

made = models.cache_model(models.QWEN35_27B, pathlib.Path(sys.argv[1]))
made.rename(made.with_name(sys.argv[2]))
END
    # pack only the sources that the build reads
    git -C "$tree" archive --prefix=llama.cpp/ HEAD -- . ':!docs' ':!models' ':!benches' ':!media' ':!gguf-py' \
        ':!.github' >"$work/llama.cpp.tar" || return 4
    git -C "$tree" archive --prefix=llama.cpp/ HEAD models/templates models/ggml-vocab-llama-spm.gguf >"$work/models.tar" || return 4
    tar -Af "$work/llama.cpp.tar" "$work/models.tar"
    tar -rf "$work/llama.cpp.tar" --transform 's,^,llama.cpp/build/,' -C "$work" "$(basename "$model")"
    gzip -c "$work/llama.cpp.tar" >"$1"
    rm -rf "$work"
    ls -lh "$1"
}

# unpack only new and changed files, so that the next build compiles only the changes. never unpack into a git checkout
unpack() { # FILE
    local stamp
    [ ! -e "$tree/.git" ] || { say "$tree is a checkout: it is built as it is, without an archive"; return 4; }
    stamp=$(cksum <"$1") || return 4
    [ "$stamp" != "$(cat "$build/archive" 2>/dev/null)" ] || return 0
    python3 - "$1" "$PWD" <<'END' || return 4
import pathlib, sys, tarfile

with tarfile.open(sys.argv[1]) as archive:
    for member in archive:
        data = archive.extractfile(member).read() if member.isfile() else None
        path = pathlib.Path(sys.argv[2], member.name)
        if data is not None and not (path.is_file() and path.read_bytes() == data):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
END
    mkdir -p "$build"
    rm -rf "$build"/built-* "$state"
    echo "$stamp" >"$build/archive"
}

# build in a session of its own, so that the build continues after this command has ended
start_build() {
    local arch
    arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
    say "building for sm_$arch, $(nvcc --version | sed -n 's/.*release //p')"
    rm -f "$build"/built-* "$build/ended"
    # the library of the driver may be in a folder that the linker does not search
    cat >"$build/build.sh" <<END
trap 'touch "$build/ended"' EXIT
cmake -S "$tree" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=$arch -DGGML_NATIVE=ON \
    -DLLAMA_BUILD_TESTS=ON -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF \
    -DCMAKE_EXE_LINKER_FLAGS=-Wl,--allow-shlib-undefined &&
    ninja -C "$build" test-kv-device && touch "$build/built-first" &&
    ninja -C "$build" kv-check test-llama-archs kv-bench && touch "$build/built-all"
END
    setsid nohup bash "$build/build.sh" >"$build/build.log" 2>&1 </dev/null &
    echo $! >"$build/pid"
}

is_building() { [ ! -f "$build/ended" ] && [ -f "$build/pid" ] && kill -0 "$(cat "$build/pid")" 2>/dev/null; }

# wait until a part of the build is complete; false if this run has no time left for it
wait_for() { # first|all
    [ -z "${BIN:-}" ] || return 0
    until [ -f "$build/built-$1" ]; do
        if [ "$(left)" -lt 10 ] || ! is_building; then return 1; fi
        sleep 2
    done
}

# run a step, unless an earlier run did it or there is no time. the step's last line is its result as JSON.
# NEED: a regular expression that must be in the output, as a proof that the step tested the right thing
step() { # NAME SECONDS PROGRAM ARGUMENT...
    local name=$1 most=$2 rc started=$SECONDS
    shift 2
    [ ! -f "$state/done/$name" ] || return 0
    if [ "$(left)" -lt 15 ]; then echo "$name" >>"$state/more"; return 0; fi
    [ "$most" -lt "$(left)" ] || most=$(($(left) - 5))
    timeout --kill-after=5 "$most" "$@" >"$state/log/$name" 2>&1 </dev/null
    rc=$?
    if [ $rc = 124 ] && [ "$(left)" -lt 15 ]; then echo "$name" >>"$state/more"; return 0; fi
    python3 - "$state" "$name" "$rc" "$((SECONDS - started))" "$*" "${NEED:-}" <<'END' | tee -a "$out/summary.txt"
import fcntl, json, pathlib, re, sys

state, name, rc, seconds, command, need = sys.argv[1:]
answer, text = None, pathlib.Path(state, "log", name).read_text(errors="replace")
for line in reversed(text.splitlines()):
    if line.startswith("{"):
        try:
            answer = json.loads(line)
            break
        except ValueError:
            pass
missing = rc == "0" and not re.search(need, text)
if missing:
    rc, text = "lacks", f"{text}\nthe output does not match {need}"
with open(pathlib.Path(state, "results.jsonl"), "a") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    row = {"step": name, "rc": rc if missing else int(rc), "seconds": int(seconds), "command": command, "answer": answer}
    file.write(json.dumps(row) + "\n")
words = (answer or {}).get("status") or (text.strip().splitlines() or [""])[-1][:100]
words += missing * ", but it did not test the right thing"
said = f"{'ok    ' if rc == '0' else 'FAILED'} {name}: {words} ({seconds} s)"
with open(pathlib.Path(state, "summary.txt"), "a") as file:
    print(said, file=file)
print(said)
if rc != "0":
    with open(pathlib.Path(state, "failed.log"), "a") as file:
        print(f"== {name}: exit code {rc}\n$ {command}\n{text[-4000:]}", file=file)
END
    touch "$state/done/$name"
    cp "$state/results.jsonl" "$out/"
    { [ ! -f "$state/failed.log" ] || cp "$state/failed.log" "$out/"; } 2>/dev/null
}

# compare a static with a dynamic cache. the end of the name decides how the dynamic cache grows
check() { # NAME-inplace|NAME-copy SECONDS MODEL OPTION...
    local name=$1 most=$2 way=${1##*-} model=$3 how='by copy'
    shift 3
    [ "$way" != inplace ] || how='in place'
    local run=("$bin/kv-check" -m "$model" "${on[@]}" --timeout 90)
    NEED="\"storage\": \"$how\"|same-not-grown|no-cache|skipped" step "$name" "$most" "${run[@]}" --storage "$way" "$@"
    if grep -q "^FAILED $name:" "$state/summary.txt"; then step "self-$name" "$most" "${run[@]}" --self "$@"; fi
}

# run up to four comparisons at a time, because a small test model does not keep a GPU busy
beside() {
    while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-4}" ]; do wait -n; done
    check "$@" &
}

run() { # [ARCHIVE]
    mkdir -p "$out"
    : >"$out/summary.txt"
    if [ -n "${1:-}" ]; then unpack "$1" || return 4; fi
    [ -f "$tree/CMakeLists.txt" ] || { say "no patched tree at $tree: make an archive with ci/gpu.sh pack FILE, and give it to this command"; return 4; }
    mkdir -p "$state/done" "$state/log"
    rm -f "$state/more"
    touch "$state/summary.txt"
    cat "$state/summary.txt" >>"$out/summary.txt"

    if [ "$device" != CPU ] && ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
        say "NOT RUN: everything, because there is no GPU here (nvidia-smi -L names none)."
        say "Without a GPU: ci/cuda.sh compiles the changed files, and DEVICE=CPU BIN=... runs the steps on the CPU."
        return 4
    fi
    if [ -z "${BIN:-}" ]; then
        for tool in nvcc cmake ninja python3; do
            command -v "$tool" >/dev/null || { say "NOT RUN: everything, because there is no $tool"; return 4; }
        done
        nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee -a "$out/summary.txt"
        [ -f "$build/built-all" ] || is_building || start_build
    fi

    local on=(--device "$device") gpu=1 pages="$device: pages of"
    [ "$device" != CPU ] || { on=(); gpu=; pages=; say "on the CPU: these results say nothing about a GPU"; }

    if wait_for first; then NEED=$pages step pages 120 "$bin/test-kv-device"; else echo pages >>"$state/more"; fi
    if wait_for all; then
        first_checks
        sanitizer
        measurements
        checks
    else
        echo build >>"$state/more"
    fi
    { cp "$build/build.log" "$state/log/pages" "$out/"; } 2>/dev/null
    if [ -z "${BIN:-}" ] && [ ! -f "$build/built-all" ] && ! is_building; then
        say "FAILED: the build"
        grep -A20 '^FAILED\|CMake Error' "$build/build.log" | head -60 | tee -a "$out/failed.log"
        return 1
    fi
    if [ -s "$state/more" ]; then say "MORE TO DO, run it again: $(sort -u "$state/more" | tr '\n' ' ')"; return 3; fi
    ! grep -q '^FAILED' "$state/summary.txt"
}

# test what small test models cannot show: tensors of many pages, pages that are mapped and unmapped, and several streams
first_checks() {
    local toys=$build/toys n=2600 toy
    [ -n "$gpu" ] || n=300
    [ -d "$toys" ] || step toys 240 bash -c "mkdir -p '$toys.new' && '$bin/test-llama-archs' -s 1 -o '$toys.new'; rc=\$?; mv '$toys.new' '$toys'; exit \$rc"
    if [ -f "$model" ]; then
        beside pages-inplace 200 "$model" --seqs 3 -n "$n" --checks prompt,generate,copy,uneven,shrink,clear,state-self,shift
    fi
    for toy in $classes; do
        [ -f "$toys/$toy.gguf" ] || { say "NOT RUN: $toy, because test-llama-archs did not make it"; continue; }
        beside "check-$toy-inplace" 200 "$toys/$toy.gguf" --quick
        beside "check-$toy-copy" 200 "$toys/$toy.gguf" --quick
    done
    wait
}

sanitizer() {
    local toy=$build/toys/llama-dense.gguf
    if command -v compute-sanitizer >/dev/null && [ -n "$gpu" ] && [ -f "$toy" ]; then
        # kv-check runs its two sides as child processes, and does not use the device itself
        NEED='ERROR SUMMARY' step sanitizer 200 compute-sanitizer --target-processes all --require-cuda-init no --error-exitcode 9 \
            "$bin/kv-check" -m "$toy" "${on[@]}" --storage inplace --quick --checks generate,shrink
    else
        say "NOT RUN: compute-sanitizer, because it is not installed or there is no GPU"
    fi
}

measurements() {
    local bench=("$bin/kv-bench" -m "$model" "${on[@]}") depths=809,6409,32768,131072 rounds=(-c 16384 --rounds 6 -d "1000,8000") way
    [ -f "$model" ] || { say "NOT RUN: bench, because $model does not exist (ci/gpu.sh pack makes it)"; return; }
    [ -n "$gpu" ] || { depths=809,3000 rounds=(-c 2048 --rounds 1 -n 4 -b 2 -d 500); }
    step bench-static 120 "${bench[@]}" -c 131072 -d "$depths"
    for way in inplace copy; do
        step "bench-$way" 120 env LLAMA_KV_DYNAMIC_STORAGE=$way "${bench[@]}" -c 131072 -d "$depths" --kv-dynamic on --limit
        step "speed-$way" 120 env LLAMA_KV_DYNAMIC_STORAGE=$way "${bench[@]}" "${rounds[@]}" --kv-dynamic on
    done
    # without flash attention V is transposed, and such a cache grows by copy on a device
    step speed-copy-no-fa 120 env LLAMA_KV_DYNAMIC_STORAGE=copy "${bench[@]}" "${rounds[@]}" --kv-dynamic on -fa off
}

# test other kinds of caches, and then all test models for which there is time
checks() {
    local toy name
    for toy in $classes; do
        [ -f "$build/toys/$toy.gguf" ] || continue
        beside "q8-$toy-inplace" 200 "$build/toys/$toy.gguf" --quick -ctk q8_0 -ctv q8_0
        beside "retype-$toy-inplace" 200 "$build/toys/$toy.gguf" --quick --retype f16:q8_0,q8_0:q4_0 --checks retype-bits,retype-grow,retype-shift
        beside "streams-$toy-inplace" 200 "$build/toys/$toy.gguf" --quick --seqs 4
        beside "fa-off-$toy-copy" 200 "$build/toys/$toy.gguf" --quick -fa off
        # ggml-cuda can multiply iq4_nl, but has no flash attention for it. llama.cpp notices that only after V was laid out in
        # rows. not for MLA, which has one type for K and V, nor for qwen4exp, whose indexer gathers rows: not possible for iq4_nl
        case $toy in llama-dense | qwen35-dense | gemma3-dense | minimax-m3-moe)
            beside "iq4-k-$toy-inplace" 200 "$build/toys/$toy.gguf" --quick -fa auto -ctk iq4_nl ;;
        esac
        [ -n "$gpu" ] || break
    done
    for toy in "$build"/toys/*.gguf; do
        name=$(basename "$toy" .gguf)
        beside "quick-$name-inplace" 200 "$toy" --quick --checks prompt,generate,shrink,state-self
        [ -n "$gpu" ] || break
    done
    wait
}

case ${1:-run} in
pack) pack "${2:?pack FILE}" ;;
run) run "${2:-}" ;;
*) run "$1" ;;
esac
