"""llama-server out of the xllamacpp wheel, behind the flags that a comparison uses.

`python -m ftgguf.bench.xllamacpp_server -m FILE -c N -np N -t N -ub N --host H --port N ...`

Flags are those of `ftgguf serve --help`. Used are -m, --host, --port, -c (--ctx-size), -b, -ub, -np, --kv-unified,
-ctk, -ctv, -fa, -t, -tb, --no-repack, --cache-ram and --no-warmup; everything runs on the CPU.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from ftgguf.flags import ActionRequested, FlagError, HelpRequested, ServerConfig, parse_server


def params_of(config: ServerConfig) -> Any:
    """xllamacpp's CommonParams for a resolved configuration."""
    import xllamacpp

    def kv_type(name: str) -> Any:
        return getattr(xllamacpp.ggml_type, f"GGML_TYPE_{name.upper()}")

    flash = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}[config.context.flash_attn]
    params = xllamacpp.CommonParams()
    params.model.path = config.model.path
    params.hostnames, params.port = list(config.http.hosts), config.http.port
    c = config.context
    params.n_ctx, params.n_batch, params.n_ubatch = c.size, c.n_batch, c.n_ubatch
    params.n_parallel, params.kv_unified = c.n_parallel, c.kv_unified
    params.cache_type_k, params.cache_type_v = kv_type(c.type_k), kv_type(c.type_v)
    params.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{flash}")
    params.cpuparams.n_threads = config.cpu.threads
    params.cpuparams_batch.n_threads = config.cpu.threads_batch
    params.no_extra_bufts = not config.placement.repack
    params.cache_ram_mib = c.cache_ram
    params.warmup = c.warmup
    params.n_gpu_layers = 0
    return params


def main(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status where there is nothing to serve."""
    try:
        config = parse_server(argv, os.environ)
    except HelpRequested:
        print(__doc__)
        return 0
    except ActionRequested as action:
        if not action.text:
            print(f"error: --{action.action} is for ftgguf serve", file=sys.stderr)
            return 1
        print(action.text)
        return 0
    except FlagError as error:
        print(error, file=sys.stderr)
        return 1
    import xllamacpp

    print(f"system_info: {xllamacpp.get_system_info()}", flush=True)
    try:
        server = xllamacpp.Server(params_of(config))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"listening on {server.listening_address}", flush=True)
    wanted = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    signal.sigwait(wanted)
    os._exit(0)  # the server's threads have nothing to save


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
