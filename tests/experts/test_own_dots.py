"""Our products on the CPU (ggml_cpu/dots.cpp) against ggml's, which the same worker uses where it is told to."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

from compat.blocks import LAYOUTS, random_tensor
from ftgguf import _ggml_cpu as native  # type: ignore[attr-defined]

EXPERTS = 3
pytestmark = pytest.mark.skipif(
    not native.has_own_dot(LAYOUTS["Q4_K"].id), reason="no AVX-512 VNNI here: both sides would be ggml's"
)
libc = ctypes.CDLL(None, use_errno=True)


def guarded(data: np.ndarray) -> tuple[mmap.mmap, int]:
    """A copy that ends where the next page may not be read, and its address."""
    size = -(-data.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    assert libc.mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    ctypes.memmove(start + size - data.nbytes, data.ctypes.data, data.nbytes)
    return memory, start + size - data.nbytes


def answers(kinds: tuple[str, str, str], d: int, f: int, rows: int, data: dict[str, np.ndarray]) -> list[np.ndarray]:
    """y of the same job with our products and with ggml's."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((rows, d)).astype(np.float32)
    weights = rng.random((rows, 2)).astype(np.float32)
    ids = np.stack([rng.permutation(EXPERTS)[:2] for _ in range(rows)]).reshape(-1)
    groups = [np.flatnonzero(ids == e) for e in range(EXPERTS)]
    start = np.cumsum([0, *(len(g) for g in groups)]).astype(np.int32)
    found = []
    for own in (True, False):
        kept, matrices = [], []
        for kind, (name, n, k) in zip(kinds, (("gate", f, d), ("up", f, d), ("down", d, f)), strict=True):
            memory, address = guarded(data[name])
            kept.append(memory)
            matrices.append(native.ExpertMatrix.make(LAYOUTS[kind].id, address, data[name].nbytes // EXPERTS, n, k))
        worker = native.ExpertWorker([-1, -1], own)
        worker.add_layer(0, EXPERTS, "silu", *matrices)
        y = np.full_like(x, np.nan)
        worker.compute(
            0, x, weights, np.arange(EXPERTS, dtype=np.int32), start, np.concatenate(groups).astype(np.int32), y
        )
        found.append(y)
        del worker
    return found


@pytest.mark.parametrize(
    ("kinds", "d", "f"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), 512, 256),
        (("Q4_K", "Q6_K", "Q4_K"), 768, 512),  # gate and up lay their input out differently
        (("Q6_K", "Q8_0", "Q4_K"), 256, 256),
        (("MXFP4", "MXFP4", "MXFP4"), 2880, 352),  # rows end within a group of four blocks
        (("MXFP4", "Q8_0", "MXFP4"), 96, 32),
    ],
)
@pytest.mark.parametrize("rows", [1, 3, 10])
def test_same_integers_as_ggml(kinds: tuple[str, str, str], d: int, f: int, rows: int) -> None:
    """Products differ by the order of float sums only (1e-11 of the energy; a wrong bit of a weight gives 1e-5)."""
    rng = np.random.default_rng(11)
    shapes = {"gate": (f, d), "up": (f, d), "down": (d, f)}
    data = {
        name: np.ascontiguousarray(random_tensor(kind, (EXPERTS, *shape), shape[1] ** -0.5, rng))
        .reshape(-1).view(np.uint8)
        for kind, (name, shape) in zip(kinds, shapes.items(), strict=True)
    }  # fmt: skip
    own, ggml = answers(kinds, d, f, rows, data)
    assert float(((own - ggml) ** 2).sum() / (ggml**2).sum()) < 1e-11


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "MXFP4"])
def test_a_row_does_not_depend_on_those_beside_it(kind: str) -> None:
    """To the bit: an expert's weights are unpacked once for up to four rows, and each is added up as if alone."""
    rng = np.random.default_rng(3)
    d, f, most = 512, 256, 9
    worker = native.ExpertWorker([-1, -1])
    kept, matrices = [], []
    for n, k in ((f, d), (f, d), (d, f)):
        kept.append(random_tensor(kind, (1, n, k), k**-0.5, rng).reshape(-1).view(np.uint8).copy())
        matrices.append(native.ExpertMatrix.make(LAYOUTS[kind].id, kept[-1].ctypes.data, 0, n, k))
    worker.add_layer(0, 1, "silu", *matrices)
    x = rng.standard_normal((most, d)).astype(np.float32)

    def computed(rows: np.ndarray) -> np.ndarray:
        y = np.full((len(rows), d), np.nan, np.float32)
        start = np.array([0, len(rows)], np.int32)
        ones, first = np.ones((len(rows), 1), np.float32), np.zeros(1, np.int32)
        worker.compute(0, x[rows], ones, first, start, np.arange(len(rows), dtype=np.int32), y)
        return y

    alone = np.concatenate([computed(np.array([i])) for i in range(most)])
    for count in range(2, most + 1):
        np.testing.assert_array_equal(computed(np.arange(count)), alone[:count])


@pytest.mark.parametrize("exponent", [0, 1, 2, 100, 135])
def test_every_power_of_two(exponent: int) -> None:
    """mxfp4's scale is a power of two alone; the smallest are subnormal."""
    rng = np.random.default_rng(exponent)
    d, f = 128, 64
    data = {
        name: random_tensor("MXFP4", (EXPERTS, n, k), 0.1, rng).reshape(-1).view(np.uint8).copy()
        for name, n, k in (("gate", f, d), ("up", f, d), ("down", d, f))
    }
    for values in data.values():
        values.reshape(-1, 17)[:, 0] = 120
    data["up"].reshape(-1, 17)[:, 0] = exponent
    own, ggml = answers(("MXFP4", "MXFP4", "MXFP4"), d, f, 1, data)
    assert np.isfinite(own).all()
    assert own == pytest.approx(ggml, rel=1e-4, abs=float(np.abs(ggml).max()) * 1e-5)


def test_every_bit_of_a_weight_counts() -> None:
    """A bit of a block changed in turn changes our answer as it changes ggml's."""
    rng = np.random.default_rng(2)
    d, f = 256, 256
    for kind in ("Q4_K", "Q6_K", "MXFP4"):
        data = {
            name: np.ascontiguousarray(random_tensor(kind, (EXPERTS, n, k), 0.06, rng)).reshape(-1).view(np.uint8)
            for name, n, k in (("gate", f, d), ("up", f, d), ("down", d, f))
        }
        size = LAYOUTS[kind].size
        scales = {"Q4_K": range(4), "Q6_K": range(208, 210), "MXFP4": range(1)}[kind]  # a bit there may make infinity
        before = answers((kind, kind, kind), d, f, 3, data)[1]
        for byte in [b for b in range(0, size, 7) if b not in scales]:
            flipped = {name: values.copy() for name, values in data.items()}
            flipped["down"].reshape(-1, size)[:, byte] ^= 1 << byte % 8
            own, ggml = answers((kind, kind, kind), d, f, 3, flipped)
            assert (ggml != before).any(), (kind, byte)
            assert float(((own - ggml) ** 2).sum() / (ggml**2).sum()) < 1e-11
