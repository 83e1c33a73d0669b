"""Placement, memory and MoE offload."""

from __future__ import annotations

from ftgguf.flags import special
from ftgguf.flags import values as v
from ftgguf.flags.config import TensorOverride
from ftgguf.flags.row import Assignment, Flag, switch, value, void

_ENV = "LLAMA_ARG_"
_LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")
_REMOVED = "llama-server dropped this spelling; it is read as --load-mode {}"


def _overrides(flag_path: str, setting: object, added: tuple[TensorOverride, ...]) -> tuple[Assignment, ...]:
    return (Assignment(flag_path, setting), Assignment("placement.overrides", added, "append"))


FLAGS: tuple[Flag, ...] = (
    value("-ngl", "--gpu-layers", "--n-gpu-layers", hint="N", parse=special.gpu_layers, to="placement.gpu_layers",
          env=_ENV + "N_GPU_LAYERS", shown="auto",
          help="layers on the GPU, the last ones first: a number, auto, or all"),
    void("-cmoe", "--cpu-moe", env=_ENV + "CPU_MOE", shown="off",
         expand=lambda on: _overrides("placement.cpu_moe", True, (TensorOverride(special.EXPERTS, "CPU"),)),
         help="no expert is placed in VRAM at load; VRAM left over still caches experts (--expert-cache 0: not)"),
    value("-ncmoe", "--n-cpu-moe", hint="N", parse=v.whole(0), env=_ENV + "N_CPU_MOE", shown="0",
          expand=lambda n: _overrides("placement.n_cpu_moe", n, special.layer_overrides(n, special.EXPERTS)),
          help="the same for the experts of the first N layers"),
    value("-ncffn", "--n-cpu-ffn", hint="N", parse=v.whole(0), env=_ENV + "N_CPU_FFN", tier="B", shown="0",
          expand=lambda n: _overrides("placement.n_cpu_ffn", n, special.layer_overrides(n, special.DENSE_FFN)),
          note="a layer whose dense FFN stays on the CPU runs there as a whole",
          help="dense FFN weights of the first N layers stay on the CPU"),
    value("-ot", "--override-tensor", hint="<tensor name pattern>=<buffer type>,...", parse=special.tensor_overrides,
          to="placement.overrides", mode="append", env=_ENV + "OVERRIDE_TENSOR", shown="none",
          help="where tensors go, by regular expression; the first match decides; buffers CPU, CUDA_Host, CUDA<n>"),
    value("-fit", "--fit", hint="[on|off]", parse=v.on_off("--fit"), to="placement.fit", env=_ENV + "FIT", shown="on",
          help="fit what was left open (layers, context, expert cache) to the device's free memory"),
    value("-fitt", "--fit-target", hint="MiB0,MiB1,MiB2,...", parse=special.margins, to="placement.fit_target",
          env=_ENV + "FIT_TARGET", shown="1024", help="MiB to leave free on each device; one value stands for all"),
    value("-fitc", "--fit-ctx", hint="N", parse=v.whole(0), to="placement.fit_ctx", env=_ENV + "FIT_CTX",
          help="--fit does not shrink the context below this"),
    value("-lm", "--load-mode", hint="MODE", parse=v.choice(*_LOAD_MODES), to="placement.load_mode",
          env=_ENV + "LOAD_MODE",
          help="how the file is read: auto, none (into memory), mmap, mlock (into locked memory), mmap+mlock, "
               "dio (direct I/O)"),
    switch("--mmap", no=("--no-mmap",), to="legacy.mmap", env=_ENV + "MMAP", tier="B", tier_off="B", hidden=True,
           note=_REMOVED.format("mmap"), note_off=_REMOVED.format("none (mlock together with --mlock)"),
           help="map the file (removed from llama-server; see --load-mode)"),
    void("--mlock", to="legacy.mlock", env=_ENV + "MLOCK", tier="B", hidden=True,
         note=_REMOVED.format("mmap+mlock (mlock together with --no-mmap)"),
         help="lock the model in memory (removed from llama-server; see --load-mode)"),
    switch("-dio", "--direct-io", no=("-ndio", "--no-direct-io"), to="legacy.dio", env=_ENV + "DIO", tier="B",
           tier_off="B", hidden=True, note=_REMOVED.format("dio"), note_off=_REMOVED.format("auto"),
           help="direct I/O (removed from llama-server; see --load-mode)"),
    value("-lzm", "--lazy-mode", hint="MODE", parse=v.choice("on", "auto", "off"), to="placement.lazy_mode",
          env=_ENV + "LAZY_MODE", tier="B",
          note="rows of per-layer embedding tables are read from the mapped file when on, or above 4 GiB when auto",
          help="read rows of very large tables from disk when they are needed: on, auto, off"),
    switch("-kvo", "--kv-offload", no=("-nkvo", "--no-kv-offload"), to="placement.kv_offload",
           env=_ENV + "KV_OFFLOAD", help="KV of GPU layers lives on the GPU"),
    switch("--op-offload", no=("--no-op-offload",), to="placement.op_offload", tier="B", tier_off="B",
           note="prefill streams CPU-resident experts to the GPU where that is predicted to be faster",
           note_off="prefill never streams experts to the GPU",
           help="the GPU runs large batches over weights that live in host memory"),
    switch("--repack", no=("-nr", "--no-repack"), to="placement.repack", env=_ENV + "REPACK", tier="B",
           tier_off="B", note="see --weights-layout, which decides",
           note_off="CPU weights keep the file's layout (--weights-layout plain)",
           help="repack CPU weights for decode at load"),
    void("--no-host", env=_ENV + "NO_HOST", tier="C", note="host memory is pinned piecewise or not at all; see "
         "--pin-budget", help="do not use the pinned host buffer"),
    value("-dev", "--device", hint="<dev1,dev2,..>", parse=special.devices, to="placement.devices",
          env=_ENV + "DEVICE", shown="all", help="GPUs to use, comma-separated (CUDA0 ...); none for CPU only",
          refuse=lambda found: "one GPU is supported; name one, such as -dev CUDA0" if len(found) > 1 else ""),
    void("--list-devices", action="list-devices", help="list the GPUs and exit"),
    value("-sm", "--split-mode", hint="{none,layer,row,tensor}", parse=v.choice("none", "layer", "row", "tensor"),
          to="placement.split_mode", env=_ENV + "SPLIT_MODE", tier="B",
          note="one GPU is used, so none and layer are the same",
          refuse=lambda mode: f"{mode} splits over several GPUs, and one is supported; use layer or none"
          if mode in ("row", "tensor") else "",
          help="how the model is divided over GPUs"),
    value("-ts", "--tensor-split", hint="N0,N1,N2,...", parse=special.proportions, to="placement.tensor_split",
          env=_ENV + "TENSOR_SPLIT", tier="B", note="all of the GPU part goes to the one GPU in use", shown="none",
          refuse=lambda parts: "one GPU is supported; choose it with -mg or -dev"
          if sum(1 for part in parts if part > 0) > 1 else "",
          help="share of each GPU"),
    value("-mg", "--main-gpu", hint="INDEX", parse=v.whole(0), to="placement.main_gpu", env=_ENV + "MAIN_GPU",
          tier="B", note="this GPU is the one in use", help="the GPU to use"),
    value("--rpc", hint="SERVERS", parse=v.text, env=_ENV + "RPC", tier="D",
          note="remote devices are not supported; experts that do not fit in VRAM run from host memory instead",
          help="remote devices"),
    value("--numa", hint="TYPE", parse=lambda text, warn: v.choice("distribute", "isolate", "numactl")(
              text or "distribute", warn),
          to="placement.numa", env=_ENV + "NUMA", tier="B", shown="off",
          note="ggml places its compute threads as in llama.cpp; nothing changes on a machine with one node",
          help="NUMA placement: distribute, isolate, numactl"),
)  # fmt: skip
