"""What the scheduler is told once, at start: limits and policy in tokens, rows and slots."""

from __future__ import annotations

from dataclasses import dataclass, field

from ftgguf.engine.memory import available_memory
from ftgguf.flags.config import ServerConfig, SpecConfig


def host_budget(limit_mib: int, available: int) -> int:
    """Bytes of `--cache-ram`: at most half of the memory that is available once the model is loaded; -1 is no limit of
    its own."""
    half = available // 2
    return half if limit_mib < 0 else min(limit_mib << 20, half)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`n_ctx` and `n_slots` have no default worth having; the rest are llama-server's defaults."""

    n_ctx: int
    """Tokens one sequence may hold (llama-server's `n_ctx_slot`)."""
    n_slots: int
    n_predict: int = -1
    """Limit of requests that give none; -1 is none."""
    ctx_shift: bool = False
    cont_batching: bool = True
    """False (`--no-cont-batching`): prompts wait until no sequence is generating."""
    slot_prompt_similarity: float = 0.1
    prefill_rows: int = 0
    """Prompt rows in a step in which other sequences generate; 0: a quarter of the executor's rows.

    It bounds how long a prompt may hold up the others' next token.
    """
    snapshot_bytes: int = 0
    """Budget of recurrent snapshots."""
    spec: SpecConfig = field(default_factory=SpecConfig)
    """Drafts; none without types."""
    host_bytes: int = 0
    """Host memory for pages that leave the tree; 0 keeps none."""

    def __post_init__(self) -> None:
        if self.n_slots < 1:
            raise ValueError(f"at least one slot is needed, got {self.n_slots}")
        if self.n_ctx < 1:
            raise ValueError(f"the context of a slot must hold at least one token, got {self.n_ctx}")

    @classmethod
    def of(cls, config: ServerConfig, n_cells: int, n_ctx_train: int) -> EngineConfig:
        """The engine's part of a resolved configuration, for a pool of `n_cells`."""
        context = config.context
        return cls(
            n_ctx=context.slot_limit(n_cells, n_ctx_train),
            n_slots=context.n_parallel,
            n_predict=context.n_predict,
            ctx_shift=context.shift,
            cont_batching=context.cont_batching,
            slot_prompt_similarity=context.slot_prompt_similarity,
            spec=config.spec,
            host_bytes=host_budget(context.cache_ram, available_memory()) if context.cache_idle_slots else 0,
        )
