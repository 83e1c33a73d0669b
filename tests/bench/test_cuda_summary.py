"""The table at the end of a run on a CUDA machine, of short cuts of what such runs printed (an H200, llama.cpp b11434).
Numbers are checked by hand."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

GPU = Path(__file__).parents[1] / "gpu"

ENGINE = """\
........................................................................ [ 74%]
.........................                                                [100%]
============================= slowest 5 durations ==============================
38.03s call     tests/gpu/test_engine_gpu.py::test_captured_decode_equals_eager[qwen3moe]
"""
KERNELS = """\
...................................                                      [100%]
=============================== warnings summary ===============================
tests/kernels/test_activations.py::test_reference_is_ggml[Q8_1]
  tests/kernels/kernel_cases.py:137: RuntimeWarning: overflow encountered in cast

35 passed, 1 warning in 165.00s (0:02:44)
.................................F                                       [100%]
FAILED tests/kernels/test_gemv.py::test_gemv[Q4_K] - AssertionError: 0.1
1 failed, 33 passed in 161.53s (0:02:41)
shard 1 of 12 ended with status 1
"""
SERVERS = """\
began gw2 tests/gpu/test_serve_memory_gpu.py::test_a_full_device_fails_a_request_and_not_the_server@faulty
began gw3 tests/gpu/test_serve_memory_gpu.py::test_the_budget_is_never_exceeded[resident]@alone
passed 8.5 tests/gpu/test_serve_memory_gpu.py::test_a_full_device_fails_a_request_and_not_the_server@faulty
began gw2 tests/gpu/test_serve_memory_gpu.py::test_a_kernel_fault_restarts_the_engine@faulty
failed 56.5 tests/gpu/test_serve_memory_gpu.py::test_the_budget_is_never_exceeded[resident]@alone
    E   AssertionError: the measurement is wrong
"""
LOG = """\
first start: 50.5 s (kernels compiled by 8 processes in 24 s)
second start: 9.0 s (kernels found in the cache)
"""
SPEED = {
    "details": {"device_name": "NVIDIA H200", "n_layer": 48},
    "results": {"tg x1": [440.1, 442.5, 441.3], "tg x4": [1324.0], "pp512": [9800.0, 9900.0], "pp8192": [22000.0]},
}
SPEED_TEXT = """\
tg x1         441.3 tok/s   440.1 to 442.5
pp64         6145.6 tok/s   6117.5 to 6173.7
pp512        9850.0 tok/s   9800.0 to 9900.0
"""
BENCH: list[dict[str, Any]] = [
    {"build_number": 11434, "n_prompt": 512, "n_gen": 0, "n_depth": 0, "avg_ts": 6567.0, "stddev_ts": 8.26},
    {"build_number": 11434, "n_prompt": 0, "n_gen": 128, "n_depth": 0, "avg_ts": 296.4, "stddev_ts": 0.5},
    {"build_number": 11434, "n_prompt": 0, "n_gen": 128, "n_depth": 8192, "avg_ts": 200.0, "stddev_ts": 0.5},
]
BENCH_TEXT = """\
  Device 0: NVIDIA H200, compute capability 9.0, VMM: yes
| model                 |       size | backend | ngl | n_ubatch | fa |            test |                  t/s |
| --------------------- | ---------: | ------- | --: | -------: | -: | --------------: | -------------------: |
| qwen3moe Q4_K - Medium |  17.28 GiB | CUDA    |  99 |     2048 |  1 |           pp512 |       6567.00 ± 8.26 |
| qwen3moe Q4_K - Medium |  17.28 GiB | CUDA    |  99 |     2048 |  1 |           tg128 |        296.40 ± 0.50 |
"""
OFFLOAD = {
    "12288": {"ours": {"tg": [139.1, 138.2, 136.8], "vram": 12165}, "llama": {"tg": 84.2, "tg_vram": 11983}},
    "8192": {
        "ours": {"tg": [111.8, 110.1, 109.4], "vram": 8021, "pp8192": [13085, 16537, 16415, 16436],
                 "vram_prompt": 7601},
        "llama": {"pp8192": 6026.9, "pp8192_vram": 7889},
    },
}  # fmt: skip
KERNEL_TIMES = {
    "device": "NVIDIA H200",
    "copy GB/s": 4000,
    "bf16 TFLOP/s": 785,
    "gemv": {"TQ1_0": {"big us": 238.3, "big GB/s": 119}, "Q8_0": {"big us": 46.3, "big GB/s": 3080}},
    "experts": {"Q8_0": {"gate+up us": 10.68, "gate+up GB/s": 2504, "down us": 8.2, "down GB/s": 1630}},
    "tiles": {"Q8_0": {f"M={m} TFLOP/s": rate for m, rate in ((16, 40.5), (64, 120.0), (512, 400.0), (2048, 500.5))}},
}
HTTP = {
    "contestants": [{"name": "ftgguf", "ours": True}, {"name": "a", "ours": False}, {"name": "b", "ours": False}],
    "rows": [
        {"workload": "pp512", "metric": "tok/s", "samples": {"ftgguf": [9500, 9600], "a": [8000], "b": [5000]}},
        {"workload": "pp512", "metric": "TTFT ms", "samples": {"ftgguf": [50], "a": [60], "b": [70]}},
    ],
    "ratios": [
        {"workload": "pp512", "metric": "tok/s", "peer": "b", "ratio": 1.91, "low": 1.9, "high": 1.92},
        {"workload": "pp512", "metric": "tok/s", "peer": "a", "ratio": 1.194, "low": 1.1, "high": 1.3},
        {"workload": "pp512", "metric": "TTFT ms", "peer": "a", "ratio": 0.5, "low": 0.5, "high": 0.5},
    ],
}


def summary(folder: Path, **files: Any) -> list[str]:
    """The lines of the table for files by name (dots as `__`), texts or what becomes JSON; as run_all.sh calls it."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        written = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(written)
    done = subprocess.run(
        [sys.executable, str(GPU / "summary.py"), str(folder)], capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_everything_that_a_run_leaves_is_in_the_table(tmp_path: Path) -> None:
    found = summary(
        tmp_path, **{"engine-tests__log": ENGINE, "tests__log": KERNELS, "serve-report__txt": SERVERS, "log__txt": LOG},
        **{"llama-bench__json": BENCH, "against-4096__json": HTTP},
        speed__json=SPEED, offload__json=OFFLOAD, kernels__json=KERNEL_TIMES,
    )  # fmt: skip
    assert found == [
        "NVIDIA H200, 48 layers, llama.cpp b11434. Speeds in tokens a second.",
        "",
        "|  | ours | llama.cpp | ours / llama.cpp |",
        "| --- | --: | --: | --: |",
        "| engine tests | 97 passed, 0 failed |  |  |",
        "| servers | 1 passed, 1 failed, **1 cut** |  |  |",
        "| kernels, every type and M | 68 passed, 1 failed |  |  |",
        "| first start of a server, empty kernel cache | 50.5 s |  |  |",
        "| second start of a server, full kernel cache | 9.0 s |  |  |",
        "| decode, 1 sequence | 441.3 (440.1 to 442.5) | 296.4 ± 0.5 | 1.49 |",
        "| decode, 4 sequences | 1324.0 (1324.0 to 1324.0) |  | 3.00 x our one |",
        "| prompt of 512 | 9850.0 (9800.0 to 9900.0) | 6567.0 ± 8.3 | 1.50 |",
        "| prompt of 8192 | 22000.0 (22000.0 to 22000.0) | missing |  |",
        "| decode at 4096 MiB | missing | missing |  |",
        "| decode at 8192 MiB | 110.1 (8021 MiB) | missing |  |",
        "| decode at 12288 MiB | 138.2 (12165 MiB) | 84.2 (11983 MiB) | 1.64 |",
        "| prompt of 8192 at 8192 MiB | 16436.0 (7601 MiB) | 6026.9 (7889 MiB) | 2.73 |",
        "| over HTTP, at 4096 MiB: pp512 | 9550.0 | 8000.0 | 1.19 (1.10 to 1.30) |",
        "",
        "Device copy 4000 GB/s, bfloat16 product 785 TFLOP/s.",
        "",
        "| type | GEMV us | GB/s | of copy | experts: gate+up us | GB/s | down us | GB/s "
        "| tiles, M = 16 / 64 / 512 / 2048: TFLOP/s |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
        "| Q8_0 | 46.3 | 3080 | 77 % | 10.68 | 2504 | 8.2 | 1630 | 40.5 / 120.0 / 400.0 / 500.5 |",
        "| TQ1_0 | 238.3 | 119 | 3 % |  |  |  |  |  |",
    ]


def test_texts_serve_where_the_json_was_not_written(tmp_path: Path) -> None:
    """And what run_kernels.sh wrote into a folder of its own is found."""
    (tmp_path / "k").mkdir()
    (tmp_path / "k" / "tests.log").write_text(KERNELS + "......shard 2 of 12 ended with status 124\n")
    found = summary(tmp_path, **{"llama-bench__json": "", "llama-bench__txt": BENCH_TEXT, "speed__txt": SPEED_TEXT})
    assert "| decode, 1 sequence | 441.3 (440.1 to 442.5) | 296.40 ± 0.50 | 1.49 |" in found
    assert "| prompt of 512 | 9850.0 (9800.0 to 9900.0) | 6567.00 ± 8.26 | 1.50 |" in found
    assert "| prompt of 8192 | missing | missing |  |" in found
    assert "| kernels, every type and M | 68 passed, 1 failed; **cut or broken** (exit status 124) |  |  |" in found
    assert found[-1] == "The kernels by type: missing."


def test_what_is_not_there_or_was_cut_is_named(tmp_path: Path) -> None:
    """Only the words of the table and `missing`: no number comes from nowhere."""
    empty = summary(tmp_path / "empty")
    rows = [line.split("|")[2:] for line in empty if line.startswith("| ") and "ours" not in line and "---" not in line]
    assert len(rows) == 10
    assert {cell.strip() for row in rows for cell in row} == {"missing", ""}
    cut = summary(
        tmp_path / "cut", **{"engine-tests__log": "ended with status 124\n", "against-0__json": '{"rows": ['},
        speed__json='{"details": {', offload__json='{"4096"', kernels__json="{",
    )  # fmt: skip
    assert "| engine tests | **cut or broken** (exit status 124) |  |  |" in cut
    assert "| over HTTP, all resident | missing | missing |  |" in cut
    kept = [line for line in cut if "engine tests" not in line and "HTTP" not in line]
    assert kept == [line for line in empty if "engine tests" not in line]
    done = subprocess.run(
        [sys.executable, str(GPU / "summary.py"), str(tmp_path / "no")], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "usage: summary.py OUT" in done.stderr


@pytest.fixture
def budgets() -> ModuleType:
    """tests/gpu/offload_budgets.py as a module."""
    spec = importlib.util.spec_from_file_location("offload_budgets", GPU / "offload_budgets.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_that_is_cut_keeps_its_budgets(
    budgets: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two budgets of a model of 5 blocks, of which each takes 300 MiB on a device where llama.cpp takes 1000 besides
    (by hand: 3 fit into 2000): the run ends while llama.cpp is at the second."""
    kept, calls = tmp_path / "offload.json", []

    def llama(options: Any, arguments: list[str]) -> list[dict[str, Any]]:
        layers = 5 - int(arguments[arguments.index("-ncmoe") + 1])
        calls.append(layers)
        if len(json.loads(kept.read_text())) == 2:
            raise KeyboardInterrupt
        return [{"avg_ts": 50.0 + 10 * layers, "vram": 1000 + 300 * layers}]

    monkeypatch.setattr(budgets, "llama", llama)
    monkeypatch.setattr(budgets, "ours", lambda *_: {"tg": [90.0, 100.0], "vram": 1990})
    model = Path(__file__).parents[1] / "data" / "stories260K.gguf"
    words = [str(model), "--budgets", "2000", "4096", "--llama-bench", "llama-bench", "--json", str(kept)]
    monkeypatch.setattr(sys, "argv", ["offload_budgets.py", *words])
    with pytest.raises(KeyboardInterrupt):
        budgets.main()
    mine = {"tg": [90.0, 100.0], "vram": 1990}
    assert json.loads(kept.read_text()) == {
        "2000": {"ours": mine, "llama": {"tg": 80.0, "tg_vram": 1900}},
        "4096": {"ours": mine, "llama": {}},
    }
    found = summary(tmp_path)
    assert "| decode at 2000 MiB | 95.0 (1990 MiB) | 80.0 (1900 MiB) | 1.19 |" in found
    assert "| decode at 4096 MiB | 95.0 (1990 MiB) | missing |  |" in found
