"""How far one unit in the last place moves a model's logits on the CPU executor: the yardstick of placement tests.

Placement has no part in this: the same executor, the same file, the same KV, the same token; one float32 weight of the
first layer's norm is the next number. The norm's output goes nowhere but into products that round their input to 8
bits, so logits stay equal to the last bit until a value passes a rounding tie. The two neighbours between which that
happens are found by bisection, and what they give differs by one rounding and by what that does to later ones.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from store_helpers import rows

from compat.synth import make
from ftgguf import _ggml_cpu as native  # type: ignore[attr-defined]
from ftgguf.engine.ggml_executor import GgmlExecutor
from ftgguf.engine.ggml_weights import GgmlSource
from ftgguf.engine.layout import Layout
from ftgguf.flags.config import ContextConfig
from ftgguf.gguf.reader import open_gguf
from ftgguf.models.config import read_numbers
from ftgguf.models.registry import family
from ftgguf.nouns import F32

NAME = "blk.0.attn_norm.weight"


@dataclass(frozen=True)
class Noise:
    """One nudge: `nmse` of the logits, `change`: the largest change of a logit. `routed`: to the same experts."""

    nmse: float
    change: float
    routed: bool


def on_cpu(path: Path, n_cells: int, kv: str) -> GgmlExecutor:
    """The CPU executor on one thread."""
    gguf = open_gguf(path)
    source = GgmlSource(gguf, native.Backend(1), Layout.PLAIN)
    model = family(gguf.architecture)(source, read_numbers(gguf), ContextConfig())
    return GgmlExecutor(source, model, n_cells=n_cells, max_rows=16, threads=1, threads_batch=1, type_k=kv, type_v=kv)


class _Routes:
    """A routing trace that keeps the last step only."""

    ids: Any = None

    def add(self, ids: Any, weights: Any) -> None:
        self.ids = np.sort(ids, -1).copy()


class Nudged:
    """A CPU executor over a copy of `path` in which values of `NAME` can be replaced: the file is mapped."""

    def __init__(self, path: Path, folder: Path, n_cells: int, kv: str = "f32") -> None:
        self.copy = folder / f"nudged-{path.name}"
        shutil.copy(path, self.copy)
        info = open_gguf(self.copy).tensors[NAME]
        self.at, self.count = info.offset, info.n_elements
        self.file = os.open(self.copy, os.O_RDWR)
        self.values = np.frombuffer(os.pread(self.file, info.nbytes, self.at), np.float32)
        self.executor = on_cpu(self.copy, n_cells, kv)
        self.routes = _Routes()
        self.executor.trace = self.routes  # type: ignore[assignment]

    def put(self, index: int, value: np.float32) -> None:
        os.pwrite(self.file, np.float32(value).tobytes(), self.at + 4 * index)

    def step(self, token: int, position: int) -> F32:
        logits: F32 = self.executor.forward(rows([token], position, [0]))[0].copy()
        return logits

    def tie(self, token: int, position: int, index: int) -> Noise | None:
        """The two neighbours of the weight between which this token's logits change; None where a change of 2 % does
        not move them (the value is rounded to 0, or is the largest of its block)."""
        was = self.values[index]
        bits = [int(np.float32(v).view(np.int32)) for v in (was, was * np.float32(1.02))]
        first = self.step(token, position)
        try:
            self.put(index, np.int32(bits[1]).view(np.float32))
            if (self.step(token, position) == first).all():
                return None
            low, high = bits
            while high - low > 1:
                middle = (low + high) // 2
                self.put(index, np.int32(middle).view(np.float32))
                if (self.step(token, position) == first).all():
                    low = middle
                else:
                    high = middle
            self.put(index, np.int32(low).view(np.float32))
            before, routes = self.step(token, position), self.routes.ids
            self.put(index, np.int32(high).view(np.float32))
            after, routes2 = self.step(token, position), self.routes.ids
        finally:
            self.put(index, was)
            self.step(token, position)  # its cell holds what the file says again
        a, b = before.astype(np.float64), after.astype(np.float64)
        error = float(((a - b) ** 2).sum() / (a**2).sum())
        return Noise(error, float(np.abs(a - b).max()), bool((routes == routes2).all()))

    def noise(self, tokens: list[int], count: int, seed: int = 0) -> list[Noise]:
        """`count` nudges, each at another token and weight, with the KV of the tokens before."""
        rng = np.random.default_rng(seed)
        for i, token in enumerate(tokens):
            self.step(token, i)
        found: list[Noise] = []
        for _ in range(20 * count):
            at, index = int(rng.integers(len(tokens))), int(rng.integers(self.count))
            noise = self.tie(tokens[at], at, index)
            if noise is not None:
                found.append(noise)
            if len(found) == count:
                break
        return found

    def runs(self, tokens: list[int], count: int) -> list[Noise]:
        """`count` runs over all tokens on their own KV, each with another value one unit in the last place larger:
        the errors of the whole run. Nothing is looked for: ties come by themselves, where there are any."""

        def run() -> tuple[F32, Any]:
            steps = [(self.step(token, i), self.routes.ids) for i, token in enumerate(tokens)]
            return np.stack([s for s, _ in steps]), np.stack([r for _, r in steps])

        want, routes = run()
        found = []
        for index in np.random.default_rng(1).choice(self.count, count, replace=False):
            self.put(index, np.nextafter(self.values[index], np.float32(np.inf)))
            got, other = run()
            self.put(index, self.values[index])
            a, b = got.astype(np.float64), want.astype(np.float64)
            error = float(((a - b) ** 2).sum() / (b**2).sum())
            found.append(Noise(error, float(np.abs(a - b).max()), bool((routes == other).all())))
        return found

    def greedy(self, first: int, n: int) -> list[int]:
        """`first` and what the CPU executor says after it, `n` tokens in all."""
        tokens = [first]
        while len(tokens) < n:
            tokens.append(int(self.step(tokens[-1], len(tokens) - 1).argmax()))
        return tokens

    def close(self) -> None:
        os.close(self.file)
        self.copy.unlink()


MODELS: dict[str, Any] = {
    "F32": "F32",
    "F16": "F16",
    "F16 experts, Q8_0": {"*_exps.weight": "F16", "*": "Q8_0"},
    "Q8_0": "Q8_0",
    "MXFP4 experts, Q8_0": {"*_exps.weight": "MXFP4", "*": "Q8_0"},
    "Q4_K and Q6_K experts, Q8_0": {"*ffn_down_exps.weight": "Q6_K", "*_exps.weight": "Q4_K", "*": "Q8_0"},
    "Q4_K_M": {"*ffn_down_exps.weight": "Q6_K", "*attn_v.weight": "Q6_K", "output.weight": "Q6_K", "*": "Q4_K"},
    "IQ4_XS experts, Q8_0": {"*_exps.weight": "IQ4_XS", "*": "Q8_0"},
}


def main() -> None:
    """The table of docs/measurements/placement.md: 12 layers of 32 experts, 8 a token, 40 nudges a model."""
    tokens = [int(t) for t in np.random.default_rng(0).integers(3, 300, 40)]
    sizes: dict[str, Any] = {"n_layer": 12, "n_expert": 32, "n_expert_used": 8, "n_embd": 512, "n_ff_expert": 256}
    print("| weights | KV | least | median | largest | other experts |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, types in MODELS.items():
            path = make("qwen3moe", Path(folder) / "m.gguf", types=types, **sizes)
            for kv in ("f32", "f16"):
                nudged = Nudged(path, Path(folder), 256, kv)
                noise = nudged.noise(tokens, 40)
                nudged.close()
                same = np.quantile([n.nmse for n in noise if n.routed], [0, 0.5, 1])
                cells = [name, kv, *(f"{v:.1e}" for v in same), str(sum(not n.routed for n in noise))]
                print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
