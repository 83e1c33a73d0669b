"""CPU threads."""

from __future__ import annotations

from ftgguf.flags import special
from ftgguf.flags import values as v
from ftgguf.flags.row import Flag, Warn, value

_BATCH = "prompt threads follow the setting without -batch: one team of threads computes"


def _flag01(text: str, warn: Warn) -> bool:
    return v.stoi(text, warn) != 0


FLAGS: tuple[Flag, ...] = (
    value("-t", "--threads", hint="N", parse=v.stoi, to="cpu.threads", env="LLAMA_ARG_THREADS",
          shown="the physical cores this process may use",
          help="CPU threads for generation; 0 or less for every logical CPU"),
    value("-tb", "--threads-batch", hint="N", parse=v.stoi, to="cpu.threads_batch", shown="as --threads",
          help="CPU threads for prompts; 0 or less for every logical CPU"),
    value("-C", "--cpu-mask", hint="M", parse=special.cpu_mask, to="cpu.cpus", mode="append", tier="B", shown="none",
          note="compute threads are bound to these CPUs", help="CPUs to use, as a hexadecimal mask"),
    value("-Cr", "--cpu-range", hint="lo-hi", parse=special.cpu_range, to="cpu.cpus", mode="append", tier="B",
          shown="none", note="compute threads are bound to these CPUs",
          help="CPUs to use, as a range; adds to --cpu-mask"),
    value("--cpu-strict", hint="<0|1>", parse=_flag01, to="cpu.strict", tier="B", shown="0",
          note=lambda on: "each thread gets one CPU of the mask, in order" if on else "",
          help="bind each thread to one CPU of the mask"),
    value("--prio", hint="N", parse=v.whole(-1, 3), to="cpu.priority", tier="B",
          note=lambda level: "sets the nice value of the engine process" if level else "",
          help="priority: -1 low, 0 normal, 1 medium, 2 high, 3 realtime"),
    value("--poll", hint="<0...100>", parse=v.whole(0), to="cpu.poll", tier="C",
          note="ggml's threads come from OpenMP here, which has its own waiting policy (OMP_WAIT_POLICY)",
          help="how long threads spin for work"),
    value("-Cb", "--cpu-mask-batch", hint="M", parse=special.cpu_mask, tier="C", note=_BATCH,
          help="--cpu-mask for prompts"),
    value("-Crb", "--cpu-range-batch", hint="lo-hi", parse=special.cpu_range, tier="C", note=_BATCH,
          help="--cpu-range for prompts"),
    value("--cpu-strict-batch", hint="<0|1>", parse=_flag01, tier="C", note=_BATCH, help="--cpu-strict for prompts"),
    value("--prio-batch", hint="N", parse=v.whole(0, 3), tier="C", note=_BATCH, help="--prio for prompts"),
    value("--poll-batch", hint="<0|1>", parse=v.stoi, tier="C", note=_BATCH, help="--poll for prompts"),
)  # fmt: skip
