"""`ftgguf serve` without a model: the front of router mode as a process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from starlette.types import ASGIApp

from ftgguf import __version__, logs
from ftgguf.flags import FlagError
from ftgguf.flags.config import ServerConfig
from ftgguf.pull.errors import NameResolutionError
from ftgguf.server import startup
from ftgguf.server.auth import Gate
from ftgguf.server.models_catalog import Catalog
from ftgguf.server.models_host import RouterHost
from ftgguf.server.models_load import Loader
from ftgguf.server.models_memory import Memory
from ftgguf.server.models_pool import Pool
from ftgguf.server.models_router import Router
from ftgguf.server.models_routes import outer_app
from ftgguf.server.ollama_jobs import Manager
from ftgguf.server.process import http_server, install_signals
from ftgguf.server.sockets import BindError, Listener, bind_all

log = logging.getLogger("ftgguf.server")

SHOWN = 12
"""Models named at the start."""


def serve_router(config: ServerConfig, argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run the front until a signal; `argv` and `env` are what every model's own configuration starts from."""
    try:
        logs.set_up(config.log)
        listeners = bind_all(config.http)
    except (BindError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for warning in config.warnings:
        log.warning("%s", warning)
    try:
        catalog = Catalog(config, argv, env)
        catalog.reload()
        return asyncio.run(_serve(config, catalog, listeners))
    except (FlagError, NameResolutionError, ValueError, OSError) as error:
        print(f"error: {str(error).removeprefix('error: ')}", file=sys.stderr)
        return 1
    finally:
        for listener in listeners:
            listener.socket.close()
            if listener.path:
                with contextlib.suppress(OSError):
                    os.unlink(listener.path)


def build_router(config: ServerConfig, catalog: Catalog, memory: Memory | None = None) -> tuple[ASGIApp, RouterHost]:
    """The application and its models; call in the event loop that runs it, and `close_router` at the end."""
    memory = memory or Memory()
    loader = Loader(catalog, memory)
    pool = Pool(loader.prepare, config.model.models_max, config.model.keep_alive, memory)
    host = RouterHost(catalog, pool)
    outer = outer_app(host, Manager(config, host))
    return Gate(Router(outer, host, config), config.http, host), host


async def _serve(config: ServerConfig, catalog: Catalog, listeners: list[Listener]) -> int:
    app, host = build_router(config, catalog)
    server = http_server(config.http, app)
    install_signals(server, host.pool.refuse)
    text = "\n".join((block(catalog, config, [listener.url for listener in listeners]), example(catalog, listeners)))
    logs.announce(text, config.log)
    for source in catalog.sources():
        if source.load_on_startup:
            host.pool.load(source)
    try:
        await server.serve(sockets=[listener.socket for listener in listeners])
    finally:
        await host.pool.close()
        host.close()
    return 0


def block(catalog: Catalog, config: ServerConfig, urls: list[str]) -> str:
    """The start-up block of router mode."""
    names = sorted(source.name for source in catalog.sources())
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    most = config.model.models_max
    limit = f"at most {most} at once" if most > 0 else "as many at once as memory holds"
    rows = [("models", f"{len(names)}, loaded when a request names them, {limit}"), ("", shown)]
    rows += [("address", url) for url in urls]
    return "\n".join([f"ftgguf {__version__}", *(f"  {key:<8} {value}" for key, value in rows)])


def example(catalog: Catalog, listeners: list[Listener]) -> str:
    """How to talk to it, with a model that is there."""
    names = [source.name for source in catalog.sources()]
    name = next((each for each in names if each != "stories"), "stories")
    return startup.example(listeners[0].url, False).replace('\'{"messages"', f'\'{{"model": "{name}", "messages"')
