"""Synthetic routers that rounding does not change: checked against the definition, and by noise put in on purpose."""

from __future__ import annotations

import numpy as np
import pytest

from compat.routes import decided_routes


@pytest.mark.parametrize(("n_expert", "n_embd", "n_vocab"), [(128, 512, 320), (192, 64, 320), (16, 128, 40)])
def test_noise_leaves_the_chosen_experts(n_expert: int, n_embd: int, n_vocab: int) -> None:
    """Layers add to the embedding half of what it has; a twentieth of that on top changes fewer than 5 % of the tokens'
    choices, with a random router more. Every expert is somebody's."""
    values = decided_routes(2, n_expert, 4, n_embd, n_vocab)
    x = values["token_embd.weight"].astype(np.float64)
    rng = np.random.default_rng(3)
    assert np.sqrt((x**2).mean(1)) == pytest.approx(2.0, abs=1e-3)
    for layer in range(2):
        router = values[f"blk.{layer}.ffn_gate_inp.weight"]
        chosen = np.sort(np.argsort(x @ router.T, 1)[:, -4:])
        assert set(chosen.ravel()) == set(range(n_expert)), "classes times 4 are fewer than the experts"
        later = x + rng.standard_normal(x.shape)
        noisy = later + 0.05 * rng.standard_normal(x.shape)
        a, b = (np.sort(np.argsort(v @ router.T, 1)[:, -4:]) for v in (later, noisy))
        assert (a != b).any(1).mean() < 0.05
        random = rng.standard_normal(router.shape)
        a, b = (np.sort(np.argsort(v @ random.T, 1)[:, -4:]) for v in (later, noisy))
        assert (a != b).any(1).mean() > 0.05
