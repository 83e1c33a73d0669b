"""`until_gone`: work that ends with its client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from ftgguf.server.sse import Disconnected, EventStream, until_gone


class Client:
    """The receiving side of a request whose body was read; `leave` ends it."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)


def test_work_that_ends_in_time_gives_its_result() -> None:
    async def run() -> None:
        client = Client()

        async def work() -> int:
            await asyncio.sleep(0)
            return 7

        assert await until_gone(client.receive, work()) == 7
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1  # nobody watches any more

    asyncio.run(run())


def test_errors_of_the_work_come_through() -> None:
    async def run() -> None:
        async def work() -> None:
            await asyncio.sleep(0)
            raise KeyError("x")

        with pytest.raises(KeyError):
            await until_gone(Client().receive, work())

    asyncio.run(run())


def test_a_client_that_leaves_ends_the_work() -> None:
    """The work is cancelled, the task goes on as if nobody had ever cancelled it."""

    async def run() -> None:
        client = Client()
        ended = []

        async def work() -> None:
            try:
                client.left.set()
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        with pytest.raises(Disconnected):
            await until_gone(client.receive, work())
        assert ended == [True]
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0)

    asyncio.run(run())


def test_a_client_that_had_left_before() -> None:
    async def run() -> None:
        client = Client()
        client.left.set()
        with pytest.raises(Disconnected):
            await until_gone(client.receive, asyncio.Event().wait())

    asyncio.run(run())


def test_somebody_elses_cancel_stays_one() -> None:
    """A server that shuts down cancels the request's task: that is no client that left."""

    async def run() -> None:
        async def request() -> None:
            await until_gone(Client().receive, asyncio.Event().wait())

        task = asyncio.create_task(request())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_both_at_once_is_a_cancel() -> None:
    async def run() -> None:
        client = Client()

        async def request() -> None:
            await until_gone(client.receive, asyncio.Event().wait())

        task = asyncio.create_task(request())
        await asyncio.sleep(0)
        client.left.set()
        task.cancel()
        with pytest.raises((asyncio.CancelledError, Disconnected)):
            await task

    asyncio.run(run())


def test_a_stream_ends_with_its_client() -> None:
    """The content is closed at once, and leaving is no error of the response."""

    async def run() -> None:
        client = Client()
        closed = []

        async def content() -> Any:
            try:
                yield b"one"
                client.left.set()
                await asyncio.Event().wait()
            finally:
                closed.append(True)

        await EventStream(content())({"type": "http"}, client.receive, client.send)
        assert closed == [True]
        assert [message.get("body") for message in client.sent] == [None, b"one"]

    asyncio.run(run())


def test_a_whole_stream() -> None:
    async def run() -> None:
        client = Client()

        async def content() -> Any:
            yield b"one"
            yield b""
            yield b"two"

        await EventStream(content())({"type": "http"}, client.receive, client.send)
        assert [message.get("body") for message in client.sent] == [None, b"one", b"two", b""]

    asyncio.run(run())
