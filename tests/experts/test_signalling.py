"""The layers of `bench/signalling.py` run under the interpreter: every layer's message is answered, or none is sent."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch", reason="the GPU path needs torch")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the GPU path needs triton")

from ftgguf.bench.signalling import Layers, Signal  # noqa: E402


def test_each_layer_is_answered_once() -> None:
    layers = Layers(torch.device("cuda" if torch.cuda.is_available() else "cpu"), [-1, -1], 3)
    try:
        layers.ask(0)
        layers.run()
        assert layers.work() == (0, 0.0)
        layers.share.fill_(7.0)
        layers.ask(1)
        layers.run()
        assert float(layers.share.abs().sum()) == 0.0, "weights of zero bytes"
        jobs, seconds = layers.work()
        assert jobs == 3
        assert seconds > 0
    finally:
        layers.close()


def test_the_cost_is_what_is_left() -> None:
    assert Signal(kernels=2.0, asked=12.0, work=4.0).cost == 6.0
