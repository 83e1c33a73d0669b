#!/bin/sh
# Everything that needs a CUDA machine, in one go: sets a bare one up, checks the engine and the kernels, times both.
# Usage: run_all.sh OUT_DIR [CARRIED]
# CARRIED (default .gpucarry) holds what the machine lacks: whl/*.whl, and site/ with a built llama_cpp package and
# site/include with ggml's headers. Needs torch, triton, nanobind, cmake, a C++ compiler.
# LAYERS: blocks of the synthetic Qwen3-30B-A3B shape (48: all). WHAT: of "build tests speed kernels against". LLAMA_BENCH:
# a llama-bench built with CUDA, to measure beside ours. TEST_ARGS: for pytest (-n 6 where pytest-xdist is there).
# `against` (only where asked for) is the whole comparison over HTTP: LLAMA_SERVER: a llama-server built with CUDA;
# BUDGETS: MiB of VRAM for each side, 0 for all; AGAINST_LIMIT: seconds for each, after which what is there is reported.
set -u
out=$1
carried=${2:-.gpucarry}
what=${WHAT:-build tests speed kernels}
layers=${LAYERS:-48}
mkdir -p "$out"
site=${SITE:-/tmp/ftgguf-site}
export PYTHONPATH="$site:$PWD" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
[ -e ftgguf/kernels ] || ln -s ../kernels ftgguf/kernels
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
case $what in *build*)
    start=$(date +%s)
    mkdir -p "$site"
    ls "$carried"/whl/*.whl >/dev/null 2>&1 && python3 -m pip install -q --no-index --no-deps --no-compile \
        --no-cache-dir --upgrade --target "$site" "$carried"/whl/*.whl
    [ -d "$carried/site" ] && cp -a "$carried"/site/. "$site"/
    cmake -S . -B /tmp/ftgguf-build -G Ninja -DCMAKE_BUILD_TYPE=Release -DFTGGUF_DEV=ON \
        -DPython_EXECUTABLE="$(command -v python3)" >"$out/build.log" 2>&1 &&
        cmake --build /tmp/ftgguf-build >>"$out/build.log" 2>&1 || tail -5 "$out/build.log"
    cp /tmp/ftgguf-build/_*.so ftgguf/
    echo "built in $(($(date +%s) - start)) s"
    python3 -m ftgguf.engine.doctor 2>&1 | tee "$out/doctor.txt"
    ;;
esac
model=${MODEL:-/tmp/qwen3-30b-$layers.gguf}
case $what in *speed*)
    [ -e "$model" ] || python3 -m compat.synth --shape qwen3-30b --layers "$layers" "$model" &
    writer=$!
    ;;
esac
case $what in *tests*)
    OMP_NUM_THREADS=4 timeout "${TEST_LIMIT:-240}" python3 -m pytest -p no:cacheprovider --tb=short \
        --durations=5 ${TEST_ARGS:-} tests/gpu/test_engine_gpu.py tests/models/test_cuda_executor.py tests/models/test_cuda_segments.py \
        >"$out/engine-tests.log" 2>&1
    grep -h -E "^(FAILED|ERROR|E  )|passed|failed|error" "$out/engine-tests.log" | cut -c1-240 | head -60
    ;;
esac
case $what in *speed*)
    wait "$writer"
    timeout "${SPEED_LIMIT:-240}" python3 tests/gpu/speed.py "$model" --json "$out/speed.json" --profile ${SPEED_ARGS:-} 2>&1 |
        tee "$out/speed.txt"
    [ -n "${LLAMA_BENCH:-}" ] && "$LLAMA_BENCH" -m "$model" -ngl 99 -fa 1 -ub 2048 -p 512,8192 -n 128 | tee "$out/llama-bench.txt"
    ;;
esac
case $what in *against*)
    [ -e "$model" ] || python3 -m compat.synth --shape qwen3-30b --layers "$layers" "$model"
    for budget in ${BUDGETS:-0 4096}; do
        limit=
        [ "$budget" -gt 0 ] && limit="--vram-budget $budget"
        timeout -k 60 "${AGAINST_LIMIT:-420}" python3 -m ftgguf bench -m "$model" --against llama.cpp \
            --llama-server "${LLAMA_SERVER:-llama-server}" $limit -p 512,8192 -n 128 -d 8192 -r 3 --longest 30 \
            --timeout 120 --report "$out/against-$budget.json" --html "$out/against-$budget.html" ${AGAINST_ARGS:-} \
            2>"$out/against-$budget.log" | tee "$out/against-$budget.md"
    done
    ;;
esac
case $what in *kernels*) sh tests/gpu/run_kernels.sh "$out" ;; esac
exit 0
