"""A real llama-server to compare with: the one inside the `xllamacpp` wheel, in a process of its own.

Takes the llama-server flags that tests use, so that the same list goes to our server and to the peer. For shapes and
text only: the wheel is built for AVX2, so it is no peer for speed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import httpx

_READY = "listening "


class PeerError(RuntimeError):
    """The peer could not be started; the message ends with the last lines of its log."""


# ------------------------------------------------------------------------------------------------ the test's side


@contextmanager
def peer_server(
    model: str | os.PathLike[str], args: Sequence[str] = (), *, log: Path | None = None, timeout_s: float = 120.0
) -> Iterator[str]:
    """Run llama-server on `model` with llama-server flags `args`; yields its base URL once /health answers 200.

    The process is killed on exit, and ends by itself when this process is gone. `log` gets its output.

    Raises:
        PeerError: unknown flag, model does not load, or no answer within `timeout_s` seconds.
    """
    command = [sys.executable, "-m", "compat.peer", os.path.abspath(model), *args]
    sink: Any = log.open("wb") if log is not None else subprocess.PIPE
    process = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=sink,
        start_new_session=True,
    )
    tail = _Tail(process.stderr) if log is None else None
    try:
        url = _address(process, timeout_s, lambda: tail.text() if tail else f"see {log}")
        _wait_healthy(url, timeout_s)
        yield url
    finally:
        _kill(process)
        if log is not None:
            sink.close()


def _address(process: subprocess.Popen[bytes], timeout_s: float, why: Callable[[], str]) -> str:
    """The URL that the child prints once the model is loaded."""
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            text = line.decode(errors="replace").strip()
            if text.startswith(_READY):
                # The pipe must not fill up: whatever the server prints later is read and dropped.
                threading.Thread(target=process.stdout.read, daemon=True).start()
                return text.removeprefix(_READY)
    finally:
        timer.cancel()
    code = process.wait()
    raise PeerError(f"the peer ended with code {code} before it listened: {why()}")


def _wait_healthy(url: str, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.05)
    raise PeerError(f"{url}/health did not answer 200 within {timeout_s:.0f} s")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process group at once; a reference server has nothing to save."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


class _Tail:
    """Reads a pipe to its end and keeps the last lines."""

    def __init__(self, pipe: Any) -> None:
        self._lines: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    def _read(self, pipe: Any) -> None:
        with pipe:
            for line in pipe:
                self._lines = [*self._lines[-11:], line.decode(errors="replace").rstrip()]

    def text(self) -> str:
        self._thread.join(timeout=2)
        return " | ".join(self._lines)


# ------------------------------------------------------------------------------------------------ the child's side


def _setter(path: str, convert: Callable[[str], Any]) -> Callable[[Any, str], None]:
    """Assign a flag's value to an attribute of CommonParams, `a.b` for nested ones."""
    *parents, name = path.split(".")

    def assign(params: Any, value: str) -> None:
        for parent in parents:
            params = getattr(params, parent)
        setattr(params, name, convert(value))

    return assign


def _cache_type(value: str) -> Any:
    import xllamacpp

    return getattr(xllamacpp.ggml_type, f"GGML_TYPE_{value.upper()}")


def _flash_attention(value: str) -> Any:
    import xllamacpp

    name = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}[value]
    return getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{name}")


def _pooling(value: str) -> Any:
    import xllamacpp

    return getattr(xllamacpp.llama_pooling_type, f"LLAMA_POOLING_TYPE_{value.upper()}")


def _adapter(params: Any, value: str, scale: float = 1.0) -> None:
    import xllamacpp

    params.lora_adapters = [*params.lora_adapters, xllamacpp.CommonAdapterLoraInfo(value, scale)]


def _scaled_adapter(params: Any, value: str) -> None:
    path, _, scale = value.rpartition(":")
    _adapter(params, path, float(scale))


_VALUES: dict[str, Callable[[Any, str], None]] = {
    flag: _setter(path, convert)
    for flags, path, convert in (
        ("-c --ctx-size", "n_ctx", int),
        ("-b --batch-size", "n_batch", int),
        ("-ub --ubatch-size", "n_ubatch", int),
        ("-np --parallel", "n_parallel", int),
        ("-n --predict --n-predict", "n_predict", int),
        ("--keep", "n_keep", int),
        ("-t --threads", "cpuparams.n_threads", int),
        ("-tb --threads-batch", "cpuparams_batch.n_threads", int),
        ("-a --alias", "model_alias", lambda v: set(v.split(","))),
        ("--api-key", "api_keys", lambda v: v.split(",")),
        ("--api-prefix", "api_prefix", str),
        ("--slot-save-path", "slot_save_path", lambda v: v.rstrip("/") + "/"),
        ("--chat-template", "chat_template", str),
        ("-s --seed", "sampling.seed", int),
        ("--temp --temperature", "sampling.temp", float),
        ("--top-k", "sampling.top_k", int),
        ("--top-p", "sampling.top_p", float),
        ("--min-p", "sampling.min_p", float),
        ("--repeat-penalty", "sampling.penalty_repeat", float),
        ("-ctk --cache-type-k", "cache_type_k", _cache_type),
        ("-ctv --cache-type-v", "cache_type_v", _cache_type),
        ("-fa --flash-attn", "flash_attn_type", _flash_attention),
        ("-ngl --n-gpu-layers", "n_gpu_layers", int),
        ("--cache-reuse", "n_cache_reuse", int),
        ("--cache-ram", "cache_ram_mib", int),
        ("--threads-http", "n_threads_http", int),
        ("--reasoning-budget", "sampling.reasoning_budget_tokens", int),
        ("--pooling", "pooling_type", _pooling),
        ("--embd-normalize", "embd_normalize", int),
        ("-sps --slot-prompt-similarity", "slot_prompt_similarity", float),
    )
    for flag in flags.split()
} | {"--lora": _adapter, "--lora-scaled": _scaled_adapter}
_SWITCHES: dict[str, tuple[str, bool]] = {
    "--props": ("endpoint_props", True),
    "--metrics": ("endpoint_metrics", True),
    "--slots": ("endpoint_slots", True),
    "--no-slots": ("endpoint_slots", False),
    "--special": ("special", True),
    "-sp": ("special", True),
    "--context-shift": ("ctx_shift", True),
    "--no-context-shift": ("ctx_shift", False),
    "--jinja": ("use_jinja", True),
    "--no-jinja": ("use_jinja", False),
    "--embedding": ("embedding", True),
    "--embeddings": ("embedding", True),
    "--lora-init-without-apply": ("lora_init_without_apply", True),
    "--no-warmup": ("warmup", False),
    "--cache-prompt": ("cache_prompt", True),
    "--no-cache-prompt": ("cache_prompt", False),
    "--no-prefill-assistant": ("prefill_assistant", False),
    "--no-repack": ("no_extra_bufts", True),
    "-kvu": ("kv_unified", True),
    "--kv-unified": ("kv_unified", True),
    "--no-kv-unified": ("kv_unified", False),
    "--swa-full": ("swa_full", True),
    "--no-ui": ("ui", False),
}


def _params(model: str, args: Sequence[str]) -> Any:
    """CommonParams for llama-server flags. SystemExit for a flag that is not in the tables."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.port = 0  # any free one
    params.n_parallel, params.kv_unified = 4, True  # llama-server's automatic choice
    rest = list(args)
    while rest:
        flag = rest.pop(0)
        if flag in ("--rerank", "--reranking"):
            params.embedding, params.pooling_type = True, _pooling("rank")
        elif flag in _SWITCHES:
            setattr(params, *_SWITCHES[flag])
        elif flag in _VALUES and rest:
            _VALUES[flag](params, rest.pop(0))
            if flag in ("-np", "--parallel"):
                params.kv_unified = False
        elif flag in _VALUES:
            sys.exit(f"flag {flag} needs a value")
        else:
            sys.exit(f"the peer does not know flag {flag}: add it to compat/peer.py")
    return params


def _serve(model: str, args: Sequence[str]) -> NoReturn:
    """Run the server until standard input is closed, that is until the parent is gone."""
    import xllamacpp

    try:
        server = xllamacpp.Server(_params(model, args))
    except RuntimeError as error:
        sys.exit(str(error))
    address = str(server.listening_address)
    print(f"{_READY}{address if '://' in address else 'http://' + address}", flush=True)
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
