"""Embeddings, reranking and LoRA adapters."""

from __future__ import annotations

from typing import Any

from ftgguf.flags import special
from ftgguf.flags import values as v
from ftgguf.flags.row import Assignment, Flag, grouped, value, void

_ENV = "LLAMA_ARG_"
_CPU = "on the CPU (-ngl 0), for attention and dense matrices; adapters of experts are refused"


def _rerank(on: Any) -> tuple[Assignment, ...]:
    """llama-server: reranking is embedding with rank pooling."""
    return (
        Assignment("http.reranking", on),
        Assignment("http.embedding", on),
        Assignment("http.pooling", "rank"),
    )


_ADAPTERS: tuple[Flag, ...] = (
    value("--lora", hint="FNAME", parse=special.lora, to="model.lora", mode="append", tier="B", note=_CPU,
          shown="none", completes="*.gguf", help="LoRA adapters, comma-separated"),
    value("--lora-scaled", hint="FNAME:SCALE,...", parse=special.lora_scaled, to="model.lora", mode="append",
          tier="B", note=_CPU, shown="none", help="LoRA adapters with a scale each"),
)  # fmt: skip

_SERVER: tuple[Flag, ...] = grouped(
    "server",
    void("--embedding", "--embeddings", to="http.embedding", env=_ENV + "EMBEDDINGS",
         help="serve /embedding and /v1/embeddings (beside completions)"),
    value("--pooling", hint="{none,mean,cls,last,rank}", parse=v.choice("none", "mean", "cls", "last", "rank"),
          to="http.pooling", env=_ENV + "POOLING", shown="the model's",
          help="how a prompt's states become one embedding"),
    value("--embd-normalize", hint="N", parse=v.stoi, to="http.embd_normalize",
          help="norm of embeddings: -1 none, 0 largest absolute value, 1 taxicab, 2 Euclidean, above: p-norm"),
    void("--rerank", "--reranking", expand=_rerank, env=_ENV + "RERANKING",
         help="serve /rerank, for rerankers (sets --embedding --pooling rank)"),
    void("--lora-init-without-apply", to="model.lora_init_without_apply", tier="B",
         note="adapters start with scale 0 until POST /lora-adapters",
         help="load adapters without applying them"),
)  # fmt: skip

FLAGS: tuple[Flag, ...] = _ADAPTERS + _SERVER
