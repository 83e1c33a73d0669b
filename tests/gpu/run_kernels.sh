#!/bin/sh
# On a CUDA machine, from the checkout: check every kernel, then time them. Usage: run_kernels.sh OUT_DIR [bench options]
# Needs ftgguf.kernels importable (installed, or a link ftgguf/kernels -> ../kernels), torch, triton, gguf, pytest.
out=$1
shift
mkdir -p "$out"
shards=${SHARDS:-12}
i=0
while [ $i -lt "$shards" ]; do
    {
        OMP_NUM_THREADS=1 FTGGUF_SHARD=$i/$shards timeout "${TEST_LIMIT:-240}" python3 -m pytest -p no:cacheprovider --confcutdir=tests/gpu \
            tests/gpu/test_kernels.py tests/kernels --ignore=tests/kernels/test_residency.py --tb=short ${TEST_ARGS:-} ||
            echo "shard $i of $shards ended with status $?"
    } >"$out/tests.$i.log" 2>&1 &
    i=$((i + 1))
done
wait
cat "$out"/tests.*.log >"$out/tests.log"
rm "$out"/tests.*.log
grep -h -E "^(FAILED|ERROR)|passed|failed|error|ended with status" "$out/tests.log" | cut -c1-220 | sort | uniq -c | sort -rn | head -60
timeout "${BENCH_LIMIT:-240}" python3 -m ftgguf.bench.kernels --workers 16 --json "$out/kernels.json" "$@"
