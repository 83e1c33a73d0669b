"""The engine process: `python -m ftgguf.engine --fd N`, started by the front with one end of a socketpair.

It takes the configuration that the front resolved, loads the model (`Loading` messages), says `Ready`, and serves until
the socket closes. What it cannot go on from is one `Fatal`, and exit code 1.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

from ftgguf import logs
from ftgguf.engine import messages as m
from ftgguf.engine import scripted
from ftgguf.engine.engine import Engine
from ftgguf.engine.executor import ExecutorLost
from ftgguf.engine.gather import Gather
from ftgguf.engine.link import Link, LinkClosed, die_with_parent
from ftgguf.engine.memory import GIB, available_memory
from ftgguf.engine.numa import set_numa
from ftgguf.engine.precompile import Precompiler

log = logging.getLogger("ftgguf.engine")


def main(argv: list[str] | None = None) -> int:
    """Run the engine process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="ftgguf.engine", description="The engine process; started by ftgguf serve.")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the front")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front decides
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    link = Link(socket.socket(fileno=arguments.fd))
    try:
        engine = start(link)
        if engine is None:
            return 1
        link.loaded()
        link.send([engine.ready()])
        return serve(engine, link)
    except LinkClosed as closed:
        log.debug("%s", closed)
        return 0


def start(link: Link) -> Engine | None:
    """Load the model that the first frame names; None after a `Fatal`."""

    def progress(stage: str, fraction: float) -> None:
        link.send([m.Loading(stage=stage, fraction=fraction)])

    try:
        config = link.configuration()
        logs.set_up(config.log)
        set_priority(config.cpu.priority)
        set_numa(config.placement.numa)
        if scripted.is_scripted(config.model.path):
            load: Callable[..., Engine] = scripted.load_engine
        else:
            from ftgguf.engine.load import load_engine as load
            from ftgguf.engine.load import open_model

            if config.model.check_tensors:
                from ftgguf.engine.check_tensors import check_tensors

                with open_model(config) as gguf:
                    check_tensors(gguf, progress)
        engine = load(config, progress)
    except LinkClosed:
        raise
    except Exception as error:  # whatever it is: one line for the user, and no second try
        expected = isinstance(error, ValueError | OSError | MemoryError | RuntimeError)
        log.log(logging.DEBUG if expected else logging.ERROR, "loading failed", exc_info=True)
        link.finish([m.Fatal(message=_line(error))])
        return None
    gc.collect()
    gc.freeze()  # the loaded model's objects need no more visits
    gc.set_threshold(20_000, 20, 100)
    return engine


NICE = {-1: 5, 0: 0, 1: -5, 2: -10, 3: -20}
"""`--prio` -> nice value, llama.cpp's `set_process_priority`."""


def set_priority(level: int) -> None:
    """Give this process the nice value of `level`; what the system refuses is said and left."""
    if level == 0:
        return
    try:
        os.setpriority(os.PRIO_PROCESS, 0, NICE[level])
    except OSError as error:
        log.warning("--prio %d is without effect: %s", level, error)


def _line(error: BaseException) -> str:
    """The error as text that can be sent: a damaged file's names may hold what UTF-8 cannot."""
    text = str(error)
    if isinstance(error, MemoryError) and text in ("", "std::bad_alloc"):  # an allocator, which has no more to say
        free = available_memory() / GIB
        text = f"there is not enough memory ({free:.1f} GiB are available): take a smaller context (-c) or quantisation"
    elif full_device(error):
        text = (
            "the GPU's memory is full: lower -c, -ub, -np or -ngl, use -ctk/-ctv q8_0, or end other programs on it "
            f"({text.splitlines()[0]})"
        )
    return (text or type(error).__name__).encode("utf-8", "backslashreplace").decode()


def full_device(error: BaseException) -> bool:
    """Whether torch found no memory on a GPU, named without importing torch; a failed capture has it as its context."""
    names = (type(error).__name__, type(error.__context__).__name__)
    return "OutOfMemoryError" in names


def serve(engine: Engine, link: Link) -> int:
    """Step while there is work, sleep when there is none."""
    engine.send_now = link.send
    waiting = Precompiler(engine.toolkit.grammars, link.put_back)
    gather = Gather(len(engine.scheduler.slots))
    while True:
        wait = idle = not engine.has_work
        if wait:
            gc.collect(1)
        pause = 0.0
        while (message := link.receive(wait, pause)) is not None:
            wait, pause = False, 0.0
            if isinstance(message, m.Control) and message.action == "shutdown":
                link.finish([*engine.drain(), m.Reply(id=message.id, ok=True)])
                return 0
            if isinstance(message, m.Generate):
                gather.arrived(link.at, busy=engine.has_work)
                if waiting.hold(message):
                    continue
            if isinstance(message, m.Cancel) and waiting.forget(message.id):
                continue
            engine.handle(message)
            if idle:
                pause = gather.pause(time.monotonic(), engine.metrics.prompt_step_seconds)
        gather.began()
        try:
            link.send(engine.step())
        except ExecutorLost as error:
            link.finish([*engine.drain(), m.Fatal(message=f"the executor is lost: {error}")])
            return 1


if __name__ == "__main__":
    sys.exit(main())
