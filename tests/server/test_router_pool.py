"""Models on demand without models: which are unloaded, who waits, what memory allows. Engines here only pretend.

The rules are llama-server's router's (idle ones go, least recently used first; waiters in order; busy ones stay) and
Ollama's keep-alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ftgguf.engine.messages import Loading
from ftgguf.server.errors import ApiError, server_error
from ftgguf.server.models_catalog import Source
from ftgguf.server.models_instance import Started
from ftgguf.server.models_memory import GIB, OVERHEAD, Memory, Need, with_layout
from ftgguf.server.models_pool import Pool


class FakeEngine:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.state = "loading"
        self.loading = Loading(stage="weights", fraction=0.5)

        self.refused: asyncio.Event = asyncio.Event()
        self.reason = ""

    def refuse(self, reason: str = "") -> None:
        self.reason = reason
        self.refused.set()

    async def start(self) -> None:
        self.world.log.append(f"+{self.name}")
        self.world.alive.add(self.name)
        self.world.most = max(self.world.most, sum(self.world.sizes[each] for each in self.world.alive))

    async def stop(self) -> None:
        await asyncio.sleep(0)
        self.state = "stopped"
        self.world.alive.discard(self.name)
        self.world.log.append(f"-{self.name}")

    async def wait_ready(self) -> None:
        await asyncio.sleep(self.world.load_s)
        if self.name in self.world.broken:
            raise server_error("the file is damaged")
        self.state = "ready"

    async def wait_progress(self) -> Loading:
        await self.wait_ready()
        return self.loading


@dataclass
class Plan:
    world: World
    name: str
    context: int
    need: Need

    def fits_gpu(self, free: int | None) -> bool:
        assert free is not None
        return self.need.device <= free

    async def start(self, room: int) -> Started:
        engine = FakeEngine(self.world, self.name)
        n_ctx = max(512, self.context)
        gpu, device = (self.need.gpu, self.need.device) if self.name not in self.world.on_cpu else ("", 0)

        async def app(scope: Any, receive: Any, send: Any) -> None: ...

        return Started(
            engine,
            lambda: app,
            lambda: n_ctx,
            dict,
            self.need.total,
            lambda: None,
            lambda: device,
            8192,
            gpu=lambda: gpu,
        )


@dataclass
class World:
    """A machine with `total` bytes for models."""

    sizes: dict[str, int]
    total: int = 1 << 40
    load_s: float = 0.0
    broken: set[str] = field(default_factory=set)
    log: list[str] = field(default_factory=list)
    alive: set[str] = field(default_factory=set)
    most: int = 0
    vram: dict[str, tuple[str, int]] = field(default_factory=dict)
    """The GPU of each model that is to have one, and its bytes there."""
    cards: dict[str, int] = field(default_factory=dict)
    """Bytes of each GPU."""
    on_cpu: set[str] = field(default_factory=set)
    """Models whose engine takes the CPU although a GPU was planned."""
    held: list[dict[str, int]] = field(default_factory=list)
    """What each `prepare` was told of the GPUs."""

    async def prepare(self, source: Source, context: int, held: Mapping[str, int]) -> Plan:
        await asyncio.sleep(0)
        self.held.append(dict(held))
        gpu, device = self.vram.get(source.name, ("", 0))
        host = self.sizes[source.name] - OVERHEAD
        return Plan(self, source.name, context, Need(host, 0, gpu=gpu, device=device, on_cpu=host + OVERHEAD + device))

    def gpu_free(self, name: str) -> int:
        return self.cards[name] - sum(self.vram[m][1] for m in self.alive if self.vram.get(m, ("",))[0] == name)

    def available(self) -> int:
        return self.total - sum(self.sizes[name] for name in self.alive)

    def pool(self, most: int = 4, keep_alive: float = -1) -> Pool:
        memory = Memory(self.available, lambda: self.total, gpu_free=self.gpu_free)
        return Pool(self.prepare, most, keep_alive, memory)


def source(name: str) -> Source:
    return Source(name, "cache", ("-m", name))


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 20))


async def use(pool: Pool, name: str, seconds: float = 0.0, **options: Any) -> None:
    async with pool.lease(source(name), **options) as (instance, _):
        assert instance.name == name
        assert instance.ready
        await asyncio.sleep(seconds)


def test_least_recently_used_goes() -> None:
    async def body() -> None:
        world = World(dict.fromkeys("abc", GIB))
        pool = world.pool(most=2)
        for name in "abac":
            await use(pool, name)
        assert world.log == ["+a", "+b", "-b", "+c"]
        assert [each.name for each in pool.loaded()] == ["c", "a"]

    run(body)


def test_busy_ones_stay_and_waiters_keep_their_order() -> None:
    async def body() -> None:
        world = World(dict.fromkeys("abcd", GIB))
        pool = world.pool(most=1)
        order: list[str] = []

        async def ask(name: str, seconds: float) -> None:
            await use(pool, name, seconds)
            order.append(name)

        tasks = []
        for name in "abcd":
            tasks.append(asyncio.create_task(ask(name, 0.05)))
            await asyncio.sleep(0.005)
        assert world.alive == {"a"}
        await use(pool, "a")  # what is loaded answers although others wait
        await asyncio.gather(*tasks)
        assert order == ["a", "b", "c", "d"]
        assert world.log == ["+a", "-a", "+b", "-b", "+c", "-c", "+d"]

    run(body)


def test_many_requests_load_a_model_once() -> None:
    async def body() -> None:
        world = World({"a": GIB}, load_s=0.05)
        pool = world.pool()
        await asyncio.gather(*(use(pool, "a") for _ in range(20)))
        assert world.log == ["+a"]

    run(body)


def test_memory_is_never_exceeded() -> None:
    """Two models that do not fit together are never alive together, whoever asks when."""

    async def body() -> None:
        world = World({"a": 6 * GIB, "b": 5 * GIB, "c": 3 * GIB}, total=10 * GIB)
        pool = world.pool(most=0)
        await asyncio.gather(*(use(pool, name, 0.002) for name in "abcabccbabacab"))
        assert world.most <= world.total
        await use(pool, "a")
        await use(pool, "c")
        assert world.alive == {"a", "c"}

    run(body)


def test_mapped_pages_of_others_count() -> None:
    """The system calls mapped weights available; what was granted counts all the same."""

    async def body() -> None:
        world = World({"a": 6 * GIB, "b": 6 * GIB}, total=10 * GIB)
        pool = Pool(world.prepare, 4, -1, Memory(lambda: 10 * GIB, lambda: 10 * GIB))
        await use(pool, "a")
        await use(pool, "b")
        assert world.log == ["+a", "-a", "+b"]

    run(body)


@pytest.mark.parametrize(
    ("a", "b", "log"),
    [
        (("CUDA0", 6), ("CUDA0", 6), "+a -a +b"),  # an expert cache takes all there is
        (("CUDA0", 4), ("CUDA0", 6), "+a +b"),  # two that fit, or that --vram-budget shares it out to
        (("CUDA0", 6), ("CUDA1", 6), "+a +b"),  # each its own
        (("CUDA0", 6), ("", 0), "+a +b"),
    ],
)
def test_models_on_a_gpu_go_for_what_another_needs_of_it(a: tuple[str, int], b: tuple[str, int], log: str) -> None:
    """GPUs of 10 GiB; host memory is ample. The plan of the second is told what the first holds."""

    async def body() -> None:
        vram = {"a": (a[0], a[1] * GIB), "b": (b[0], b[1] * GIB)}
        world = World(dict.fromkeys("ab", GIB), vram=vram, cards={"CUDA0": 10 * GIB, "CUDA1": 10 * GIB})
        pool = world.pool()
        await use(pool, "a")
        await use(pool, "b")
        assert " ".join(world.log) == log
        assert world.held == [{}, {a[0]: a[1] * GIB}]

    run(body)


def test_a_driver_that_is_slow_to_free_costs_no_second_model() -> None:
    """Three models share a GPU; for a fourth the oldest goes, and no other, although the driver still counts it."""

    async def body() -> None:
        vram = dict.fromkeys("abcd", ("CUDA0", 3 * GIB))
        world = World(dict.fromkeys("abcd", GIB), vram=vram, cards={"CUDA0": 10 * GIB})
        pool = Pool(world.prepare, 0, -1, Memory(world.available, lambda: world.total, gpu_free=lambda name: slow()))
        ever: set[str] = set()

        def slow() -> int:
            ever.update(world.alive)
            return 10 * GIB - 3 * GIB * len(ever)

        for name in "abcd":
            await use(pool, name)
        assert world.log == ["+a", "+b", "+c", "-a", "+d"]

    run(body)


def test_what_lies_on_a_gpu_is_no_host_memory() -> None:
    """A host of 16 GiB. Three models of 8 GiB each on the GPU and one on the CPU are there at once; for another of the
    CPU its own kind goes and not one of the GPU, however long ago that was used."""

    async def body() -> None:
        vram = dict.fromkeys("abc", ("CUDA0", 8 * GIB))
        sizes = dict.fromkeys("abc", GIB) | {"cpu": 9 * GIB, "other": 10 * GIB}
        world = World(sizes, total=16 * GIB, vram=vram, cards={"CUDA0": 40 * GIB})
        pool = world.pool(most=0)
        for name in ("a", "b", "c", "cpu"):
            await use(pool, name)
        assert world.alive == {"a", "b", "c", "cpu"}
        await use(pool, "other")
        assert world.log[-2:] == ["-cpu", "+other"]
        assert world.alive == {"a", "b", "c", "other"}

    run(body)


def test_a_model_that_ends_up_on_the_cpu_counts_there() -> None:
    """Planned for the GPU; its engine chose the CPU (a program took the memory in between)."""

    async def body() -> None:
        vram = {"a": ("CUDA0", 8 * GIB)}
        world = World({"a": GIB, "b": 4 * GIB}, vram=vram, cards={"CUDA0": 40 * GIB}, on_cpu={"a"})
        pool = Pool(world.prepare, 0, -1, Memory(lambda: 10 * GIB, lambda: 10 * GIB, gpu_free=world.gpu_free))
        await use(pool, "a")
        await use(pool, "b")
        assert world.log == ["+a", "-a", "+b"]

    run(body)


def test_too_large_is_refused_with_the_numbers() -> None:
    async def body() -> None:
        world = World({"a": 2 * GIB, "big": 20 * GIB}, total=8 * GIB)
        pool = world.pool()
        with pytest.raises(ApiError, match=r"'big' needs 20.00 GiB and 8.00 GiB of 8.00 GiB are free") as error:
            await use(pool, "big")
        assert error.value.code == 503
        assert pool.loaded() == []
        await use(pool, "a")

    run(body)


def test_keep_alive() -> None:
    """After the last request; 0 at once, negative never; a request's own holds until the model goes."""

    async def body() -> None:
        world = World(dict.fromkeys("abc", GIB))
        pool = world.pool(keep_alive=0.05)
        await use(pool, "a")
        await use(pool, "b", keep_alive=-1)
        await use(pool, "c", keep_alive=0)
        await asyncio.sleep(0.02)
        assert world.alive == {"a", "b"}
        await use(pool, "a")
        await asyncio.sleep(0.03)
        assert world.alive == {"a", "b"}
        await asyncio.sleep(0.06)
        assert world.alive == {"b"}
        assert (pool.loaded()[0].expires(), pool.loaded()[0].status) == (None, "loaded")

    run(body)


def test_unload_waits_for_the_requests() -> None:
    async def body() -> None:
        world = World({"a": GIB})
        pool = world.pool()
        task = asyncio.create_task(use(pool, "a", 0.05))
        await asyncio.sleep(0.02)
        assert await pool.unload("a", wait=False)
        assert world.alive == {"a"}
        await task
        assert await pool.unload("a") in (True, False)
        assert world.alive == set()
        assert not await pool.unload("a")
        assert not await pool.unload("never")

    run(body)


def test_unload_ends_requests_after_the_stop_timeout() -> None:
    """llama-server's `stop-timeout`: /models/unload (`cut`) waits so long for requests; Ollama's stop for ever."""

    async def body() -> None:
        world = World({"a": GIB})
        pool = world.pool()
        slow = replace(source("a"), stop_timeout=0.05)
        engines: list[Any] = []

        async def endless() -> None:
            async with pool.lease(slow) as (instance, _):
                assert instance.started is not None
                engines.append(instance.started.engine)
                await engines[-1].refused.wait()

        task = asyncio.create_task(endless())
        while not engines:
            await asyncio.sleep(0.01)
        assert await pool.unload("a", wait=False)
        await asyncio.sleep(0.2)
        assert world.alive == {"a"}  # without `cut` it waits
        assert await pool.unload("a", wait=False, cut=True)
        await task
        assert engines[0].reason == "the model was unloaded"
        while world.alive:
            await asyncio.sleep(0.01)
        # a model that was loaded again meanwhile is another one, and left alone
        async with pool.lease(slow) as (instance, _):
            await asyncio.sleep(0.2)
            assert instance.started is not None
            assert not instance.started.engine.refused.is_set()  # type: ignore[attr-defined]

    run(body)


def test_failures_are_told_and_can_be_tried_again() -> None:
    async def body() -> None:
        world = World({"a": GIB}, broken={"a"})
        pool = world.pool()
        results = await asyncio.gather(*(use(pool, "a") for _ in range(3)), return_exceptions=True)
        assert all(
            isinstance(each, ApiError) and "failed to load: the file is damaged" in each.message for each in results
        )
        assert pool.known("a").failure  # type: ignore[union-attr]
        world.broken.clear()
        await use(pool, "a")
        assert world.alive == {"a"}

    run(body)


def test_nobody_left_nothing_loaded() -> None:
    """Requests that leave the queue before their turn load nothing."""

    async def body() -> None:
        world = World(dict.fromkeys("ab", GIB))
        pool = world.pool(most=1)
        first = asyncio.create_task(use(pool, "a", 0.05))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(use(pool, "b"))
        third = asyncio.create_task(use(pool, "b"))
        await asyncio.sleep(0.01)
        second.cancel()
        third.cancel()
        await first
        await asyncio.sleep(0.02)
        assert world.log == ["+a"]
        assert [each.name for each in pool.loaded()] == ["a"]

    run(body)


def test_a_larger_context_loads_again() -> None:
    async def body() -> None:
        world = World({"a": GIB})
        pool = world.pool()
        await use(pool, "a", context=256)
        await use(pool, "a", context=4096)
        await use(pool, "a", context=1024)
        assert world.log == ["+a", "-a", "+a"]
        for _ in range(2):  # more than the model can have: as much as it can, once
            await use(pool, "a", context=100_000)
        assert world.log == ["+a", "-a", "+a", "-a", "+a"]

    run(body)


def test_no_autoload() -> None:
    async def body() -> None:
        pool = World({"a": GIB}).pool()
        with pytest.raises(ApiError, match="model is not loaded") as error:
            await use(pool, "a", autoload=False)
        assert error.value.code == 400
        await pool.load(source("a"))
        await use(pool, "a", autoload=False)

    run(body)


def test_events() -> None:
    """What /models/sse sends: loading, loaded, unloaded."""

    async def body() -> None:
        pool = World({"a": GIB}).pool()
        events = pool.events()
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        await use(pool, "a")
        await pool.unload("a")
        seen = [await waiting]
        while seen[-1]["data"]["status"] != "unloaded":
            seen.append(await anext(events))
        assert [event["data"]["status"] for event in seen] == ["loading", "loading", "loaded", "unloaded"]
        assert seen[1]["data"]["progress"] == {"stage": "weights", "value": 0.5}
        assert all(event["event"] == "status_change" and event["model"] == "a" for event in seen)

    run(body)


def test_the_second_layout_only_where_it_fits() -> None:
    """The engine would take it by what is available, mapped weights of others included."""
    from ftgguf.flags.config import ServerConfig

    need = Need(4 * GIB, GIB, 4 * GIB)
    config, granted = with_layout(ServerConfig(), need, 20 * GIB)
    assert (config.placement.weights_layout, granted) == ("auto", need.total + need.packed)
    config, granted = with_layout(ServerConfig(), need, 9 * GIB)
    assert (config.placement.weights_layout, granted) == ("plain", need.total)
