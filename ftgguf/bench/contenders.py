"""The sides of a comparison over HTTP: how each is brought up, spoken to and put away."""

from __future__ import annotations

import contextlib
import shlex
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from ftgguf.bench.child import end_group, heard, openmp_note, peer_environment
from ftgguf.bench.client import RequestFailed, Target, identify
from ftgguf.bench.options import Options
from ftgguf.bench.peers import Peer
from ftgguf.bench.report import Contestant
from ftgguf.bench.servers import Server, free_port, ours_command, xllamacpp_command
from ftgguf.bench.stepper import parse_isa
from ftgguf.flags.table import by_spelling

PLACING = ("-ngl", "--gpu-layers", "--n-gpu-layers", "-ncmoe", "--n-cpu-moe", "-cmoe", "--cpu-moe", "-ot")
SWEPT = (*PLACING, "-ub", "--ubatch-size", "-b", "--batch-size", "-fa", "--flash-attn")
"""Flags that the sweep of the peer's placement sets itself."""
BY_DEVICE = "VRAM is what the GPU held beyond what it held before the start: nvidia-smi does not name the process"
ASK_S = 60.0
"""For a llama-server to start and say what it is built for."""


@dataclass(frozen=True, slots=True)
class Running:
    """A side that is up. `server` is None where we did not start it."""

    target: Target
    server: Server | None = None

    def check(self) -> None:
        """Raises ServerError if it is gone."""
        if self.server is not None:
            self.server.check()


@dataclass(slots=True)
class Contender:
    """One side and how to bring it up. `lost`: it failed, and is not tried again."""

    contestant: Contestant
    up: Callable[[], AbstractContextManager[Running]]
    lost: bool = False
    errors: list[str] = field(default_factory=list)


def own_isa() -> list[str]:
    """Instruction sets of our kernels (the same module that the engine process loads)."""
    from ftgguf import _ggml_cpu as native

    return [name for name, there in native.cpu_features().items() if there]


def peer_flags(flags: list[str]) -> list[str]:
    """`flags` without those that only ftgguf has."""
    kept: list[str] = []
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        row, _ = by_spelling()[flag.replace("_", "-") if flag.startswith("--") else flag]
        values = [rest.pop(0)] if row.takes_value and rest else []
        if row.group != "ftgguf":
            kept += [flag, *values]
    return kept


def without(flags: list[str], names: tuple[str, ...]) -> list[str]:
    """`flags` without those of `names` and their values."""
    kept: list[str] = []
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        row, _ = by_spelling()[flag.replace("_", "-") if flag.startswith("--") else flag]
        values = [rest.pop(0)] if row.takes_value and rest else []
        if flag not in names:
            kept += [flag, *values]
    return kept


def make_contenders(
    options: Options,
    flags: list[str],
    peer: Peer | None,
    placements: dict[str, list[str]] | None = None,
    n_ctx: int = 0,
) -> list[Contender]:
    """Ours, and the peer in each variant that may be its best here.

    `placements` are the sweep's on a machine with a GPU, by what they are best at. Without, llama.cpp's two weight
    layouts are both tried: neither wins everywhere. `flags` are llama-server's; our own among them are ours alone.
    `n_ctx`: the context to ask of a peer that takes one by request (Ollama).
    """
    ours = Contestant("ftgguf", ours=True, isa=own_isa())
    sides = [Contender(ours, _local(ours, ours_command(flags), options))]
    if peer is None:
        return sides
    if peer.kind in ("llama-server", "xllamacpp"):
        shared = without(peer_flags(flags), SWEPT) if placements else peer_flags(flags)
        by_hand = any(flag in shlex.split(options.peer_args) for flag in PLACING)
        variants = placements or ({"": []} if by_hand else {"": [], " plain": ["--no-repack"]})
        isa = asked_isa(peer.where) if peer.kind == "llama-server" else []
        for name, more in variants.items():
            command = peer_command(peer, [*shared, *more, *shlex.split(options.peer_args)])
            layout = "" if placements or by_hand else "plain" if name else "its default"
            side = Contestant(peer.kind + name, ours=False, layout=layout, isa=list(isa))
            sides.append(Contender(side, _local(side, command, options)))
        return sides
    side = Contestant("ollama" if peer.kind == "ollama" else peer.where.split("://")[-1], ours=False)
    side.notes.append(
        "it runs all the time, also while ours is measured; what it was started with, and its kernels, are unknown"
    )
    sides.append(Contender(side, _remote(side, peer, options, n_ctx)))
    return sides


def other_backend(options: Options, flags: list[str], peer: Peer) -> Contender:
    """llama-server without a GPU and with plain weights: what its own backends differ by is noise. Not measured."""
    shared = without(peer_flags(flags), PLACING)
    command = peer_command(peer, [*shared, "--device", "none", "--no-repack"])
    side = Contestant(f"{peer.kind} on the CPU", ours=False, layout="plain")
    return Contender(side, _local(side, command, options))


def asked_isa(where: str) -> list[str]:
    """Instruction sets of the llama-server at `where`: it says them at its start at a higher verbosity than its usual
    one, which would cost a measured server time. So it is started once without a model and ended as soon as it has said
    them; empty where it does not within ASK_S."""
    command = [where, "-lv", "4", "-m", "/nonexistent.gguf", "--host", "127.0.0.1", "--port", str(free_port())]
    try:
        process = heard(command)
    except OSError:
        return []
    watch = threading.Timer(ASK_S, end_group, [process.pid])
    watch.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            _, found, said = line.decode(errors="replace").partition("system_info:")
            if found:
                return list(parse_isa(said))
        return []
    finally:
        watch.cancel()
        end_group(process.pid)
        process.wait()
        process.stdout.close()


def peer_command(peer: Peer, flags: list[str]) -> list[str]:
    """The peer's server with `flags`."""
    return [peer.where, *flags] if peer.kind == "llama-server" else xllamacpp_command(flags)


def _local(side: Contestant, command: list[str], options: Options) -> Callable[[], AbstractContextManager[Running]]:
    side.command = shlex.join(command)
    side.notes.append(openmp_note(ours=side.ours))

    @contextmanager
    def up() -> Iterator[Running]:
        with (
            tempfile.TemporaryDirectory(prefix="ftgguf-bench-") as folder,
            Server(
                command, Path(folder) / "log.txt", options.timeout, None if side.ours else peer_environment()
            ) as server,
        ):
            target = identify(server.url, "", options.timeout)
            side.load_seconds = server.load_seconds
            _learn(side, target, server)
            try:
                yield Running(target, server)
            finally:
                _note_memory(side, server)

    return up


def _note_memory(side: Contestant, server: Server) -> None:
    if server.memory is not None:
        server.memory.look()
        side.rss_steady = server.memory.steady
        side.rss_peak = max(side.rss_peak, server.memory.peak)
        side.vram_peak = max(side.vram_peak, server.memory.vram_peak)
        if server.memory.by_device and BY_DEVICE not in side.notes:
            side.notes.append(BY_DEVICE)


def _learn(side: Contestant, target: Target, server: Server) -> None:
    """Build and instruction sets, from /props and from what llama-server prints at its start."""
    with contextlib.suppress(RequestFailed):
        side.build = str(target.get("/props").get("build_info", "")) or side.build
    if side.name.startswith("xllamacpp"):
        side.build = f"xllamacpp {version('xllamacpp')} ({side.build})"
    for line in server.text().splitlines():
        if "system_info:" in line and not side.isa:
            side.isa = list(parse_isa(line.split("system_info:", 1)[1]))


def _remote(
    side: Contestant, peer: Peer, options: Options, n_ctx: int
) -> Callable[[], AbstractContextManager[Running]]:
    side.command = peer.where

    @contextmanager
    def up() -> Iterator[Running]:
        if peer.kind == "ollama":
            target = Target(peer.where, "ollama", options.peer_model, options.peer_key, options.timeout, n_ctx)
            side.build = side.build or f"Ollama {target.get('/api/version').get('version', '')}"
        else:
            target = identify(peer.where, options.peer_model, options.timeout, options.peer_key)
            with contextlib.suppress(RequestFailed):
                side.build = str(target.get("/props").get("build_info", ""))
        try:
            yield Running(target)
        finally:
            if peer.kind == "ollama":
                with contextlib.suppress(RequestFailed):  # unload, so that ours has the memory
                    target.post("/api/generate", {"model": target.model, "keep_alive": 0, "stream": False})

    return up
