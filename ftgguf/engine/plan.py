"""`ftgguf plan MODEL [flags]`: where each part of a model would go, and about how fast it would decode, before loading.

Takes the server's flags. Reads the file's header and this machine's figures; allocates nothing on a GPU.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from ftgguf.engine import devices
from ftgguf.engine.cpu_rate import product_rate
from ftgguf.engine.fit import MIB, Fit, Parts, budget_of, fit, kv_bytes
from ftgguf.engine.load_cached import CachePlan, plan_prompts
from ftgguf.engine.memory import available_memory
from ftgguf.engine.survey import Survey, survey
from ftgguf.flags import ActionRequested, FlagError, parse_server
from ftgguf.flags.config import ServerConfig
from ftgguf.gguf.errors import GGUFError
from ftgguf.gguf.reader import GGUFFile
from ftgguf.layers.params import Moe
from ftgguf.models.config import ModelError, Numbers, read_numbers
from ftgguf.models.source import Use
from ftgguf.pull.errors import Offline, PullError
from ftgguf.pull.hub import parameters
from ftgguf.pull.ollama_gguf import open_model
from ftgguf.pull.resolve import DemoError, NameResolutionError, config_with_bar

GPU_SHARE = 0.7
"""Of a GPU's memory bandwidth that matrix-vector kernels reach on large matrices (docs/measurements/gpu.md)."""
CPU_LAYER_SECONDS = 20e-6
CPU_STEP_SECONDS = 50e-6
"""What a layer and a step cost on the CPU beside reading weights: 0.16 ms a token for the five layers of stories."""
LINK_SHARE = 0.75
"""Of the link's rate that copies of one expert reach: 47 of 63 GB/s (docs/measurements/offload.md)."""
LAYER_SECONDS = 45e-6
"""A decode layer's launches at one row: 12 kernels that wait for each other, 3 to 4 us each (NVIDIA H200)."""
STEP_SECONDS = 150e-6
"""A step's fixed cost: head, copy of the logits, host."""


MISS_SECONDS = 35e-6
"""A cached layer's residency kernel, doorbell, wait and merge (docs/measurements/offload.md)."""
NOT_SERVABLE = "it cannot be served so"
"""In a line of a plan that `serve` refuses; the exit status is 1 then."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of one decode step at one row, by where they go."""

    gpu: float
    cpu: float
    misses: float = 0.0
    """Experts that are not on the GPU: over the link and on the CPU at once."""

    @property
    def tokens(self) -> float:
        """Tokens a second."""
        return 1.0 / (self.gpu + self.cpu + self.misses)


def active_bytes(found: Survey, layers: range, *, head: bool) -> int:
    """Weight bytes that one token reads in `layers` (of the experts only the routed ones), and in the head."""
    total = 0.0
    for taken in found.tensors.values():
        if taken.layer not in layers:
            continue
        share = 1.0
        ffn = found.model.blocks[taken.layer].ffn
        if taken.use is Use.EXPERTS and isinstance(ffn, Moe):
            share = ffn.router.top_k / ffn.router.experts
        total += taken.info.nbytes * share
    if head:
        outside = found.outside_tensors(embedding=False, head=True)
        total += sum(t.info.nbytes for t in outside)
    return int(total)


def predict(found: Survey, first: int, gpu_rate: float, cpu_rate: float) -> Speed:
    """Decode with blocks [first, n) on the GPU. Rates in bytes/s: the GPU's memory, and the CPU's `product_rate`."""
    n = len(found.model.blocks)
    on_gpu = active_bytes(found, range(first, n), head=True) if first < n else 0
    on_cpu = active_bytes(found, range(first), head=first == n)
    gpu = on_gpu / (GPU_SHARE * gpu_rate) + (n - first) * LAYER_SECONDS + STEP_SECONDS if first < n else 0.0
    return Speed(gpu, on_cpu / cpu_rate + first * CPU_LAYER_SECONDS + CPU_STEP_SECONDS if first else 0.0)


def predict_cached(
    found: Survey, slots: int, mode: str, gpu_rate: float, link_rate: float, cpu_rate: float
) -> tuple[Speed, float]:
    """Decode with every block on the GPU and `slots` bytes of it for experts, and the share of experts found there.

    All experts equally likely, so that the share is the cache's part of the pool: the worst case. Of the misses each
    path takes what makes both end together (FreeToken, equation of q*), or one path takes all by `mode`.
    """
    layers = range(len(found.model.blocks))
    experts = [t for t in found.tensors.values() if t.use is Use.EXPERTS]
    pool = sum(t.info.nbytes for t in experts)
    routed = 0.0
    for taken in experts:
        ffn = found.model.blocks[taken.layer].ffn
        if isinstance(ffn, Moe):
            routed += taken.info.nbytes * ffn.router.top_k / ffn.router.experts
    hits = min(1.0, slots / pool)
    missed = routed * (1 - hits)
    rates = {"offload": LINK_SHARE * link_rate, "cpu": cpu_rate}
    rate = rates.get(mode, sum(rates.values()))
    read = active_bytes(found, layers, head=True) - missed
    gpu = read / (GPU_SHARE * gpu_rate) + len(layers) * LAYER_SECONDS + STEP_SECONDS
    return Speed(gpu, 0.0, missed / rate + (len(layers) * MISS_SECONDS if missed else 0.0)), hits


def main(argv: list[str]) -> int:
    """Print the plan; returns the exit status. Nothing is fetched: a name must be on this disk (the demo is made)."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: ftgguf plan MODEL [the server's flags]    where each part would go, and a predicted speed")
        return 0 if argv else 1
    arguments = argv if argv[0].startswith("-") else ["-m", *argv]
    try:
        config = parse_server(arguments, os.environ)
        if config.router:
            raise NameResolutionError("which model? ftgguf plan MODEL")
        config = config_with_bar(replace(config, model=replace(config.model, offline=True)))
        text = lines(config)
        print("\n".join(text))
        return int(any(NOT_SERVABLE in line for line in text))
    except ActionRequested as action:
        print(action.text)
    except Offline as error:
        name = config.model.hf_repo or config.model.url or config.model.path
        print(f"{str(error).split(', and ')[0]}: get it with 'ftgguf pull {name}'", file=sys.stderr)
        return 1
    except (FlagError, GGUFError, ModelError, MemoryError, PullError, NameResolutionError, DemoError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def lines(config: ServerConfig, device: devices.Device | None = None, *, look: bool = True) -> list[str]:
    """The plan as text. `look`: find the device; else `device` is taken as given (None: no GPU)."""
    gguf = open_model(Path(config.model.path), {o.key: o.value for o in config.model.override_kv})
    numbers = read_numbers(gguf)
    found = survey(gguf, numbers, config.context)
    reason = ""
    if look:
        device, reason = devices.choose(config.placement)
    head = [
        f"{gguf.path}",
        f"{gguf.architecture}, {parameters(gguf.n_params)} parameters, {gguf.file_type}, {gguf.size / MIB:.0f} MiB",
    ]
    if device is None:
        idle = [] if config.placement.vram_budget is None else ["--vram-budget has no effect: no GPU is used"]
        return head + idle + _on_cpu(config, gguf, numbers, found, reason or "no GPU")
    free = device.total if device.free is None else device.free
    budget, source = budget_of(config, free)
    cached, config = plan_prompts(found, numbers, config, budget)
    if cached is not None:
        return head + _with_cache(config, found, device, cached, budget, source)
    chosen = fit(found, numbers, config, budget)
    if chosen.on_gpu == 0:
        return head + _on_cpu(config, gguf, numbers, found, "; ".join(chosen.lines))
    return head + _on_gpu(config, found, device, chosen, budget, source)


def _with_cache(
    config: ServerConfig, found: Survey, device: devices.Device, cached: CachePlan, budget: int, source: str
) -> list[str]:
    pool = sum(t.info.nbytes for t in found.tensors.values() if t.use is Use.EXPERTS)
    text = [
        *_parts(device, cached.fit.parts, cached.start_cells, budget, source),
        f"  all {cached.fit.n_layer} layers on the GPU; misses of the expert cache: "
        + {"offload": "fetched over the link", "cpu": "run on the CPU"}.get(cached.mode, "fetched, or run on the CPU"),
        f"host memory: {pool / MIB:.0f} MiB of experts, {available_memory() / MIB:.0f} MiB available",
    ]
    link = device.link_max or device.link
    if device.bandwidth is None or link is None:
        return [*text, "no prediction: the driver tells neither this GPU's memory clock nor its link"]
    link_rate = devices.link_rate(link)
    speed, hits = predict_cached(
        found, cached.budget, cached.mode, device.bandwidth, link_rate, product_rate(found, config.cpu.threads)
    )
    return [
        *text,
        f"  {hits:.0%} of an equally likely choice of experts are found in the cache; real routing repeats itself and "
        "finds more",
        _speed_line(speed) + ", at least",
    ]


def _parts(device: devices.Device, p: Parts, n_cells: int, budget: int, source: str) -> list[str]:
    rows = (
        ("weights", p.weights), ("experts", p.experts), (f"KV of {n_cells} tokens", p.kv),
        ("workspace", p.workspace), ("CUDA itself", p.context), ("together", p.total),
    )  # fmt: skip
    text = [f"{device.id} ({device.name}), {budget / MIB:.0f} MiB: {source}"]
    return text + [f"  {name:24}{size / MIB:10.0f} MiB" for name, size in rows]


def _on_gpu(
    config: ServerConfig, found: Survey, device: devices.Device, chosen: Fit, budget: int, source: str
) -> list[str]:
    text = _parts(device, chosen.parts, chosen.n_cells, budget, source)
    text.append(f"  layers {chosen.first} to {chosen.n_layer - 1} of {chosen.n_layer} on the GPU")
    if chosen.first:
        on_cpu = sum(
            found.of_layer(i, experts=e) for i in range(chosen.first) for e in (False, True)
        ) + found.outside(embedding=True, head=False)  # fmt: skip
        text.append(f"CPU: layers 0 to {chosen.first - 1}, {on_cpu / MIB:.0f} MiB")
    text += [f"  {line}" for line in chosen.lines]
    rate = device.bandwidth
    if rate is None:
        return [*text, "no prediction: the driver does not tell this GPU's memory clock"]
    speed = predict(found, chosen.first, rate, product_rate(found, config.cpu.threads) if chosen.first else 1.0)
    return [*text, _speed_line(speed)]


def _on_cpu(config: ServerConfig, gguf: GGUFFile, numbers: Numbers, found: Survey, why: str) -> list[str]:
    cells = config.context.cells(numbers.n_ctx_train)
    attentions = [b.attention for b in found.model.blocks]
    kv = kv_bytes(attentions, cells, config.context.type_k, config.context.type_v)
    free = available_memory()
    text = [
        f"CPU, {config.cpu.threads} threads, {free / MIB:.0f} MiB available: {why}",
        f"  {'weights':24}{gguf.size / MIB:10.0f} MiB, mapped from the file",
        f"  {f'KV of {cells} tokens':24}{kv / MIB:10.0f} MiB",
    ]
    if cells > numbers.n_ctx_train:
        text.append(f"  the model was trained on {numbers.n_ctx_train} tokens: beyond, its text falls apart")
    if kv > free:
        return [*text, f"  more KV than memory: {NOT_SERVABLE}; lower -c"]
    if gguf.size + kv > free:
        text.append("  more than is available: the file is read again and again while it runs; lower -c, or add memory")
    return [*text, _speed_line(predict(found, numbers.n_layer, 1.0, product_rate(found, config.cpu.threads)))]


def _speed_line(speed: Speed) -> str:
    parts = [f"GPU {1e3 * speed.gpu:.1f} ms"] if speed.gpu else []
    parts += [f"CPU {1e3 * speed.cpu:.1f} ms"] if speed.cpu else []
    parts += [f"experts that are missing {1e3 * speed.misses:.1f} ms"] if speed.misses else []
    spent = ", ".join(parts)
    return f"predicted decode, one sequence, empty context: about {_rounded(speed.tokens)} tokens/s ({spent} a token)"


def _rounded(rate: float) -> str:
    """Three digits and no exponent: `4920`, `38.2`, `0.71`."""
    return f"{float(f'{rate:.3g}'):g}" if rate < 1000 else f"{float(f'{rate:.3g}'):.0f}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
