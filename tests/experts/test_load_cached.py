"""When experts are cached, by arithmetic: the sums are checked against the survey's own parts."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compat.synth import make
from ftgguf.engine import load_cached
from ftgguf.engine.fit import MIB, fit, parts_of, workspace_bytes
from ftgguf.engine.load_cached import plan_cache, plan_prompts
from ftgguf.engine.survey import Survey, aligned, survey
from ftgguf.flags.config import ContextConfig, PlacementConfig, ServerConfig
from ftgguf.flags.special import EXPERTS, layer_overrides
from ftgguf.gguf.reader import open_gguf
from ftgguf.models.config import Numbers, read_numbers
from ftgguf.models.source import Use

CONTEXT = 256 * MIB


@functools.cache
def small_model() -> tuple[Survey, Numbers]:
    with tempfile.TemporaryDirectory() as folder:
        gguf = open_gguf(make("qwen3moe", Path(folder) / "m.gguf", types="Q8_0", n_layer=4, n_expert=64))
        numbers = read_numbers(gguf)
        return survey(gguf, numbers, ContextConfig()), numbers


@pytest.fixture
def model() -> tuple[Survey, Numbers]:
    return small_model()


def config(**placement: Any) -> ServerConfig:
    base = ServerConfig()
    context = replace(base.context, size=2048)
    return replace(base, context=context, placement=replace(PlacementConfig(), **placement))


def fixed(found: Survey, c: ServerConfig) -> int:
    """Bytes of everything but experts, as beside a cache."""
    return parts_of(found, 0, 2048, c, CONTEXT, cached=True).total


def test_what_does_not_fit_is_cached_in_what_is_left(
    model: tuple[Survey, Numbers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_cached, "GRAPHS", MIB)  # the model is small
    found, numbers = model
    c = config()
    whole = parts_of(found, 0, 2048, c, CONTEXT)
    assert plan_cache(found, numbers, c, whole.total, CONTEXT) is None
    # a cache leaves the embedding in host memory and captures no wide pass: it needs less besides
    assert fixed(found, c) + 6 * MIB < whole.total
    plan = plan_cache(found, numbers, c, fixed(found, c) + 6 * MIB, CONTEXT)
    assert plan is not None
    assert plan.budget == 5 * MIB
    assert plan.fit.first == 0
    assert plan.mode == "hybrid"
    # not even the rest fits: the model is split by layers as before
    assert plan_cache(found, numbers, c, fixed(found, c), CONTEXT) is None


def test_prompts_go_in_wide_passes_where_nobody_said_otherwise(model: tuple[Survey, Numbers]) -> None:
    """Each pass reads the experts over the link: 2048 rows (-b) instead of 512. Not where -ub is given, where the
    workspace would take more than a sixth, where the rest would not fit, or without a cache."""
    found, numbers = model
    budget = 4096 * MIB
    c = config(moe_mode="offload")
    plan, wide = plan_prompts(found, numbers, c, budget, CONTEXT)
    assert plan is not None
    assert (wide.context.n_ubatch, wide.context.n_batch) == (2048, 2048)
    assert plan.fit.parts.workspace == workspace_bytes(found, 2048, cached=True)
    assert "passes of 2048 rows instead of 512" in plan.fit.lines[-1]
    said = replace(c, given=frozenset({"context.n_ubatch"}))
    assert plan_prompts(found, numbers, said, budget, CONTEXT)[1] is said
    little = 6 * workspace_bytes(found, 2048, cached=True) - 1
    plan, same = plan_prompts(found, numbers, c, little, CONTEXT)
    assert (plan is not None, same is c) == (True, True)
    resident = config()
    assert plan_prompts(found, numbers, resident, 1 << 40, CONTEXT) == (None, resident)


@pytest.mark.parametrize(
    ("options", "budget", "mode"),
    [
        ({"moe_mode": "offload"}, None, "offload"),
        ({"moe_mode": "cpu"}, 0, "cpu"),
        ({"moe_mode": "hybrid", "expert_cache": 3}, 3, "hybrid"),
        ({"expert_cache": 3}, 3, "hybrid"),
        ({"overrides": layer_overrides(2, EXPERTS)}, None, "hybrid"),
        ({"overrides": layer_overrides(4, EXPERTS), "expert_cache": 0}, 0, "hybrid"),
    ],
)
def test_modes_and_limits(model: tuple[Survey, Numbers], options: Any, budget: int | None, mode: str) -> None:
    """Asked for with memory for everything: the cache may hold all."""
    found, numbers = model
    plan = plan_cache(found, numbers, config(**options), 1 << 40, CONTEXT)
    assert plan is not None
    assert plan.mode == mode
    if budget is None:
        assert plan.budget >= parts_of(found, 0, 2048, config(), CONTEXT).experts
    else:
        assert plan.budget == budget * MIB


@pytest.mark.parametrize(
    "options",
    [{"moe_mode": "resident"}, {"gpu_layers": 2}, {"overrides": layer_overrides(2, EXPERTS), "expert_cache": 0}],
)
def test_no_cache_where_none_is_wanted(model: tuple[Survey, Numbers], options: Any) -> None:
    found, numbers = model
    assert plan_cache(found, numbers, config(**options), 300 * MIB, CONTEXT) is None


def test_a_mode_that_cannot_work_is_refused_with_the_numbers(model: tuple[Survey, Numbers]) -> None:
    found, numbers = model
    with pytest.raises(MemoryError, match="without its experts does not fit"):
        plan_cache(found, numbers, config(moe_mode="offload"), 100 * MIB, CONTEXT)


@given(
    before=st.integers(0, 200_000),
    context=st.integers(1, 500),
    others=st.integers(-100_000, 100_000),
    cache=st.integers(0, 40),
)
def test_a_budget_that_holds_alone_holds_beside_other_programs(
    before: int, context: int, others: int, cache: int
) -> None:
    """Whatever others take or give while the context is made: a budget that is made with the plan's own context, the
    most that is counted for one, caches at least what it was made for."""
    pytest.importorskip("torch", reason="the GPU path needs torch")
    from ftgguf.engine.device_memory import context_bytes

    found, numbers = small_model()
    c = config()
    parts = parts_of(found, 0, 2048, c)
    budget = parts.total - parts.experts + load_cached.GRAPHS + cache * MIB
    overhead = context_bytes(before * MIB, (before - context - others) * MIB)
    plan = plan_cache(found, numbers, c, budget, overhead)
    if plan is None:  # everything fits: that is more than was asked for
        assert fit(found, numbers, c, budget, overhead).first == 0
        assert parts_of(found, 0, 2048, c, overhead).total <= budget
    else:
        assert plan.budget >= min(cache * MIB, parts.experts)
        assert plan.fit.parts.total + load_cached.GRAPHS <= budget


def test_the_embedding_stays_in_host_memory_where_nothing_else_reads_it(tmp_path: Path) -> None:
    """Against the tensor's bytes in the file. Not where the head is tied to it, where pinned memory is bounded, or
    without a cache."""
    gguf = open_gguf(make("qwen3moe", tmp_path / "m.gguf", types="Q8_0", n_layer=1, n_expert=8))
    numbers = read_numbers(gguf)
    found = survey(gguf, numbers, ContextConfig())
    size = aligned(gguf.tensors["token_embd.weight"].nbytes)
    bounded = config(pin_budget=1)
    for c, off in ((config(), size), (bounded, 0)):
        whole, beside = (parts_of(found, 0, 2048, c, CONTEXT, cached=cached) for cached in (False, True))
        assert whole.weights - beside.weights == off
    tied = replace(found, uses=found.uses | {"token_embd.weight": {Use.EMBEDDING, Use.LINEAR}})
    assert tied.lone_embedding() is None
