"""Experts that the GPU cannot fetch itself, into slots: at safe points, by way of pinned memory.

A captured step copies from registered memory only. Where a layer's experts are not registered (the limit on pinned
memory is reached, or they are in a mapped file), a step leaves all its misses to the CPU; every so many steps the host
looks at the keys and brings those that are worth most into the cache, in place of ones that are worth less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ftgguf.experts import key, resize
from ftgguf.experts.slots import scores

if TYPE_CHECKING:
    from ftgguf.experts.store import CachedStore

EVERY = 16
"""Steps between two looks."""
AT_ONCE = 8
"""Experts brought at one look: some 25 MB, a few milliseconds from the page cache."""
MARGIN = key.ONE // 2
"""What an expert must be worth more than the one it replaces: 1.4 times as likely to be used."""


class Bounce:
    """One slot's bytes of pinned memory, through which experts go to the device."""

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        self.device = device
        self.memory = torch.empty(1, slot_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def copy(self, store: CachedStore, layer: int, expert: int, offset: int) -> None:
        """Expert `expert` of MoE layer `layer` to `offset` of the arena; done when this returns."""
        spec = store.order[layer]
        staged = self.memory[:, : spec.slot_bytes]
        store.bank.layers[spec.layer].read([expert], staged.numpy())
        store.arena.slot(offset, spec.slot_bytes).copy_(staged[0], non_blocking=True)
        store.wait()


def promote(store: CachedStore) -> int:
    """Bring the best absent experts of layers that are not registered into slots; how many came."""
    store.wait()
    store.device_state.store(store.state)
    s = store.state
    wanted = resize.worth(store)
    hidden = [i for i in range(s.layers) if not store.reachable(i)]
    candidates = [
        i * s.e_pad + e for i in hidden for e in range(s.experts) if s.slot_of[i, e] < 0 and s.key[0, i, e] > key.NONE
    ]
    candidates.sort(key=lambda flat: -int(wanted[flat]))
    value, offsets = scores(s), store.arena.plan.offsets()
    came = 0
    for flat in candidates[:AT_ONCE]:
        layer, expert = divmod(flat, s.e_pad)
        c = int(s.layer_class[layer])
        begin, count = int(s.class_begin[c]), int(s.class_count[c])
        if not count:
            continue
        slot = begin + int(np.argmin(value[begin : begin + count]))
        if value[slot] + MARGIN > wanted[flat] and s.owner_of[slot] >= 0:
            continue
        if s.owner_of[slot] >= 0:
            s.slot_of.reshape(-1)[s.owner_of[slot]] = -1
        store.bounce.copy(store, layer, expert, int(offsets[slot]))
        s.owner_of[slot], s.slot_of[layer, expert] = flat, slot
        value[slot] = wanted[flat]
        came += 1
    if came:
        for name in ("slot_of", "owner_of"):
            store.device_state.arrays[name].copy_(torch.from_numpy(getattr(s, name)))
        store.wait()
    store.promoted += came
    return came
