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
from ftgguf.bench.publish import save
from ftgguf.bench.recording import command_line
from ftgguf.bench.report import Contestant, Report
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
    names: list[str] = []
    report = Report("speed", command_line(["ftgguf", *sys.argv[1:]]))
    if options.html or options.report:
        report.host = host.describe()
    status = 0
    try:
        for engine in options.engine_lines():
            varied = " ".join(engine[len(options.engine) :]) if len(options.engine_lines()) > 1 else ""
            for result in measure(options, config_for(path, engine, options.tests)):
                results.append(result)
                names.append(f"{result.test.name} {varied}".rstrip())
                if options.output == "jsonl":
                    print(WRITERS["jsonl"]([result]), end="", flush=True)
    except KeyboardInterrupt:
        status, report.interrupted = 130, True
    if results and options.output != "jsonl":
        print(WRITERS[options.output](results), end="")
    _fill(report, results, names)
    if report.interrupted:
        done = [f"{name}: {len(r.samples_ns)} of {options.repetitions}" for name, r in zip(names, results, strict=True)]
        missing = len(options.tests) * len(options.engine_lines()) - len(done)
        done += [f"{missing} tests: 0 of {options.repetitions}"] if missing else []
        report.progress = f"repetitions of {', '.join(done)}"
        print(f"interrupted: {report.interruption}", file=sys.stderr)
    save(report, page=options.html, report_file=options.report)
    return status


def _fill(report: Report, results: list[Result], names: list[str]) -> None:
    """The same figures as a report, for `--html` and `--report`."""
    side = Contestant("ftgguf", ours=True, build=__version__)
    report.contestants = [side]
    for result, name in zip(results, names, strict=True):
        known = result.settings
        side.layout = known["layout"]
        report.model = {"file": known["model_filename"], "type": known["model_type"]}
        report.settings = {
            k: str(known[k]) for k in ("backends", "n_batch", "n_ubatch", "type_k", "type_v", "n_threads")
        }
        report.row(name, "tok/s", paired=True).samples = {side.name: result.samples_ts}


def measure(options: Options, config: ServerConfig) -> Iterator[Result]:
    """Load once, then each test of `options` with its repetitions. An interrupted test gives the repetitions it had."""
    stepper = OursStepper(config, _say)
    settings = settings_of(config, stepper.info)
    timer = Timer(stepper)
    for test in options.tests:
        tokens = random_tokens(test, stepper.facts.n_vocab, options.seed)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        samples: list[int] = []
        try:
            if options.warm_up:
                timer.warm_up(test, tokens)
            for _ in range(options.repetitions):
                samples.append(timer.run(test, tokens))
        except KeyboardInterrupt:
            if samples:
                yield Result(settings, test, stamp, tuple(samples))
            raise
        yield Result(settings, test, stamp, tuple(samples))
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
