"""What a model on a GPU takes of it, and what it leaves in host memory, before it is loaded.

By the plan that its engine makes at its start (engine.fit, engine.load_cached), with the memory that the GPU will have
once models that must go are gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftgguf.engine.devices import Device
from ftgguf.engine.fit import Fit, budget_of, embedding_in_host_memory, fit, kv_bytes
from ftgguf.engine.load_cached import plan_prompts
from ftgguf.engine.survey import Survey, aligned
from ftgguf.flags.config import ServerConfig
from ftgguf.models.config import Numbers
from ftgguf.models.source import Use


@dataclass(frozen=True, slots=True)
class OnGpu:
    """Bytes, and KV cells."""

    gpu: str
    device: int
    """On the GPU, its context included."""
    host_weights: int
    """Weights that stay in host memory: experts behind a cache, blocks that run on the CPU."""
    host_kv: int
    repacked: int
    """Of those weights, what the CPU may keep a second copy of."""
    kv: int
    """Of all cells, wherever they are."""
    cells: int


def plan_on_gpu(config: ServerConfig, found: Survey, numbers: Numbers, device: Device, held: int) -> OnGpu | None:
    """The plan, or None where nothing of the model goes on the GPU. `held`: bytes of it that loaded models would give
    up. Raises MemoryError where flags ask for what it cannot hold."""
    free = device.total if device.free is None else min(device.total, device.free + held)
    budget, _ = budget_of(config, free)
    cached, config = plan_prompts(found, numbers, config, budget)
    chosen = fit(found, numbers, config, budget) if cached is None else cached.fit
    if chosen.on_gpu == 0:
        return None
    c = config.context
    attentions = [block.attention for block in found.model.blocks]
    kv = kv_bytes(attentions, chosen.n_cells, c.type_k, c.type_v)
    host_kv = kv_bytes(attentions[: chosen.first], chosen.n_cells, c.type_k, c.type_v)
    blocks = _on_cpu(found, chosen)
    pool = 0
    if cached is not None:  # the bank holds every expert, also those in the cache
        pool = sum(aligned(t.info.nbytes) for t in found.tensors.values() if t.use is Use.EXPERTS)
        embedding = embedding_in_host_memory(found, config)
        pool += 0 if embedding is None else aligned(embedding.info.nbytes)
    return OnGpu(device.id, chosen.parts.total, blocks + pool, host_kv, blocks, kv, chosen.n_cells)


def _on_cpu(found: Survey, chosen: Fit) -> int:
    """Bytes of the blocks before the first one on the GPU, and of the embedding where there are any."""
    if chosen.first == 0:
        return 0
    own = sum(aligned(t.info.nbytes) for t in found.tensors.values() if 0 <= t.layer < chosen.first)
    return own + found.outside(embedding=True, head=False)


def fits_beside(config: ServerConfig, device: int, free: int | None) -> bool:
    """Whether `device` bytes are there for a model without another one going. `free` None: nobody can say how much is,
    and models take turns unless --vram-budget shares the GPU out."""
    if free is None:
        return config.placement.vram_budget is not None
    return device <= budget_of(config, free)[0]
