"""What `serve` prints when it starts: one block about the model and the machine, and how to talk to it."""

from __future__ import annotations

import sys
from typing import Any

from ftgguf import __version__
from ftgguf.chat.builtin import BUILTIN
from ftgguf.chat.template import ChatTemplates
from ftgguf.engine.messages import Loading, Ready
from ftgguf.flags.config import ServerConfig
from ftgguf.pull.layers import TEMPLATE_REASON

BAR = 30
_GPU_FLAGS = {"placement.gpu_layers": "-ngl", "placement.vram_budget": "--vram-budget", "placement.main_gpu": "-mg"}


def size_text(size: float) -> str:
    """Bytes in the largest unit that leaves at least one whole."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def count_text(count: int) -> str:
    """Parameters, as models' names write them (30.5B)."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= limit:
            return f"{count / limit:.1f}{unit}"
    return str(count)


def block(ready: Ready, name: str, urls: list[str], template: str = "") -> str:
    """The start-up block. `info`'s fields that are absent are left out, and so is an empty `template`."""
    info = ready.info
    rows = [("model", _model(info, name)), ("file", str(info.get("path", "")))]
    rows.append(("device", _device(info)))
    threads = info.get("threads")
    if threads:
        batch = info.get("threads_batch", threads)
        rows.append(("threads", f"{threads}" if batch == threads else f"{threads}, {batch} for prompts"))
    train = info.get("n_ctx_train", 0)
    context = f"{ready.n_ctx} tokens a request, {ready.n_slots} slots"
    rows.append(("context", context + (f" (trained on {train})" if train else "")))
    rows.append(("template", template))
    rows.append(("memory", _memory(info)))
    rows.append(("VRAM", _vram(info)))
    rows += [("note", str(note)) for note in info.get("notes", ())]
    rows += [("address", url) for url in urls]
    lines = [f"ftgguf {__version__}"]
    lines += [f"  {key:<8} {value}" for key, value in rows if value]
    return "\n".join(lines)


def _model(info: dict[str, Any], name: str) -> str:
    parts = [str(info.get("name") or name), str(info.get("architecture", ""))]
    if info.get("n_params"):
        parts.append(count_text(int(info["n_params"])) + " parameters")
    parts.append(str(info.get("file_type", "")))
    if info.get("size"):
        parts.append(size_text(info["size"]))
    if info.get("n_expert"):
        parts.append(f"{info['n_expert']} experts, {info.get('n_expert_used', 0)} used")
    return ", ".join(part for part in parts if part)


def template_text(config: ServerConfig, templates: ChatTemplates) -> str:
    """Where the chat template comes from, in words."""
    told = [reason for reason in config.reasons if reason.startswith(TEMPLATE_REASON)]
    if told:
        return told[-1].removeprefix(TEMPLATE_REASON)
    given = config.chat.template
    if given:
        return f"built-in '{given}' (--chat-template)" if given in BUILTIN else "the one given by --chat-template"
    return "the file's own" if templates.explicit else "the file has none: chatml, as llama-server takes it"


def _device(info: dict[str, Any]) -> str:
    """Where the model runs: `CPU (no NVIDIA GPU found)`, `CUDA0 (NVIDIA H200), 20 of 48 blocks`."""
    device = str(info.get("device", ""))
    why = info.get("device_name") or info.get("device_reason")
    blocks = ""
    if "gpu_layers" in info and info["gpu_layers"] < info.get("n_layer", 0):
        blocks = f", {info['gpu_layers']} of {info['n_layer']} blocks"
    return f"{device} ({why}){blocks}" if device and why else device


def no_gpu(config: ServerConfig, info: dict[str, Any]) -> str:
    """A line where the flags ask for a GPU and the CPU has everything; empty otherwise. llama-server warns likewise."""
    asked = [flag for path, flag in _GPU_FLAGS.items() if path in config.given]
    if info.get("device") != "CPU" or not asked or config.placement.gpu_layers == 0 or config.placement.devices == ():
        return ""
    why = info.get("device_reason") or "none found"
    return f"no usable GPU ({why}): {', '.join(asked)} without effect, the model runs on the CPU"


def _memory(info: dict[str, Any]) -> str:
    parts = []
    if info.get("resident"):
        parts.append(f"{size_text(info['resident'])} resident")
    if info.get("kv_bytes"):
        parts.append(f"{size_text(info['kv_bytes'])} for {info.get('cells', '?')} KV cells")
    if info.get("layout"):
        parts.append(f"weights {info['layout']} ({info.get('layout_reason', '')})".replace(" ()", ""))
    return "; ".join(parts)


def _vram(info: dict[str, Any]) -> str:
    """What the engine holds on the GPU, by purpose, and what it may: `512.0 MiB of 2.0 GiB (--vram-budget): KV ...`."""
    held: dict[str, int] = info.get("vram", {})
    if not held or "vram_budget" not in info:
        return ""
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in held.items() if size)
    budget = f"{size_text(info['vram_budget'])} ({info.get('vram_budget_reason', '')})"
    return f"{size_text(sum(held.values()))} of {budget}: {parts}"


def example(url: str, key: bool) -> str:
    """A line that says how to talk to the server."""
    auth = " -H 'Authorization: Bearer YOUR_KEY'" if key else ""
    target = url + "/v1/chat/completions"
    if url.startswith("unix://"):
        target = f"--unix-socket {url.removeprefix('unix://')} http://localhost/v1/chat/completions"
    return (
        f"Talk to it:  curl {target}{auth} -H 'Content-Type: application/json' "
        '-d \'{"messages": [{"role": "user", "content": "Hello"}]}\''
    )


def show_progress(loading: Loading) -> None:
    """One line of progress on a terminal that is overwritten; nothing where output is not a terminal."""
    if sys.stderr.isatty():
        filled = round(BAR * min(max(loading.fraction, 0.0), 1.0))
        bar = "#" * filled + "." * (BAR - filled)
        print(f"\r\033[K[{bar}] {loading.fraction:4.0%} {loading.stage}", end="", file=sys.stderr, flush=True)


def end_progress() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
