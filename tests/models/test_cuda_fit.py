"""What goes on the GPU, planned from the header alone: sizes against the file, choices against hand-made budgets."""

from __future__ import annotations

import ctypes
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ftgguf.engine import devices, doctor, plan
from ftgguf.engine.cpu_rate import product_rate
from ftgguf.engine.devices import Device, DeviceError, Driver
from ftgguf.engine.fit import MIB, Fit, budget_of, fit, kv_bytes, parts_of
from ftgguf.engine.survey import Survey, survey
from ftgguf.flags import parse_server
from ftgguf.flags.config import GPU_LAYERS_ALL, PlacementConfig, ServerConfig
from ftgguf.gguf.reader import open_gguf
from ftgguf.models.config import Numbers, read_numbers

CONTEXT = 10 * MIB
"""A small CUDA context, so that the tiny models' own bytes decide."""


@pytest.fixture
def model(synthetic: Callable[..., Path]) -> tuple[Survey, Numbers, Path]:
    path = synthetic("qwen3moe", "Q4_K", n_layer=4)
    gguf = open_gguf(path)
    numbers = read_numbers(gguf)
    return survey(gguf, numbers, ServerConfig().context), numbers, path


def config(*flags: str, path: str = "x.gguf") -> ServerConfig:
    return parse_server(["-m", path, "-c", "512", *flags], {})


def choose(model: tuple[Survey, Numbers, Path], budget: int, *flags: str) -> Fit:
    return fit(model[0], model[1], config(*flags), budget, CONTEXT)


def test_the_survey_lists_every_tensor_once(model: tuple[Survey, Numbers, Path]) -> None:
    found, numbers, path = model
    gguf = open_gguf(path)
    assert set(found.tensors) == set(gguf.tensors)
    total = found.outside(embedding=True, head=True)
    total += sum(found.of_layer(i, experts=e) for i in range(numbers.n_layer) for e in (False, True))
    padding = 256 * len(gguf.tensors)
    assert gguf.size <= total <= gguf.size + padding


def test_kv_bytes_of_a_known_model() -> None:
    """Qwen3-30B-A3B: 48 layers x 4 heads x 128 x (K and V) x 2 bytes = 98304 bytes a token (its config.json)."""
    from ftgguf.layers.params import Attention, Linear

    attention = Attention(None, Linear(None), 32, 4, 128, 128, 1.0, 1e-6)
    assert kv_bytes([attention] * 48, 1, "f16", "f16") == 98304
    assert kv_bytes([attention] * 48, 32, "q4_0", "q8_0") == 98304 * 32 * 17 // 32
    assert kv_bytes([attention], 1, "f16", "q8_0") == 2048


def test_all_layers_where_they_fit_and_the_last_ones_where_not(model: tuple[Survey, Numbers, Path]) -> None:
    whole = parts_of(model[0], 0, 512, config(), CONTEXT).total
    assert choose(model, whole).first == 0
    less = choose(model, whole - 1)
    assert less.first == 1
    assert "3 of 4 layers" in less.lines[-1]
    assert choose(model, CONTEXT).on_gpu == 0
    for first in range(4):
        exact = parts_of(model[0], first, 512, config(), CONTEXT).total
        assert choose(model, exact).first == first


def test_ngl_counts_as_llama_cpp_does(model: tuple[Survey, Numbers, Path]) -> None:
    """llama.cpp's output layer is one of the N: 5 of 4 + 1 is everything, 1 is the output alone (no block)."""
    plenty = 1 << 40
    assert [choose(model, plenty, "-ngl", str(n)).first for n in (99, 5, 4, 3, 2, 1)] == [0, 0, 1, 2, 3, 4]
    with pytest.raises(MemoryError, match=r"-ngl .*--vram-budget"):
        choose(model, CONTEXT, "-ngl", "3")
    with pytest.raises(MemoryError, match="4 layers do not fit"):
        choose(model, CONTEXT, "-ngl", "all")


def test_tensors_kept_off_the_gpu_keep_their_blocks_off(model: tuple[Survey, Numbers, Path]) -> None:
    plenty = 1 << 40
    assert choose(model, plenty, "-ncmoe", "2").first == 2
    assert choose(model, plenty, "-cmoe").on_gpu == 0
    assert choose(model, plenty, "-ot", r"blk\.1\.attn_q=CPU").first == 2
    assert "blk.1" in choose(model, plenty, "-ot", r"blk\.1\.attn_q=CPU").lines[0]


def test_an_open_context_shrinks_before_layers_leave(model: tuple[Survey, Numbers, Path]) -> None:
    open_context = parse_server(["-m", "x.gguf", "-fitc", "512"], {})
    small = parts_of(model[0], 0, 1024, open_context, CONTEXT).total
    found = fit(model[0], model[1], open_context, small, CONTEXT)
    assert (found.first, found.n_cells) == (0, 1024)
    assert "1024 tokens instead of 4096" in found.lines[0]


def test_budgets(model: tuple[Survey, Numbers, Path]) -> None:
    free = 8000 * MIB
    assert budget_of(config("--vram-budget", "3000"), free) == (3000 * MIB, "--vram-budget")
    assert budget_of(config("--vram-budget", "9000"), free)[0] == free
    assert budget_of(config("--fit-target", "500"), free)[0] == 7500 * MIB
    assert budget_of(config("--fit", "off"), free)[0] == free


GPU = Device(0, "Test GPU", (8, 6), 24 << 30, 20 << 30, bandwidth=1e12)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "list_devices", lambda: [GPU])
    monkeypatch.setattr(devices, "driver", lambda: Driver((13, 0), "580.1"))
    monkeypatch.setattr(devices, "torch_cuda", lambda: (13, 0))
    monkeypatch.setattr(devices, "compiler_problem", lambda: None)


@pytest.mark.usefixtures("one_gpu")
def test_which_device_is_chosen() -> None:
    assert devices.choose(PlacementConfig())[0] == GPU
    assert devices.choose(PlacementConfig(devices=("CUDA0",)))[0] == GPU
    assert devices.choose(PlacementConfig(devices=())) == (None, "-dev none")
    assert devices.choose(PlacementConfig(gpu_layers=0)) == (None, "-ngl 0")
    with pytest.raises(DeviceError, match="there are: CUDA0"):
        devices.choose(PlacementConfig(devices=("CUDA1",)))
    with pytest.raises(DeviceError, match="-mg 3"):
        devices.choose(PlacementConfig(main_gpu=3))
    assert devices.listing().splitlines()[1] == "  CUDA0: Test GPU (24576 MiB, 20480 MiB free)"


@pytest.mark.usefixtures("one_gpu")
def test_what_is_in_the_way_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.problem(GPU, Driver((13, 0), "580.1")) is None
    assert "update the driver" in str(devices.problem(GPU, Driver((12, 4), "550.1")))
    assert "compute capability 7.5" in str(devices.problem(replace(GPU, capability=(7, 5)), None))
    monkeypatch.setattr(devices, "torch_cuda", lambda: None)
    assert "CPU build" in str(devices.problem(GPU, None))
    # nothing was asked for: the CPU, and the line says why; with -ngl all it is an error
    device, why = devices.choose(PlacementConfig())
    assert device is None
    assert "CPU build" in why
    with pytest.raises(DeviceError, match="CPU build"):
        devices.choose(PlacementConfig(gpu_layers=GPU_LAYERS_ALL))


def test_a_missing_compiler_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert "install gcc" in str(devices.compiler_problem())


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    devices._cuda.cache_clear()
    try:
        assert devices.list_devices() == []
        assert devices.driver() is None
        assert devices.free_memory(0) is None
        assert devices.choose(PlacementConfig()) == (None, "no NVIDIA GPU found")
        with pytest.raises(DeviceError, match="-dev none"):
            devices.choose(PlacementConfig(devices=("CUDA0",)))
    finally:
        devices._cuda.cache_clear()


def test_no_kv_offload_keeps_every_layer_with_its_kv_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ftgguf.experts.placement plans it; llama.cpp keeps the KV in host memory too, and runs attention there."""
    monkeypatch.setattr(devices, "list_devices", lambda: [GPU])
    device, why = devices.choose(PlacementConfig(kv_offload=False, gpu_layers=GPU_LAYERS_ALL))
    assert device is None
    assert "--no-kv-offload" in why


def test_the_plan_names_places_and_a_speed(
    model: tuple[Survey, Numbers, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(model[2])
    text = "\n".join(plan.lines(config(path=path), GPU, look=False))
    assert "layers 0 to 3 of 4 on the GPU" in text
    assert "predicted decode" in text
    assert "CPU: layers 0 to 1" in "\n".join(plan.lines(config("-ngl", "3", path=path), GPU, look=False))
    monkeypatch.setattr(devices, "list_devices", list)
    assert plan.main([path, "-c", "512"]) == 0
    out = capsys.readouterr().out
    assert "no NVIDIA GPU found" in out
    assert "KV of 512 tokens" in out
    assert plan.main(["/nowhere.gguf"]) == 1
    assert "/nowhere.gguf" in capsys.readouterr().err


def test_a_model_larger_than_its_budget_is_planned_with_a_cache(model: tuple[Survey, Numbers, Path]) -> None:
    """The same decision as loading: what `plan_cache` leaves to slots, not layers on the CPU."""
    found, _numbers, path = model
    asked = config("--moe-mode", "hybrid", "--expert-cache", "0", path=str(path))
    device = replace(GPU, link=(4, 16), link_max=(4, 16), bandwidth=1e12)
    text = "\n".join(plan.lines(asked, device, look=False))
    assert "misses of the expert cache: fetched, or run on the CPU" in text
    assert "0% of an equally likely choice" in text
    pool = sum(t.info.nbytes for t in found.tensors.values() if t.use.value == "experts")
    assert f"host memory: {pool / MIB:.0f} MiB of experts" in text
    assert "at least" in text


def test_misses_cost_what_both_paths_take_together(model: tuple[Survey, Numbers, Path]) -> None:
    """A hand calculation: routed bytes, less the cached share, over the sum of both rates."""
    found, numbers, _ = model
    pool = sum(t.info.nbytes for t in found.tensors.values() if t.use.value == "experts")
    routed = pool * numbers.top_k / numbers.n_expert
    fixed = 4 * plan.MISS_SECONDS
    speed, hits = plan.predict_cached(found, pool // 4, "hybrid", 1e12, 4e10, 2e10)
    assert hits == pytest.approx(0.25, rel=1e-6)
    assert speed.misses - fixed == pytest.approx(0.75 * routed / (0.75 * 4e10 + 2e10), rel=1e-4)
    alone = plan.predict_cached(found, pool // 4, "cpu", 1e12, 4e10, 2e10)[0]
    assert alone.misses - fixed == pytest.approx(0.75 * routed / 2e10, rel=1e-4)
    whole = plan.predict_cached(found, pool, "hybrid", 1e12, 4e10, 2e10)[0]
    assert whole.misses == 0
    assert whole.gpu == pytest.approx(plan.predict(found, 0, 1e12, 1e10).gpu, rel=1e-6)


def test_a_plan_takes_names_and_fetches_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["stories", "-ngl", "0"]) == 0
    assert "predicted decode" in capsys.readouterr().out
    assert plan.main(["nobody/nothing:here"]) == 1
    assert "ftgguf pull nobody/nothing:here" in capsys.readouterr().err


def test_a_context_beyond_training_is_remarked(model: tuple[Survey, Numbers, Path]) -> None:
    trained = model[1].n_ctx_train
    for size, said in ((trained, False), (8 * trained, True)):
        asked = parse_server(["-m", str(model[2]), "-c", str(size), "-t", "1"], {})
        text = "\n".join(plan.lines(asked, None, look=False))
        assert (f"trained on {trained} tokens" in text) == said


def test_the_rate_of_products_is_of_the_models_types(model: tuple[Survey, Numbers, Path]) -> None:
    """Every main type is measured; a rate is a number that a machine can have (1 MB/s to 10 TB/s)."""
    assert 1e6 < product_rate(model[0], 1, seconds=0.01) < 1e13


def test_active_bytes_count_routed_experts_only(model: tuple[Survey, Numbers, Path]) -> None:
    found, numbers, _ = model
    layer = range(1)
    dense = sum(t.info.nbytes for t in found.tensors.values() if t.layer == 0 and t.use.value != "experts")
    experts = sum(t.info.nbytes for t in found.tensors.values() if t.layer == 0 and t.use.value == "experts")
    assert plan.active_bytes(found, layer, head=False) == dense + experts * numbers.top_k // numbers.n_expert
    assert plan.predict(found, 0, 1e12, 1e10).cpu == 0
    assert plan.predict(found, 4, 1e12, 1e10).gpu == 0


def test_doctor_reports_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status = doctor.main([])
    out = capsys.readouterr().out
    for name in ("CPU", "memory", "locked memory", "ggml", "GPU" if not devices.list_devices() else "CUDA0"):
        assert any(line.startswith(name) for line in out.splitlines()), name
    assert status in (0, 1)
    assert (status == 1) == ("! " in out)


def test_doctor_names_a_limit_on_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU what it may do to pinning, without one what it does to --mlock; neither is a fault by itself."""
    monkeypatch.setattr(doctor, "_may_lock", lambda: False)
    (line,) = doctor.lock_hints(8 << 20, gpu=True)
    assert "limited to 8192 KiB" in line
    assert "pinning of the expert pool may be capped" in line
    assert "ulimit -l unlimited" in line
    (line,) = doctor.lock_hints(10 << 30, gpu=False) or [""]
    assert line == "" or "limited to 10.00 GiB: --mlock" in line  # a machine with less memory than that has no limit
    assert doctor.lock_hints(resource.RLIM_INFINITY, gpu=True) == []
    monkeypatch.setattr(doctor, "_may_lock", lambda: True)
    assert doctor.lock_hints(8 << 20, gpu=True) == []


def test_doctor_says_when_there_are_no_huge_pages() -> None:
    (line,) = doctor.huge_page_hints("never")
    assert "Cure: echo madvise" in line
    assert doctor.huge_page_hints("madvise") == doctor.huge_page_hints("always") == []


def test_doctor_prints_hints_without_a_bad_status() -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))\n"
    code += "from ftgguf.engine import doctor; doctor._may_lock = lambda: False; raise SystemExit(doctor.main([]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "- locked memory is limited to 1024 KiB" in done.stdout
    assert done.returncode == int("! " in done.stdout)


def test_planning_imports_no_torch() -> None:
    code = "import sys, ftgguf.engine.plan, ftgguf.engine.doctor; print({'torch', 'triton'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_budget_without_a_gpu_is_said_to_have_no_effect(model: tuple[Survey, Numbers, Path]) -> None:
    for flags in ([], ["--vram-budget", "512"]):
        text = "\n".join(plan.lines(parse_server(["-m", str(model[2]), "-t", "1", *flags], {}), None, look=False))
        assert ("--vram-budget has no effect" in text) == bool(flags)
    text = "\n".join(plan.lines(config("--vram-budget", "512", path=str(model[2])), GPU, look=False))
    assert "no effect" not in text


def test_a_plan_that_cannot_be_served_ends_with_1(
    model: tuple[Survey, Numbers, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([str(model[2]), "-ngl", "0", "-c", "999999999"]) == 1
    assert plan.NOT_SERVABLE in capsys.readouterr().out


def test_more_kv_than_memory_gets_no_speed(model: tuple[Survey, Numbers, Path]) -> None:
    """`serve -c` of that size is refused (tests/server/test_start_failures.py)."""
    text = "\n".join(plan.lines(parse_server(["-m", str(model[2]), "-c", "999999999"], {}), None, look=False))
    assert "it cannot be served so" in text
    assert "predicted" not in text
