"""`ftgguf bench bw` without a device: the CPU's side of each type, stored, and found again by what `serve` asks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the GPU path needs torch")
if torch.cuda.is_available():
    pytest.skip("with a device the other side is measured too (tests/gpu)", allow_module_level=True)

from compat.synth import make  # noqa: E402
from ftgguf.bench import bw  # noqa: E402
from ftgguf.engine import devices  # noqa: E402
from ftgguf.experts.measure import stored_costs  # noqa: E402


def test_the_cpu_side_is_measured_and_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(devices, "list_devices", list)
    types = {"*.1.ffn_down_exps.weight": "Q6_K", "*_exps.weight": "Q4_K", "*": "Q8_0"}
    path, page = make("qwen3moe", tmp_path / "m.gguf", types=types, n_layer=2), tmp_path / "bw.html"
    assert bw.main(["-m", str(path), "--seconds", "0.02", "-t", "1", "-o", "json", "--html", str(page)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["settings"]["link"] == "NOT MEASURED, the CPU's side alone: no NVIDIA GPU found here"
    assert "NOT MEASURED" in page.read_text()
    assert [row[0] for row in report["tables"][0]["rows"]] == ["Q4_K", "Q4_K+Q6_K"]
    assert "<svg" in page.read_text()
    assert "which `serve` does not use" in "".join(report["notes"])
    record = report["data"]
    assert set(record["types"]) == {"Q4_K", "Q4_K+Q6_K"}
    for m in record["types"].values():
        assert m["rates"]["fill"] == 0
        assert m["rates"]["cpu"] > 1e6
    costs = stored_costs(torch.device("cpu"), 1)
    assert costs.measured
    assert costs.bandwidths("Q4_K").cpu == record["types"]["Q4_K"]["rates"]["cpu"]
    other = stored_costs(torch.device("cpu"), 7)
    assert not other.measured
    assert "threads was 1, is 7" in other.source


def test_threads_beyond_the_cpus_are_cut_and_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make("qwen3moe", tmp_path / "m.gguf", n_layer=1)
    assert bw.main(["-m", str(path), "--seconds", "0.01", "-t", "4096", "--no-store", "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert f"-t 4096 was cut to {report['settings']['threads']}: there are no more CPUs here" in report["notes"]


def test_a_model_without_experts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make("qwen3", tmp_path / "dense.gguf", n_layer=1)
    assert bw.main(["-m", str(path)]) == 1
    assert "no routed experts" in capsys.readouterr().err


def test_without_torch_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a machine without a GPU has it installed."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(devices, "list_devices", list)
    assert bw.main(["-m", "stories"]) == 1
    said = "ftgguf bench bw: needs torch: pip install 'ftgguf[gpu]' (no NVIDIA GPU found here)\n"
    assert capsys.readouterr().err == said


def test_the_header_says_why_a_gpu_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver with a card, and the torch of this installation, which is built for the CPU."""
    card = devices.Device(0, "Card", (9, 0), 1 << 30)
    monkeypatch.setattr(devices, "list_devices", lambda: [card])
    assert bw.link_of(torch.device("cpu")).startswith("NOT MEASURED, the CPU's side alone: CUDA0 (Card) is here; ")
    assert (torch.version.cuda is None) == ("CPU build" in bw.link_of(torch.device("cpu")))
