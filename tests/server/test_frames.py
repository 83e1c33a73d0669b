"""Frames of the engine's socket, in whatever pieces the bytes come."""

from __future__ import annotations

import asyncio
import socket
import struct

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ftgguf.server.frames import MAX_FRAME, FrameLink


def received(data: bytes, cuts: list[int]) -> tuple[list[bytes], bool]:
    """What is delivered of `data`, sent in pieces of these lengths again and again; and whether the link was closed."""

    async def run() -> tuple[list[bytes], bool]:
        found: list[bytes] = []
        link = FrameLink(lambda payload: found.append(bytes(payload)))
        ours, theirs = socket.socketpair()
        with theirs:
            transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
            at = turn = 0
            while at < len(data):
                size = cuts[turn % len(cuts)]
                link.data_received(data[at : at + size])
                at, turn = at + size, turn + 1
            closing = transport.is_closing()
            link.close()
            await link.closed
        return found, closing

    return asyncio.run(run())


@given(frames=st.lists(st.binary(max_size=40), max_size=8), cuts=st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_any_cut_gives_the_same_frames(frames: list[bytes], cuts: list[int]) -> None:
    data = b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)
    assert received(data, cuts) == (frames, False)


def test_half_a_frame_is_kept_back() -> None:
    assert received(struct.pack("<I", 5) + b"abc", [4]) == ([], False)


def test_a_length_that_cannot_be_closes_the_link() -> None:
    assert received(struct.pack("<I", MAX_FRAME + 1) + b"x", [99]) == ([], True)
    assert received(struct.pack("<I", MAX_FRAME + 1) + b"x", [2]) == ([], True)


def test_a_malformed_message_closes_the_link() -> None:
    async def run() -> bool:
        ours, theirs = socket.socketpair()

        def deliver(payload: memoryview) -> None:
            msgspec.msgpack.decode(payload)

        with theirs:
            link = await FrameLink.open(ours, deliver)
            theirs.sendall(struct.pack("<I", 1) + b"\xc1")
            await asyncio.wait_for(link.closed, 10)
        return True

    assert asyncio.run(run())
