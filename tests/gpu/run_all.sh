#!/bin/sh
# Everything that needs a CUDA machine, in one go: sets a bare one up, checks the engine and the kernels, times both.
# Usage: run_all.sh OUT_DIR [CARRIED]
# CARRIED (default .gpucarry) holds what the machine lacks: whl/*.whl, site/ with a built llama_cpp package and
# site/include with ggml's headers, peer.tar.xz with llama.cpp built for CUDA (pack/llama-server, its libraries beside it).
# Needs torch, triton, nanobind, cmake, a C++ compiler.
# LAYERS: blocks of the synthetic Qwen3-30B-A3B shape (48: all). WHAT: of "build tests serve speed offload kernels against".
# LLAMA_BENCH: a llama-bench built with CUDA (or the carried one), to measure beside ours. `offload` (only where asked for):
# both engines at MiB of VRAM each of OFFLOAD_BUDGETS. TEST_ARGS: for pytest (-n 6 where pytest-xdist is
# there). `serve` (only where asked for): servers as users start them; a first start, then the tests with SERVE_ARGS for
# at most SERVE_LIMIT seconds; serve-report.txt has what each test said, also of a run that is cut.
# `against` (only where asked for) is the whole comparison over HTTP, and an agent's sessions. LLAMA_SERVER: a llama-server
# built with CUDA, instead of the carried one. BUDGETS: MiB of VRAM for each side, 0 for all; TRACE: the budget of the
# sessions, empty for none; the peer's placement is that found for the same budget before. AGAINST_LIMIT, TRACE_LIMIT:
# seconds for each report: no round is begun that would end later, and 25 s after that it is cut, with what is there.
# AGAINST_ARGS, TRACE_ARGS: what is measured. Tables of all reports are in against.md, each report in a JSON and an HTML
# file, everything else in log.txt: eight files for two budgets.
# Last it prints what all of them found as one table (summary.py), which stays in summary.md.
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
log=$out/log.txt
case $what in *build*)
    start=$(date +%s)
    mkdir -p "$site"
    ls "$carried"/whl/*.whl >/dev/null 2>&1 && python3 -m pip install -q --no-index --no-deps --no-compile \
        --no-cache-dir --upgrade --target "$site" "$carried"/whl/*.whl
    [ -d "$carried/site" ] && cp -a "$carried"/site/. "$site"/
    cmake -S . -B /tmp/ftgguf-build -G Ninja -DCMAKE_BUILD_TYPE=Release -DFTGGUF_DEV=ON \
        -DPython_EXECUTABLE="$(command -v python3)" >>"$log" 2>&1 &&
        cmake --build /tmp/ftgguf-build >>"$log" 2>&1 || tail -5 "$log"
    cp /tmp/ftgguf-build/_*.so ftgguf/
    echo "built in $(($(date +%s) - start)) s"
    python3 -m ftgguf.engine.doctor 2>&1 | tee -a "$log"
    ;;
esac
# unpack_peer PROGRAM: the carried llama-server or llama-bench, with the CUDA libraries of torch's packages or of the
# toolkit on its search path
unpack_peer() {
    mkdir -p /tmp/ftgguf-peer && tar xJf "$carried/peer.tar.xz" -C /tmp/ftgguf-peer || return
    cuda=$(python3 -c "import glob, os, nvidia
print(':'.join(sorted({os.path.dirname(f) for r in nvidia.__path__ for f in glob.glob(r + '/**/libcu*.so*', recursive=True)})))" 2>/dev/null)
    cat >"/tmp/ftgguf-peer/$1" <<END
#!/bin/sh
export LD_LIBRARY_PATH="$cuda:/usr/local/cuda/lib64\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
exec /tmp/ftgguf-peer/pack/$1 "\$@"
END
    chmod +x "/tmp/ftgguf-peer/$1"
    echo "/tmp/ftgguf-peer/$1"
}

model=${MODEL:-/tmp/qwen3-30b-$layers.gguf}
bench=${LLAMA_BENCH:-}
case $what in *speed* | *offload*)
    [ -z "$bench" ] && [ -e "$carried/peer.tar.xz" ] && bench=$(unpack_peer llama-bench)
    [ -e "$model" ] || python3 -m compat.synth --shape qwen3-30b --layers "$layers" "$model" &
    writer=$!
    ;;
esac
case $what in *tests*)
    OMP_NUM_THREADS=4 timeout -s INT -k 15 "${TEST_LIMIT:-240}" python3 -m pytest -p no:cacheprovider --tb=short \
        --durations=5 ${TEST_ARGS:-} tests/gpu/test_engine_gpu.py tests/gpu/test_store_gpu.py \
        tests/gpu/test_residency_gpu.py tests/experts/test_short_prompts.py tests/models/test_cuda_executor.py tests/models/test_cuda_segments.py \
        >"$out/engine-tests.log" 2>&1 || echo "ended with status $?" >>"$out/engine-tests.log"
    grep -h -E "^(FAILED|ERROR|E  )|passed|failed|error" "$out/engine-tests.log" | cut -c1-240 | head -60
    ;;
esac
case $what in *serve*)
    began=$(date +%s)
    serving=$(mktemp -d) # models and logs; the logs of earlier runs are not ours
    # the id keeps its folder, whose logs are read below, as pytest-xdist's does
    TMPDIR=$serving PYTEST_XDIST_TESTRUNUID=first PYTHONPATH="$PYTHONPATH:$PWD/tests:$PWD/tests/gpu" \
        timeout -s INT -k 15 "${START_LIMIT:-150}" python3 tests/gpu/first_start.py 2>&1 | tee -a "$log" | tail -n 12
    workers=$(python3 -c "import xdist; print('-n 5 --dist loadgroup')" 2>/dev/null)
    report=$out/serve-report.txt
    TMPDIR=$serving FTGGUF_TEST_REPORT=$report timeout -s INT -k 15 "${SERVE_LIMIT:-420}" \
        python3 -m pytest -p no:cacheprovider --tb=short --durations=8 ${SERVE_ARGS:-$workers} tests/gpu/test_serve_*gpu.py \
        >"$out/serve-tests.log" 2>&1
    [ -e "$report" ] && python3 tests/gpu/gpu_report.py "$report" || tail -n 20 "$out/serve-tests.log"
    # servers that were not up when the run ended
    for server in "$serving"/ftgguf-serve-*/*.log; do
        [ -e "$server" ] && ! grep -q "Talk to it" "$server" && echo "== $server" && tail -n 12 "$server"
    done | tee -a "$log" | cut -c1-240 | tail -n 40
    rm -rf "$serving"
    echo "servers tested in $(($(date +%s) - began)) s"
    ;;
esac
case $what in *speed*)
    wait "$writer"
    timeout "${SPEED_LIMIT:-240}" python3 tests/gpu/speed.py "$model" --json "$out/speed.json" --profile ${SPEED_ARGS:-} 2>&1 |
        tee "$out/speed.txt"
    # rows for summary.py in the JSON, the same as a table for the eye
    [ -n "$bench" ] && { "$bench" -m "$model" -ngl 99 -fa 1 -ub 2048 -p 512,8192 -n 128 -o json -oe md \
        >"$out/llama-bench.json"; } 2>&1 | tee "$out/llama-bench.txt"
    ;;
esac

case $what in *offload*)
    wait "$writer"
    python3 tests/gpu/offload_budgets.py "$model" --budgets ${OFFLOAD_BUDGETS:-12288 4096 8192} \
        ${bench:+--llama-bench "$bench"} --json "$out/offload.json" ${OFFLOAD_ARGS:-} 2>&1 | tee "$out/offload.txt"
    ;;
esac

# compare NAME LIMIT BUDGET WORDS...: one report
compare() {
    name=$1 limit=$2 budget=$3
    shift 3
    [ "$budget" -gt 0 ] && set -- "$@" --vram-budget "$budget"
    [ "$name" = trace ] && [ -e "$out/against-$budget.json" ] &&
        swept=$(sed -n 's/.*best in all: \(-ngl[^;"]*\).*/\1/p' "$out/against-$budget.json" | head -1) &&
        [ -n "$swept" ] && set -- "$@" --peer-args "$swept"
    echo "== $name" | tee -a "$log" >>"$out/against.md"
    timeout -k 15 $((limit + 25)) python3 -m ftgguf bench "$@" -m "$model" --against llama.cpp --llama-server "$peer" \
        --limit "$limit" --timeout 100 --report "$out/$name.json" --html "$out/$name.html" 2>>"$log" >>"$out/against.md"
    echo "== $name: exit status $? after $(($(date +%s) - began)) s in all" | tee -a "$log"
}

case $what in *against*)
    began=$(date +%s)
    [ -e "$model" ] || python3 -m compat.synth --shape qwen3-30b --layers "$layers" "$model" >>"$log" 2>&1
    echo "model ready after $(($(date +%s) - began)) s"
    peer=${LLAMA_SERVER:-}
    [ -z "$peer" ] && [ -e "$carried/peer.tar.xz" ] && peer=$(unpack_peer llama-server)
    peer=${peer:-llama-server}
    "$peer" --list-devices 2>&1 | tee -a "$log" | tail -3
    for budget in ${BUDGETS-0 4096}; do
        compare "against-$budget" "${AGAINST_LIMIT:-185}" "$budget" \
            ${AGAINST_ARGS:--p 512,8192 -n 128 -d 8192 -r 5 -ub 2048 --longest 20}
    done
    [ -n "${TRACE-4096}" ] && compare trace "${TRACE_LIMIT:-80}" "${TRACE-4096}" \
        trace ${TRACE_ARGS:-ftgguf/data/traces/swe-agent.jsonl -n 64 -r 2 -c 8704 -ub 2048}
    cat "$out/against.md"
    ;;
esac
case $what in *kernels*)
    python3 -m ftgguf.bench.residency 2>&1 | tee "$out/residency.txt"
    sh tests/gpu/run_kernels.sh "$out"
    ;;
esac
python3 tests/gpu/summary.py "$out" 2>&1 | tee "$out/summary.md"
exit 0
