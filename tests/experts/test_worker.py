"""The CPU expert worker against ggml's own graph of the same experts (`mul_mat_id`, as the CPU executor runs them).

Both call the same integer products, so only the order of float sums differs; where ggml's activation goes through a
table of half-precision values (gelu), the bound is that table's.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from compat.blocks import LAYOUTS, random_tensor
from ftgguf import _ggml_cpu as native  # type: ignore[attr-defined]
from ftgguf.gguf.types import TensorType
from ftgguf.layers.params import Experts, Linear
from ftgguf.ops.ggml import GgmlOps, GgmlWeight, Inputs

EXPERTS, K, ROWS, D, F = 6, 3, 5, 512, 256


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    return float(((got - want) ** 2).sum() / (want**2).sum())


@dataclass
class Made:
    """Random experts: raw bytes for the worker, and parameters for ggml's graph."""

    worker: Any
    weights: Any
    params: Experts
    keep: list[np.ndarray]


def make(kinds: dict[str, str], activation: str, *, fused: bool = False, bias: bool = False, scale: bool = False,
         threads: int = 2, experts: int = EXPERTS) -> Made:  # fmt: skip
    """`kinds`: tensor type of gate (absent: none), up and down."""
    rng = np.random.default_rng(7)
    backend = native.Backend(2)
    weights = native.Weights(backend, 32)
    keep: list[np.ndarray] = []
    params: dict[str, Linear] = {}
    matrices: dict[str, Any] = {}
    shapes = {"gate": (F, D), "up": (F, D), "down": (D, F)}
    if fused:
        shapes = {"gate_up": (2 * F, D), "down": (D, F)}

    def vector(name: str, values: np.ndarray) -> Any:
        keep.append(values)
        return GgmlWeight(weights.owned(name, 0, list(reversed(values.shape)), values.reshape(-1).view(np.uint8)))

    for name, (n, k) in shapes.items():
        if name not in kinds:
            continue
        kind = kinds[name]
        data = np.ascontiguousarray(random_tensor(kind, (experts, n, k), k**-0.5, rng)).reshape(-1).view(np.uint8)
        keep.append(data)
        id_ = LAYOUTS[kind].id
        b = rng.standard_normal((experts, n)).astype(np.float32) if bias else None
        s = (1 + 0.2 * rng.standard_normal(experts)).astype(np.float32) if scale else None
        params[name] = Linear(
            GgmlWeight(weights.owned(name, id_, [k, n, experts], data)),
            None if b is None else vector(name + ".bias", b),
            None if s is None else vector(name + ".scale", s),
        )
        stride, row = data.nbytes // experts, data.nbytes // experts // n
        for half, part in enumerate(["gate", "up"] if name == "gate_up" else [name]):
            rows = n // 2 if name == "gate_up" else n
            own_bias = None if b is None else np.ascontiguousarray(b[:, half * rows : half * rows + rows])
            keep += [a for a in (own_bias, s) if a is not None]
            matrices[part] = native.ExpertMatrix.make(
                id_, data.ctypes.data + half * rows * row, stride, rows, k,
                0 if own_bias is None else own_bias.ctypes.data, 0 if s is None else s.ctypes.data,
            )  # fmt: skip
    worker = native.ExpertWorker([-1] * threads)
    worker.add_layer(3, experts, activation, matrices.get("gate"), matrices["up"], matrices["down"])
    return Made(worker, weights, Experts(activation=activation, **params), [*keep, backend])  # type: ignore[list-item]


def graph(made: Made, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """ggml's answer."""
    backend = made.keep[-1]
    arena = native.Arena(backend)
    g = native.Graph(arena, 256)
    tx = g.input("x", 0, [x.shape[1], len(x)])
    ti = g.input("ids", int(TensorType.I32), [ids.shape[1], len(x)])
    tw = g.input("w", 0, [ids.shape[1], len(x)])
    inputs = Inputs(token=None, position=None, cell=None, outputs=None, masks={})
    ops = GgmlOps(g, inputs, None, 0, len(x), 0, None)  # type: ignore[arg-type]
    out = ops.experts(tx, ti, tw, made.params)
    g.output(out)
    g.place()
    for t, v in ((tx, x), (ti, ids), (tw, weights)):
        g.set(t, np.ascontiguousarray(v))
    g.compute()
    return np.array(g.values(out))


def listed(ids: np.ndarray, chosen: set[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The CPU's list for the `chosen` experts: (expert, start, rows_of)."""
    flat = ids.reshape(-1)
    expert = [e for e in range(int(flat.max()) + 1) if e in chosen and (flat == e).any()]
    groups = [np.flatnonzero(flat == e) for e in expert]
    start = np.concatenate(([0], np.cumsum([len(g) for g in groups])))
    rows = np.concatenate(groups) if groups else np.empty(0)
    return np.array(expert, np.int32), start.astype(np.int32), rows.astype(np.int32)


def share(made: Made, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, chosen: set[int]) -> np.ndarray:
    y = np.full_like(x, np.nan)
    made.worker.compute(3, x, weights, *listed(ids, chosen), y)
    return y


def routed(rows: int = ROWS, experts: int = EXPERTS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((rows, D)).astype(np.float32)
    ids = np.stack([rng.permutation(experts)[:K] for _ in range(rows)]).astype(np.int32)
    return x, ids, rng.random((rows, K)).astype(np.float32)


TYPES = ["F32", "F16", "Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XS", "IQ4_XS", "MXFP4"]


@pytest.mark.parametrize("kind", TYPES)
def test_equals_ggmls_graph_by_type(kind: str) -> None:
    made = make(dict.fromkeys(("gate", "up", "down"), kind), "silu")
    x, ids, w = routed()
    assert nmse(share(made, x, ids, w, set(range(EXPERTS))), graph(made, x, ids, w)) < 1e-9


@pytest.mark.parametrize(
    ("activation", "kinds", "options", "bound"),
    [
        ("silu", {"gate": "Q4_K", "up": "Q8_0", "down": "Q6_K"}, {}, 1e-9),
        ("silu", {"gate_up": "Q4_K", "down": "Q5_0"}, {"fused": True}, 1e-9),
        ("swiglu_oai", {"gate": "MXFP4", "up": "MXFP4", "down": "MXFP4"}, {"bias": True}, 1e-9),
        ("silu", {"gate_up": "Q8_0", "down": "Q8_0"}, {"fused": True, "bias": True}, 1e-9),
        ("silu", {"gate": "Q8_0", "up": "Q8_0", "down": "Q8_0"}, {"scale": True}, 1e-9),
        ("relu_sqr", {"up": "Q4_K", "down": "Q6_K"}, {}, 1e-9),
        ("relu", {"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K"}, {}, 1e-9),
        ("gelu", {"gate": "Q8_0", "up": "Q8_0", "down": "Q8_0"}, {}, 1e-5),
    ],
)
def test_equals_ggmls_graph_by_structure(
    activation: str, kinds: dict[str, str], options: dict[str, bool], bound: float
) -> None:
    made = make(kinds, activation, **options)
    x, ids, w = routed()
    assert nmse(share(made, x, ids, w, set(range(EXPERTS))), graph(made, x, ids, w)) < bound


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_shares_add_up_whatever_the_split(threads: int) -> None:
    """Every expert runs once: two lists that part the experts give the whole; an empty list gives zeros."""
    made = make({"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K"}, "silu", threads=threads)
    x, ids, w = routed()
    whole = share(made, x, ids, w, set(range(EXPERTS)))
    for chosen in ({0}, {1, 4}, {0, 2, 3}):
        rest = set(range(EXPERTS)) - chosen
        np.testing.assert_allclose(share(made, x, ids, w, chosen) + share(made, x, ids, w, rest), whole, atol=1e-5)
    assert not share(made, x, ids, w, set()).any()


def test_more_entries_than_work_memory_holds() -> None:
    """A prompt's worth of rows goes through in parts; each row is what it is alone."""
    made = make({"gate": "Q8_0", "up": "Q8_0", "down": "Q8_0"}, "silu")
    x, ids, w = routed(rows=1500)
    many = share(made, x, ids, w, set(range(EXPERTS)))
    at = [0, 700, 1499]
    assert nmse(many[at], share(made, x[at], ids[at], w[at], set(range(EXPERTS)))) < 1e-12


def test_lists_that_do_not_fit_are_refused() -> None:
    made = make({"up": "Q8_0", "down": "Q8_0"}, "relu_sqr")
    x, _, w = routed()
    y = np.empty_like(x)
    one, start = np.array([0], np.int32), np.array([0, 1], np.int32)
    with pytest.raises(ValueError, match="out of range"):
        made.worker.compute(3, x, w, np.array([EXPERTS], np.int32), start, one, y)
    with pytest.raises(ValueError, match="out of range"):
        made.worker.compute(3, x, w, one, start, np.array([ROWS * K], np.int32), y)
    with pytest.raises(ValueError, match="layer 4"):
        made.worker.compute(4, x, w, one, start, one, y)
    with pytest.raises(ValueError, match="start must have"):
        made.worker.compute(3, x, w, one, np.array([0, 1, 1], np.int32), one, y)


def test_threads_that_cannot_be_made_are_an_error_and_not_the_end() -> None:
    """In a process with little address space: one line with the cure, and a smaller team works."""
    code = """
import resource
from ftgguf import _ggml_cpu as native
resource.setrlimit(resource.RLIMIT_AS, (600 << 20, 600 << 20))
try:
    native.ExpertWorker([-1] * 2000)
except RuntimeError as error:
    print(error)
print(native.ExpertWorker([-1] * 2).threads)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert "lower -t, or raise the limit on processes" in lines[0]
    assert lines[-1] == "2"
