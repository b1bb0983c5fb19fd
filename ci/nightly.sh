#!/usr/bin/env bash
# Run a check that takes too long to run for every change. Usage: ci/nightly.sh WHAT. The report is written to report/.
#   full      kvtool verify with every model and all checks
#   matrix    kvtool verify --matrix: every kind of cache, in place, by copy and on an RPC server
#   traps     remove each line that prevents a known mistake, and check that a test fails; let each allocation of a growth fail
#   upstream  upstream's own tests; and compare the results with upstream's library bit for bit
#   asan, tsan  with a sanitizer: a model of each memory class, the tests of the server, the C++ unit tests, and random requests
#             (ci/soak.py). With asan, each allocation of a growth also fails once.
#   late      the end-to-end tests with delayed requests, as on a busy machine
#   soak      random requests for an hour, and then a check that all memory is freed
#   disk      damage 500 files of --cache-disk, kill 200 servers that use the directory (ci/disk_stress.py), and chat with two
#             trained models of a router in turns (ci/router_turns.py)
#   random    move a thousand random series to random upstreams (tests/repo/random_series.py)
#   page      chat through llama-server's web page
#   layers    build and verify trees with only some layers: the core alone, and the core with types
#   cross     compile here for macOS, Windows and Linux arm64
#   vulkan    growth by copy in device memory, with Vulkan's software driver
#   vulkan-full  the same with one model of each memory class and all checks
#   models    compare a static and a dynamic cache on two trained models, with all options
#   python    the same through llama-cpp-python
#   cuda      compile the changed files of ggml-cuda with NVIDIA's compiler, without a GPU
#   hip       compile them with clang and ROCm's headers
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:?what: full, matrix, traps, asan, tsan, late, soak, disk, random, upstream, page, layers, cross, vulkan, vulkan-full, models, python, cuda or hip}
sh ci/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
mkdir -p report
kvtool fetch
kvtool apply
classes=$(python -c 'from kvtool.verify.checks import CLASS_TOYS; print(",".join(CLASS_TOYS))')
soak() {
    local preset=$1
    shift
    python ci/soak.py "llama.cpp/build/cpu-$preset/bin" llama.cpp/models/ggml-vocab-llama-spm.gguf "$@"
}
case $what in
full) kvtool verify --json --junit report/verify.xml >report/verify.json ;;
matrix) kvtool verify --matrix --rpc --markdown report/matrix.md --json >report/matrix.json ;;
traps)
    kvtool build
    KVTOOL_ALL_CLASSES=1 pytest tests/e2e/test_can_fail.py tests/e2e/test_every_allocation_fails.py \
        --junitxml=report/traps.xml ;;
asan | tsan)
    kvtool build --no-ui --preset "$what"
    export TSAN_OPTIONS=suppressions=$PWD/ci/tsan.supp
    status=0
    kvtool verify --preset "$what" --models "$classes" --quick --json --junit "report/$what.xml" >"report/$what.json" || status=1
    tests=(tests/e2e/test_server_*.py tests/e2e/test_contexts.py)
    if [ "$what" = asan ]; then tests+=(tests/e2e/test_every_allocation_fails.py); fi
    KVTOOL_TEST_PRESET=$what pytest "${tests[@]}" --timeout=1800 --junitxml="report/$what-e2e.xml" || status=1
    export UBSAN_OPTIONS=halt_on_error=1
    ctest --test-dir "llama.cpp/build/cpu-$what" --label-regex '^kvtool$' --no-tests=error --output-on-failure || status=1
    for toy in llama-dense gemma3-dense qwen35-dense; do
        soak "$what" --minutes 15 --toy llama.cpp/build/verify/toys-*/"$toy.gguf" --log "report/soak-$toy.log" || status=1
    done
    exit "$status" ;;
late)
    kvtool build --no-ui
    pytest -p tests.e2e.late tests/e2e --numprocesses auto --maxprocesses 2 --dist loadfile --no-loadscope-reorder \
        --junitxml=report/late.xml ;;
soak)
    kvtool build --no-ui
    soak release --minutes 60 --resident 16 --log report/soak.log ;;
disk)
    kvtool build --no-ui
    bin=llama.cpp/build/cpu-release/bin
    python ci/disk_stress.py "$bin" llama.cpp/models/ggml-vocab-llama-spm.gguf | tee report/disk.json
    models=()
    for name in smollm2 gemma3; do
        models+=("$(kvtool fetch --model "$name" --json | python -c 'import json, sys; print(json.load(sys.stdin)["file"])')")
    done
    python ci/router_turns.py "$bin" "${models[@]}" | tee report/router.json ;;
random) python -m tests.repo.random_series 0 1000 ;;
upstream)
    # build upstream's tree and the patched tree, both with all tests of ctest
    plain=$PWD/llama.cpp/build/unpatched
    base=$(python -c 'import json; print(json.load(open("llama.cpp/.git/kvtool/state.json"))["base"])')
    mkdir -p "$plain"
    git -C llama.cpp archive "$base" | tar -x -C "$plain"
    cmake -S "$plain" -B "$plain/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=ON \
        -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
    cmake --build "$plain/build"
    kvtool build --no-ui --target all
    status=0
    mkdir -p "$plain/toys"
    "$plain/build/bin/test-llama-archs" -s 1 -o "$plain/toys" >/dev/null
    python ci/upstream_bits.py "$plain/build" llama.cpp/build/cpu-release "$plain"/toys/*.gguf |
        tee report/upstream-bits.md || status=1
    python ci/upstream_tests.py "$plain/build" llama.cpp/build/cpu-release | tee report/upstream.md || status=1
    exit "$status" ;;
page)
    kvtool build --ui
    python ci/page.py llama.cpp/build/cpu-release/bin llama.cpp/models/ggml-vocab-llama-spm.gguf ;;
layers)
    for layer in core types; do
        tree=$PWD/report/$layer
        kvtool apply --group "$layer" --tree "$tree"
        kvtool build --no-ui --tree "$tree"
        kvtool verify --quick --tree "$tree" --json >"report/$layer.json"
        ctest --test-dir "$tree/build/cpu-release" --label-regex '^kvtool$' --no-tests=error --output-on-failure
        rm -rf "$tree"
    done ;;
cross)
    kvtool build --no-ui
    bash ci/cross.sh ;;
vulkan | vulkan-full)
    kvtool build --vulkan --no-ui --target kv-check --target test-llama-archs --target test-kv-free
    GGML_VK_VISIBLE_DEVICES=0 llama.cpp/build/vulkan-release/bin/test-kv-free
    full=()
    if [ "$what" = vulkan-full ]; then full=(--full); fi
    python ci/vulkan.py llama.cpp/build/vulkan-release/bin "${full[@]}" ;;
python)
    kvtool build --no-ui
    model=$(kvtool fetch --model smollm2 --json | python -c 'import json, sys; print(json.load(sys.stdin)["file"])')
    python ci/python_binding.py llama.cpp/build/cpu-release/bin llama.cpp/include/llama.h "$model" | tee report/python.md ;;
models)
    kvtool build --no-ui
    kvtool verify --model smollm2 --model gemma3 --json --junit report/models.xml >report/models.json ;;
cuda) bash ci/cuda.sh ;;
hip) bash ci/hip.sh ;;
*) echo "error: there is no check $what" >&2; exit 2 ;;
esac
