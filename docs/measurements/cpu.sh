#!/bin/sh
# The full comparison with llama.cpp on a machine without a GPU: four reports, each as a table, JSON and a page.
# Usage: sh docs/measurements/cpu.sh [OUT_DIR]       (default: docs/measurements/reports)
# From a checkout where `make install` was run (a plain `pip install .` is hidden by the source folder here). Takes about
# 17 minutes on two quiet cores; needs 18 GB of memory, 5 GB of disk for the synthetic model, `pip install
# xllamacpp` for the two over HTTP. Run it with nothing else on the machine: the reports say how busy it was.
#
# PYTHON: the interpreter (python3). DEMO, BIG: models instead of the demo and the synthetic one. THREADS: instead of one
# a core. QUICK=1: a trial of the script itself.
set -u
out=${1:-docs/measurements/reports}
python=${PYTHON:-python3}
demo=${DEMO:-demo}
big=${BIG:-/tmp/ftgguf-qwen3-30b-12.gguf}
threads=${THREADS:+-t $THREADS}
rounds=5 few=3 prompt=512 long=,2048 gen=128 depth=1024 short=64
[ -n "${QUICK:-}" ] && rounds=2 few=1 prompt=32 long=,64 gen=8 depth=256 short=8
mkdir -p "$out"
worst=0
"$python" -c "import ftgguf._ggml_cpu" 2>/dev/null || {
    echo "cpu.sh: ftgguf's C++ modules are not in this checkout: run \`make install\` and set PYTHON=.venv/bin/python" >&2
    exit 1
}

# report NAME WORDS...: one comparison; its exit status is told and kept
report() {
    name=$1
    shift
    echo "== $name: ftgguf bench $*" >&2
    "$python" -m ftgguf bench "$@" --report "$out/$name.json" --html "$out/$name.html" >"$out/$name.md"
    status=$?
    echo "== $name: exit status $status" >&2
    # 3 is expected over HTTP: the wheel's instruction sets are fewer, so that no ratio is given
    [ "$status" -gt "$worst" ] && worst=$status
}

[ -e "$big" ] || "$python" -m compat.synth --shape qwen3-30b --layers 12 "$big" || exit 1
# libllama in process, step against step: the speeds that count
report cpu-demo -m "$demo" --against llama.cpp --in-process -p $prompt$long -n $gen -r $rounds $threads
report cpu-qwen3-12 -m "$big" --against llama.cpp --in-process -p $prompt -n $short -r $rounds $threads
# llama-server over HTTP, out of the xllamacpp wheel: latencies, streams, caches; no ratio where it is built for less
report cpu-http -m "$demo" --against llama.cpp --peer xllamacpp -p $prompt -n $short -d $depth -r $few $threads
report cpu-trace trace -m "$demo" --against llama.cpp --peer xllamacpp -c 2048 -n $((short / 2)) -r 1 $threads
exit "$worst"
