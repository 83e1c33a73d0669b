"""Servers on the GPU as users start them, references on the CPU, and what "the same answer" means between the two.

Without a device the same servers run on a simulated one (`hooks/sitecustomize.py`): FTGGUF_SIMULATE=1, smaller models.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from compat.families import FAMILIES
from compat.routes import decided_routes
from compat.synth import make
from compat.vocab import tiny
from ftgguf.engine.fit import MIB, parts_of
from ftgguf.engine.survey import survey
from ftgguf.flags import parse_server
from ftgguf.gguf.reader import open_gguf
from ftgguf.models.config import read_numbers

ROOT = Path(__file__).parents[2]
HOOKS = Path(__file__).parent / "hooks"
REAL = torch.cuda.is_available()
SIMULATED_MIB = 8192
START_S = 150.0 if REAL else 280.0

GRAPHS_MIB = 96 if REAL else 1
"""`engine.load_cached.GRAPHS`, which the hooks lower for the small models of the simulation."""
LONG = 600 if REAL else 24
"""Tokens (bytes: the vocabulary is byte-level) of a prompt that goes through prefill's large passes."""
MANY = 256 if REAL else 6
"""Tokens of an answer that is compared at length."""
FEW = 32 if REAL else 3
CONTEXT = 8192 if REAL else 512
NEAR = 6
"""Alternatives that an answer shows of each token: more than two may be near each other."""
NOISE = 0.15
"""Between logprobs where both sides decoded everything: the same integer products, but K and V in float16, which ggml
also adds up in float16, and misses that the CPU computes in one run and the GPU in another. The CPU alone parts from
itself by 0.098 in another weight layout or with F32 KV (this model, 16 prompts of 3 tokens, 256 of answer as far as the
texts agree: 12,000 tokens, by a script that is not kept), by 0.096 with the tests' own prompt. So 0.1 was its noise;
0.106 was seen on a device. Half as much again is what another way of rounding may add."""
ROUGH = 0.2
"""Where one side evaluated a prompt in another way: activations of 16 bits on the GPU and of 8 on the CPU, other orders
of sums. The CPU against itself with another weight layout: up to 0.07 (0.57 where routers have near ties)."""

SIZES: dict[str, Any] = (
    {
        "n_layer": 8, "n_embd": 512, "n_head": 8, "n_head_kv": 4, "n_ff_expert": 512, "n_expert": 128,
        "n_expert_used": 4, "n_context": 65536,
    }
    if REAL
    else {
        "n_layer": 2, "n_expert": 192, "n_head": 2, "n_head_kv": 1, "head_dim": 32, "n_rot": 32, "n_embd": 64,
        "n_ff": 64, "n_ff_expert": 128, "n_context": 65536,
    }
)  # fmt: skip
"""432 MiB of experts, or 9.7 under the interpreter. Budgets are made with the plan's context (`fit.CONTEXT`), a smaller
one is measured: with 200 MiB less they must not hold all experts."""


def folder() -> Path:
    """Where models and references lie: one folder for all processes of a test run."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    path = Path(tempfile.gettempdir()) / f"ftgguf-serve-{run[:12]}"
    if not path.exists() and run == str(os.getpid()):
        atexit.register(shutil.rmtree, path, ignore_errors=True)
    path.mkdir(exist_ok=True)
    return path


@contextmanager
def locked(name: str, *, alone: bool = True) -> Iterator[None]:
    """A lock between processes: shared, or `alone`."""
    with open(folder() / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def moe() -> Path:
    """The model of most tests: random weights, so that every expert and position matters, but routers that rounding
    does not change."""
    path = folder() / "moe.gguf"
    with locked("models"):
        if path.exists():
            return path
        shape = {name: SIZES[name] for name in ("n_layer", "n_expert", "n_expert_used", "n_embd") if name in SIZES}
        values = decided_routes(**{"n_expert_used": FAMILIES["qwen3moe"].defaults.n_expert_used, **shape},
                                n_vocab=tiny().size)  # fmt: skip
        return make("qwen3moe", path, types="Q4_K" if REAL else "Q8_0", values=values, **SIZES)


DECIDED = {3: 20, LONG: 2} if REAL else {}
"""Seeds of prompts whose answers go on for 40 and 20 tokens before the two best come within 0.07 nats (the CPU's)."""


def prompt(n: int, seed: int | None = None) -> list[int]:
    """`n` token ids."""
    state, found = 12345 + 7919 * (DECIDED.get(n, 0) if seed is None else seed), []
    for _ in range(n):
        state = (1103515245 * state + 12345) % (1 << 31)
        found.append(3 + (state >> 8) % 250)
    return found


def budget_for(path: Path, expert_mib: int, *flags: str, cells: int = CONTEXT, cached: bool = True) -> int:
    """MiB of `--vram-budget` that leave about `expert_mib` for experts, by the product's own sums. `cached`: for slots
    of a cache; else for all, resident."""
    gguf = open_gguf(path)
    numbers = read_numbers(gguf)
    config = parse_server(["-m", str(path), *flags], {})
    parts = parts_of(survey(gguf, numbers, config.context), 0, cells, config, cached=cached)
    return -(-(parts.total - parts.experts) // MIB) + GRAPHS_MIB + expert_mib


# ----------------------------------------------------------------------------------------------------- processes


def environment(**more: str) -> dict[str, str]:
    """Of the product's processes: this checkout, the hooks, and the simulated device where there is no other."""
    found = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_ARG_")}
    if REAL:
        found.pop("TRITON_INTERPRET", None)
    else:
        found["FTGGUF_TEST_SIMULATE"] = str(SIMULATED_MIB)
    paths = [str(HOOKS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {**found, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", **more}


def cores() -> None:
    """Keep to this test process's share of the cores: servers side by side would put their workers on the same ones."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    allowed = sorted(os.sched_getaffinity(0))
    each = len(allowed) // count
    if each:
        first = int(worker.removeprefix("gw")) % count * each
        os.sched_setaffinity(0, allowed[first : first + each])


def command(*args: str, **env: str) -> tuple[int, str]:
    """`ftgguf ARGS`: its exit status and everything it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "ftgguf", *args],
        cwd=ROOT, env=environment(**env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=START_S,
        preexec_fn=cores,
    )  # fmt: skip
    return done.returncode, done.stdout


class Server:
    """A running `ftgguf serve -m path FLAGS`. `stop` may be called twice."""

    def __init__(self, path: str | Path, *flags: str, shares: bool = True, **env: str) -> None:
        """Raises RuntimeError with what was printed if it does not come up. `shares` False: the caller has locked the
        device's memory for itself."""
        self.shares = shares
        self.path, self.flags = path, flags
        self.log_file = Path(tempfile.mkstemp(suffix=".log", dir=folder())[1])
        threads = [] if "-t" in flags else ["-t", "4" if REAL else "1"]
        line = [sys.executable, "-m", "ftgguf", "serve", "-m", str(path), "--port", "0", *threads, *flags]
        with locked("memory" if shares else "own", alone=False), self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                line, cwd=ROOT, env=environment(**env), stdout=log, stderr=log, preexec_fn=cores
            )
            try:
                self._come_up(line)
            except BaseException as error:  # a test run that is cut leaves no server behind
                error.add_note(f"the server's log ended with:\n{self.log[-6000:]}")
                self.process.kill()
                raise
        found = re.search(r"address +(\S+)", self.log)
        assert found is not None, self.log
        self.client = httpx.Client(base_url=found[1], timeout=START_S)

    def _come_up(self, line: list[str]) -> None:
        deadline = time.monotonic() + START_S
        while "Talk to it" not in self.log:
            if self.process.poll() is not None or time.monotonic() > deadline:
                ended = f"exit status {self.process.poll()}" if self.process.poll() is not None else f"in {START_S} s"
                raise RuntimeError(f"{' '.join(line)} did not come up ({ended})")
            time.sleep(0.1)

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def stop(self) -> int:
        """End it as Ctrl-C does; its exit status."""
        if self.process.poll() is None:
            with locked("memory" if self.shares else "own", alone=False):
                self.process.send_signal(signal.SIGTERM)
                try:
                    self.process.wait(20)
                except subprocess.TimeoutExpired:
                    self.process.kill()
                    self.process.wait()
            self.client.close()
        return self.process.returncode

    def get(self, path: str) -> Any:
        answer = self.client.get(path)
        assert answer.status_code == 200, (path, answer.status_code, answer.text, self.log[-2000:])
        return answer.json()

    def post(self, path: str, body: Any) -> Any:
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, (path, answer.status_code, answer.text, self.log[-2000:])
        return answer.json()

    def refused(self, path: str, body: Any) -> tuple[int, str]:
        """Status and message of a request that fails."""
        answer = self.client.post(path, json=body)
        assert answer.status_code >= 400, answer.text
        return answer.status_code, str(answer.json()["error"]["message"])

    def events(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """The events of a stream; leaving it early hangs up."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                raise AssertionError((answer.status_code, answer.read()))
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    def metrics(self) -> dict[str, float]:
        lines = [line.split() for line in self.client.get("/metrics").text.splitlines() if line[:1] not in ("#", "")]
        return {name: float(value) for name, value in lines}

    def wait(self, what: str, state: int = 200, seconds: float = START_S) -> None:
        """Until GET `what` answers with status `state`."""
        deadline = time.monotonic() + seconds
        while self.client.get(what).status_code != state:
            assert time.monotonic() < deadline, f"{what} did not become {state}: {self.log[-3000:]}"
            time.sleep(0.05)


@contextmanager
def server(path: str | Path, *flags: str, shares: bool = True, **env: str) -> Iterator[Server]:
    """A server, ended at the end."""
    running = Server(path, *flags, shares=shares, **env)
    try:
        yield running
    finally:
        running.stop()


def refusal(path: str | Path, *flags: str, **env: str) -> str:
    """What a server says that does not start; AssertionError where it ends well or runs on."""
    with locked("memory", alone=False):
        code, said = command("serve", "-m", str(path), "--port", "0", "-t", "1", *flags, **env)
    assert code == 1, (code, said)
    return said


# ------------------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True)
class Answer:
    """A greedy answer: ids, their logprobs, and of each position the NEAR best (id, logprob)."""

    ids: list[int]
    logprobs: list[float]
    best: list[list[tuple[int, float]]]
    cached: int = 0
    drafted: int = 0

    @classmethod
    def of(cls, found: list[dict[str, Any]], timings: dict[str, Any]) -> Answer:
        return cls(
            [int(p["id"]) for p in found],
            [float(p["logprob"]) for p in found],
            [[(int(t["id"]), float(t["logprob"])) for t in p["top_logprobs"]] for p in found],
            int(timings.get("cache_n", 0)),
            int(timings.get("draft_n", 0)),
        )


def question(tokens: Sequence[int], n: int, **fields: Any) -> dict[str, Any]:
    """The body of a greedy /completion request whose answer has exactly `n` tokens."""
    return {"prompt": list(tokens), "n_predict": n, "temperature": 0, "n_probs": NEAR, "ignore_eos": True, **fields}


def greedy(running: Server, tokens: Sequence[int], n: int, **fields: Any) -> Answer:
    """The server's greedy answer."""
    got = running.post("/completion", question(tokens, n, **fields))
    answer = Answer.of(got["completion_probabilities"], got["timings"])
    assert len(answer.ids) == n
    return answer


def streamed(running: Server, tokens: Sequence[int], n: int, **fields: Any) -> Answer:
    """The same by a stream of events."""
    found: list[dict[str, Any]] = []
    timings: dict[str, Any] = {}
    for event in running.events("/completion", question(tokens, n, **fields)):
        assert "error" not in event, event
        found += event.get("completion_probabilities", [])
        timings = event.get("timings", timings)
    return Answer.of(found, timings)


def same(got: Answer, want: Answer, noise: float = NOISE) -> int:
    """Assert that two answers are equal up to rounding; returns how many tokens were compared before they parted.

    Logprobs of the same token agree to `noise`. Where the texts part, each side was undecided between its own token and
    the other's (a third one may be as near); what follows has another past and says nothing.
    """
    for i, (a, b) in enumerate(zip(got.ids, want.ids, strict=True)):
        if a == b:
            assert abs(got.logprobs[i] - want.logprobs[i]) <= noise, (i, got.logprobs[i], want.logprobs[i])
            continue
        for side, chosen, other in ((got, a, b), (want, b, a)):
            found = dict(side.best[i])
            assert {a, b} <= found.keys(), f"token {i}: {a} against {b}, of {side.best[i]}"
            apart = found[chosen] - found[other]
            assert apart <= 2 * noise, f"token {i}: {a} against {b}, decided by {apart:.3f}"
        return i
    return len(got.ids)


_cpu: dict[tuple[str, ...], Server] = {}


def cpu(path: Path, *flags: str) -> Server:
    """This process's server of `path` with `-dev none`, kept until the process ends."""
    key = (str(path), *flags)
    if key not in _cpu:
        _cpu[key] = Server(path, "-dev", "none", "-c", "4096", "-np", "1", *flags)
        atexit.register(_cpu[key].stop)
    return _cpu[key]


def reference(path: Path, tokens: Sequence[int], n: int, *flags: str) -> Answer:
    """The CPU's answer, computed once for all processes of a test run."""
    named = json.dumps([path.name, list(tokens), n, list(flags)]).encode()
    kept = folder() / f"{hashlib.sha256(named).hexdigest()[:24]}.json"
    with locked("reference"):
        if not kept.exists():
            kept.write_text(json.dumps(asdict(greedy(cpu(path, *flags), tokens, n, cache_prompt=False))))
    found = json.loads(kept.read_text())
    return Answer(**{**found, "best": [[(i, p) for i, p in two] for two in found["best"]]})
