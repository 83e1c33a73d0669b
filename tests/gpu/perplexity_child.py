"""`perplexity_child.py FILE FLAGS ...`: perplexity of a JSON file's chunks of tokens with a server's flags, as JSON.

Each chunk is evaluated from an empty context, once as a prompt with all its logits and once token by token (decode).
The engine is the server's (`load_engine`), in this process; the executor is driven directly.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from ftgguf.engine.cache_controls import store_of
from ftgguf.engine.load import load_engine
from ftgguf.flags import parse_server
from ftgguf.nouns import F32, Batch


def batch(tokens: list[int], start: int) -> Batch:
    """One sequence's `tokens` from position `start`, its cells from the first page on, every row's logits."""
    n = len(tokens)
    at = np.arange(start, start + n, dtype=np.int32)
    table = np.arange(start + n, dtype=np.int32)
    return Batch(
        np.array(tokens, np.int32), at, np.zeros(n, np.int32), at, (table,), np.arange(n, dtype=np.int32)
    )  # fmt: skip


def surprise(logits: F32, tokens: list[int]) -> float:
    """Sum of -log p of each next token, in float64."""
    x = logits[:-1].astype(np.float64)
    top = x.max(1, keepdims=True)
    norm = top[:, 0] + np.log(np.exp(x - top).sum(1))
    return float((norm - x[np.arange(len(x)), tokens[1:]]).sum())


def main() -> None:
    chunks: list[list[int]] = json.loads(Path(sys.argv[1]).read_text())
    engine = load_engine(parse_server(sys.argv[2:], {}), lambda stage, f: None)
    executor = engine.executor
    total = {"prompt": 0.0, "decode": 0.0}
    for tokens in chunks:
        rows = executor.max_rows
        parts = [executor.forward(batch(tokens[at : at + rows], at)).copy() for at in range(0, len(tokens), rows)]
        total["prompt"] += surprise(np.concatenate(parts), tokens)
        one = [executor.forward(batch([t], i))[0].copy() for i, t in enumerate(tokens)]
        total["decode"] += surprise(np.stack(one), tokens)
    count = sum(len(tokens) - 1 for tokens in chunks)
    store = store_of(executor)
    slots = 0 if store is None else sum(store.arena.plan.counts())
    values = {way: float(np.exp(nll / count)) for way, nll in total.items()}
    print(json.dumps({**values, "tokens": count, "slots": slots}))


if __name__ == "__main__":
    main()
