"""Decode and prefill speed of the cached store on a real shape: `offload_speed.py FILE [SLOT_SHARE ...]`.

For each share of the experts that fits: tok/s with the split, fill-all and all-CPU; seconds for 64 and 2048 new tokens.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "experts"))
from store_helpers import load_cached

from ftgguf.experts.measure import costs_of, probe
from ftgguf.experts.pinning import cuda_pinner
from ftgguf.experts.status import start_line
from ftgguf.experts.store import cpu_threads
from ftgguf.nouns import Batch


def rows(tokens: Any, start: int, outputs: list[int]) -> Batch:
    n = len(tokens)
    at = np.arange(start, start + n, dtype=np.int32)
    table = np.arange(start + n, dtype=np.int32)
    return Batch(np.asarray(tokens, np.int32), at, np.zeros(n, np.int32), at, (table,), np.array(outputs, np.int32))


def decode(executor: Any, steps: int, start: int, rng: np.random.Generator) -> float:
    """tok/s."""
    tokens = rng.integers(3, executor.n_vocab, steps)
    begin = time.perf_counter()
    for i, t in enumerate(tokens):
        executor.forward(rows([t], start + i, [0]))
    return steps / (time.perf_counter() - begin)


def breakdown(store: Any) -> str:
    """The last step's trace, summed over layers."""
    t = store.mail.trace
    return (
        f"hits {t[:, 0].sum()} misses {t[:, 1].sum()} fills {t[:, 2].sum()} cpu {t[:, 3].sum()}, "
        f"fill {t[:, 5].sum() / 1e3:.0f} us, wait {t[:, 6].sum() / 1e3:.0f} us"
    )


def main() -> None:
    path = Path(sys.argv[1])
    shares = [float(a) for a in sys.argv[2:]] or [0.11, 0.37]
    device = torch.device("cuda", 0)
    rng = np.random.default_rng(0)
    for share in shares:
        from ftgguf.gguf.reader import open_gguf
        from ftgguf.models.config import read_numbers

        numbers = read_numbers(open_gguf(path))
        slots = int(share * numbers.n_expert * numbers.n_layer)
        began = time.perf_counter()
        executor = load_cached(
            path, device, slots, ring_slots=96, decode_rows=1, n_cells=4096, max_rows=2048, kv="f16",
            pinner=cuda_pinner(device), cpus=cpu_threads(15),
        )  # fmt: skip
        store: Any = executor.store
        measured = probe(store)
        store.costs = costs_of(measured, "probed")
        for kind, m in measured.items():
            print(kind, {k: round(v / 1e9, 1) for k, v in vars_of(m.rates).items()}, f"{m.cpu_entry * 1e6:.1f} us/row")
            e = store.controller.estimates[kind]
            phi = m.rates.fill_contended / (m.rates.fill_contended + m.rates.cpu_contended)
            e.phi, e.alone, e.contended = phi, {"fill": m.rates.fill, "cpu": m.rates.cpu}, {
                "fill": m.rates.fill_contended, "cpu": m.rates.cpu_contended}  # fmt: skip
        executor.warm_up()
        print(
            f"share {share}: {slots} slots, ready in {time.perf_counter() - began:.1f} s; {start_line(store)}",
            flush=True,
        )
        store._write_split()
        decode(executor, 32, 0, rng)
        print(
            f"  split   {decode(executor, 200, 0, rng):8.1f} tok/s; {breakdown(store)}; {store.controller.reason}",
            flush=True,
        )
        for name, split in (("fill", (65536, 1)), ("cpu", (0, 0))):
            store.force_split(*split)
            decode(executor, 8, 0, rng)
            print(f"  {name:<7} {decode(executor, 100, 0, rng):8.1f} tok/s; {breakdown(store)}", flush=True)
        store._forced = None
        store._write_split()
        for n in (64, 64, 2048, 2048):
            begin = time.perf_counter()
            executor.forward(rows(rng.integers(3, executor.n_vocab, n), 0, [n - 1]))
            print(f"  {n} new tokens: {time.perf_counter() - begin:.3f} s {store.prefill.counts}", flush=True)
        store.close()
        del executor, store
        torch.cuda.empty_cache()


def vars_of(rates: Any) -> dict[str, float]:
    return {name: getattr(rates, name) for name in ("fill", "cpu", "fill_contended", "cpu_contended")}


if __name__ == "__main__":
    main()
