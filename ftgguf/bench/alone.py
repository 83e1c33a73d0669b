"""`ftgguf bench -m FILE`: ours alone, as llama-bench measures."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from ftgguf import __version__
from ftgguf.bench import host
from ftgguf.bench.llama_bench import WRITERS, Result
from ftgguf.bench.options import Options
from ftgguf.bench.plan import SpeedTest, random_tokens
from ftgguf.bench.stepper import OursStepper, Timer
from ftgguf.flags import ServerConfig, parse_server


def config_for(path: str, engine: list[str], tests: tuple[SpeedTest, ...], reserve: int = 0) -> ServerConfig:
    """The engine's configuration for one sequence through `tests`: a context as large as the largest needs.

    `reserve`: tokens of context needed besides. Raises FlagError.
    """
    n_ctx = max([reserve, *(test.n_ctx for test in tests)])
    own = ["-m", path, "-c", str(max(n_ctx, 256)), "-np", "1"]
    return parse_server([*own, *engine], os.environ)


def run(options: Options, path: str) -> int:
    """Measure and print; an interrupt prints what is there. Returns the exit status."""
    results: list[Result] = []
    status = 0
    try:
        for engine in options.engine_lines():
            for result in measure(options, config_for(path, engine, options.tests)):
                results.append(result)
                if options.output == "jsonl":
                    print(WRITERS["jsonl"]([result]), end="", flush=True)
    except KeyboardInterrupt:
        status = 130
        print(f"interrupted: {len(results)} tests are complete", file=sys.stderr)
    if results and options.output != "jsonl":
        print(WRITERS[options.output](results), end="")
    return status


def measure(options: Options, config: ServerConfig) -> Iterator[Result]:
    """Load once, then each test of `options` with its repetitions."""
    stepper = OursStepper(config, _say)
    settings = settings_of(config, stepper.info)
    timer = Timer(stepper)
    for test in options.tests:
        tokens = random_tokens(test, stepper.facts.n_vocab, options.seed)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if options.warm_up:
            timer.warm_up(test, tokens)
        yield Result(settings, test, stamp, tuple(timer.run(test, tokens) for _ in range(options.repetitions)))
    stepper.close()


def _say(stage: str, fraction: float) -> None:
    if sys.stderr.isatty():
        end = "\n" if stage == "ready" else ""
        print(f"\r\x1b[K{stage} {fraction:.0%}", end=end, file=sys.stderr, flush=True)


def settings_of(config: ServerConfig, info: dict[str, Any]) -> dict[str, Any]:
    """llama-bench's fields that do not depend on the test, then `engine`, `layout`, `layout_reason`."""
    context, placement = config.context, config.placement
    on_gpu = info.get("device", "CPU") != "CPU"
    return {
        "build_commit": __version__,
        "build_number": 0,
        "cpu_info": host.cpu_name(),
        "gpu_info": host.gpu_names(),
        "backends": "CUDA" if on_gpu else "CPU",
        "model_filename": config.model.path,
        "model_type": f"{info['architecture']} {info['file_type']}",
        "model_size": info["size"],
        "model_n_params": info["n_params"],
        "n_batch": context.n_batch,
        "n_ubatch": context.n_ubatch,
        "n_threads": config.cpu.threads,
        "cpu_mask": hex(sum(1 << cpu for cpu in config.cpu.cpus)),
        "cpu_strict": config.cpu.strict,
        "poll": config.cpu.poll,
        "type_k": context.type_k,
        "type_v": context.type_v,
        "n_gpu_layers": placement.gpu_layers,
        "n_cpu_moe": placement.n_cpu_moe,
        "split_mode": placement.split_mode,
        "main_gpu": placement.main_gpu,
        "no_kv_offload": not placement.kv_offload,
        "flash_attn": {"on": 1, "off": 0}.get(context.flash_attn, -1),
        "devices": "auto" if placement.devices is None else "/".join(placement.devices) or "none",
        "tensor_split": "/".join(f"{x:.2f}" for x in placement.tensor_split) or "0.00",
        "tensor_buft_overrides": ";".join(f"{o.pattern}={o.buffer}" for o in placement.overrides) or "none",
        "load_mode": placement.load_mode,
        "lazy_mode": placement.lazy_mode,
        "embeddings": False,
        "no_op_offload": int(not placement.op_offload),
        "no_host": False,
        "repack": placement.repack,
        "fit_target": placement.fit_target[0],
        "fit_min_ctx": placement.fit_ctx,
        "engine": "ftgguf",
        "layout": info.get("layout", ""),
        "layout_reason": info.get("layout_reason", ""),
    }
