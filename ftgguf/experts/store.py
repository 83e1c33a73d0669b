"""The cached ExpertStore: experts in host memory, some of them in slots on the device, misses filled or run on the CPU.

Decode, per layer, on one stream: residency (ids to slots, fills, the CPU's list), publish (inputs and list to the
mailbox, ring), fill (gather into slots), then the forward pass's products over hits and fills, then `collect`: wait
for the CPU and take its share, which the next norm adds. Nothing depends on the host, so a pass may be captured.
Prefill is `prefill_pass`. Between passes (`finish`) the split follows what was measured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from ftgguf.engine.cuda_experts import ExpertSpec, ExpertStore, Placement
from ftgguf.engine.cuda_weights import Reader
from ftgguf.engine.device_memory import DeviceMemory
from ftgguf.engine.executor import ExecutorLost
from ftgguf.experts import key as keys
from ftgguf.experts import residency, slots
from ftgguf.experts import resize as resizing
from ftgguf.experts.arena import Arena
from ftgguf.experts.bank import Bank, BankError, LayerLayout, Pinner, Resident
from ftgguf.experts.control import Arm, SplitController
from ftgguf.experts.costs import PathCosts
from ftgguf.experts.cpu_worker import make_worker
from ftgguf.experts.disk import DiskBank
from ftgguf.experts.mailbox import WATCHDOG_SECONDS, Mailbox
from ftgguf.experts.meter import StepMeter
from ftgguf.experts.prefill_pass import PrefillPass
from ftgguf.experts.promote import EVERY, Bounce, promote
from ftgguf.experts.residency import Residency, Stat
from ftgguf.experts.ring import Ring
from ftgguf.experts.split_writer import SplitWriter
from ftgguf.gguf.types import TensorType
from ftgguf.kernels import fill as kernels
from ftgguf.kernels.activations import Activations
from ftgguf.kernels.gemv import MAX_ROWS
from ftgguf.kernels.residency import DeviceResidency, StepBuffers, residency_step
from ftgguf.models.config import ModelError

log = logging.getLogger(__name__)
RING_SHARE = 16
"""The prefill ring has this fraction of the budget, at most RING_BYTES."""
RING_BYTES = 256 << 20
WRITE_EVERY = 8
"""Steps between two looks whether the split has moved: each change is a copy that a step waits for."""
REBASE_LOOK = 1024
"""Steps between two looks at the keys, which bear some 2^18, and at the size classes."""


def kind_of(spec: ExpertSpec) -> str:
    """The name of a layer's types in profiles: `Q4_K`, or `Q4_K+Q6_K` (gate and up first)."""
    names = dict.fromkeys(TensorType(int(info.info.type)).name for info, _ in spec.parts)
    return "+".join(names)


class CachedStore(ExpertStore):
    """See the module. Layers are numbered twice: `specs` by block, everything else by their order among MoE layers."""

    captures_prompts = False

    def __init__(
        self,
        memory: DeviceMemory,
        *,
        budget: int,
        top_k: int,
        decode_rows: int,
        short_rows: int = 0,
        cpus: list[int],
        pinner: Pinner | None = None,
        policy: keys.KeyPolicy = keys.DECAY,
        costs: PathCosts | None = None,
        arm: Arm = Arm.SPLIT,
        rails: bool = True,
        ring_bytes: int | None = None,
        warm: bool = True,
        probe: bool = False,
        disk: bool = False,
        timeout: float = WATCHDOG_SECONDS,
    ) -> None:
        """`budget`: device bytes for slots and ring. `short_rows`: prompts of up to so many rows may run as decode's
        do; the split does not learn from them. `arm` with `rails` False is kept for ever (`--moe-mode`). `probe`:
        `calibrate` measures both paths where `costs` does not cover the types. `disk`: where host memory cannot
        hold the experts, leave them in the mapped file (`--expert-disk`)."""
        super().__init__()
        self.memory, self.budget, self.top_k, self.decode_rows = memory, budget, top_k, decode_rows
        self.most_rows = max(decode_rows, short_rows)
        self.cpus, self.pinner, self.policy, self.timeout = cpus, pinner, policy, timeout
        self.costs = costs or PathCosts()
        self._arm, self._rails, self._ring_bytes, self._warm, self._probe = arm, rails, ring_bytes, warm, probe
        self.order: list[ExpertSpec] = []
        self.index: dict[int, int] = {}
        self.prefill_copied = 0
        self.prefill_cpu_experts = 0
        self.prefill_passes = 0
        self.rebuilds = 0
        self.slabs_moved = 0
        self.room_given = 0
        """Passes that found no memory."""
        self._step_started = 0.0
        self._steps = 0
        self._taken: tuple[float, int, Arm] | None = None
        """Seconds, rows and arm of the step whose sums the meter holds."""
        self._mixed = True
        """Whether the sums since they were last taken are of other passes too: the warm-up's, one that nobody waited
        for, or one that was given up."""
        self.fill_seconds = 0.0
        self.fill_bytes_timed = 0.0
        self._disk = disk
        self.promoted = 0

    # ------------------------------------------------------------------------------------------------- start

    def load(self, reader: Reader, progress: Callable[[float], None]) -> None:
        self.settle()
        self.order = [self.specs[layer] for layer in sorted(self.specs)]
        self.index = {spec.layer: i for i, spec in enumerate(self.order)}
        self.kinds = [kind_of(spec) for spec in self.order]
        self._check()
        layouts = {
            spec.layer: LayerLayout(spec.experts, spec.slot_bytes, tuple((t.info, at) for t, at in spec.parts))
            for spec in self.order
        }
        self.bank: Bank | DiskBank
        try:
            self.bank = Bank(reader.gguf, layouts, threads=len(reader.files) and 8)
        except BankError as error:
            if not self._disk:
                raise
            self.bank = DiskBank(reader.gguf, layouts, str(error).partition(":")[0])
        self.bank.load(progress)
        device = self.memory.device
        if self.pinner is not None:
            self.bank.pin(self.pinner)
        elif device.type == "cpu" and isinstance(self.bank, Bank):
            self.bank.pinned = dict.fromkeys(self.bank.pinned, True)  # the interpreter reads all memory
        self.worker, self._host_vectors = make_worker(self.order, self.bank, self.cpus)
        self._make_cache(device)
        self.controller = SplitController(
            {kind: self.costs.bandwidths(kind) for kind in self.kinds}, self._arm, self._rails
        )
        sizes = [spec.slot_bytes for spec in self.order]
        self.meter = StepMeter(self.mail.trace, self.mail.doorbell, self.kinds, sizes, [p.size for p in self.parts])
        self.prefill = PrefillPass(self)
        self.splits = SplitWriter(self)
        self.splits.write()

    def calibrate(self) -> None:
        """Measure both paths where that was asked for and no profile covers the types. After `load`, once the machine
        is quiet: compilers running beside it would make its CPU look slow."""
        if not self._probe or (self.costs.measured and set(self.kinds) <= set(self.costs.rates)):
            return
        from ftgguf.experts import measure

        started = time.perf_counter()
        found = measure.probe(self)
        self.costs = measure.costs_of(found, f"probed in {time.perf_counter() - started:.1f} s")
        self.controller = SplitController(
            {kind: self.costs.bandwidths(kind) for kind in self.kinds}, self._arm, self._rails
        )
        self.splits.write()

    def _check(self) -> None:
        if not self.order:
            raise ModelError("this model has no experts to cache: use --moe-mode resident")
        counts = {spec.experts for spec in self.order}
        if len(counts) > 1:
            raise ModelError(f"layers with different numbers of experts ({sorted(counts)}) cannot share a cache")
        for spec in self.order:
            for tensor, _ in spec.parts:
                if tensor.nbytes % 16:
                    raise ModelError(
                        f"tensor '{tensor.info.name}': experts of {tensor.nbytes} bytes cannot be copied in words of 16"
                    )

    def _make_cache(self, device: torch.device) -> None:
        sizes = [spec.slot_bytes for spec in self.order]
        whole = sum(spec.slot_bytes * spec.experts for spec in self.order)
        ring = min(self.budget // RING_SHARE, RING_BYTES) if self._ring_bytes is None else self._ring_bytes
        self.ring = Ring(self.memory, ring)
        experts = self.order[0].experts
        plan = slots.plan_arena(sizes, experts, max(0, self.budget - ring))
        self.arena = Arena(self.memory, plan)
        largest = max(plan.bytes, slots.aligned(max(sizes)) * experts * len(sizes)) + plan.slab_bytes
        self.state: Residency = slots.new_state(plan, len(sizes), experts, max(largest, whole), 0, self.policy)
        for i, spec in enumerate(self.order):
            self.state.host_base[i, 0] = self.bank.layers[spec.layer].address
            self.state.host_stride[i, 0] = spec.slot_bytes
        self.part_slot = self.memory.tensor("a shared expert's down", (slots.aligned(max(sizes)),), torch.uint8)
        self.set_addresses()
        self.bounce = Bounce(max(sizes), device)
        if self._warm:
            # As many of each layer: a cold cache would miss everything at first.
            lanes = np.arange(experts)[:, None] + np.arange(len(sizes))[None, :] * self.state.e_pad
            self.fill_free_slots(lanes.reshape(-1).tolist())
        self.device_state = DeviceResidency.of(self.state, device)
        self.addresses = self.device_state.arrays["slot_addr"]
        self.buffers = StepBuffers.allocate(self.most_rows * self.top_k, experts, device)
        self.stamps = torch.zeros(3, dtype=torch.int64, device=device)
        address = torch.tensor([self.part_slot.data_ptr()], dtype=torch.int64, device=device)
        self.parts = []
        for spec in self.order:
            down, at = spec.parts[-1]
            self.parts.append(kernels.Part(address, at, down.nbytes))
        self.width = self.order[0].weights.down.n
        self.share = torch.zeros(self.most_rows, self.width, dtype=torch.float32, device=device)
        self.programs = kernels.programs(device)
        self.mail = Mailbox(
            self.worker, device, rows=self.most_rows, k=self.top_k, width=self.width,
            hidden=max(spec.weights.up.n for spec in self.order), layers=len(sizes), timeout=self.timeout,
        )  # fmt: skip

    def set_addresses(self) -> None:
        """The mirror's slot addresses from the arena."""
        addresses = self.arena.addresses()
        self.state.slot_addr[:] = 0
        self.state.slot_addr[: len(addresses)] = addresses
        self.state.slot_addr[-1] = self.part_slot.data_ptr()

    def fill_free_slots(self, flats: Iterable[int]) -> None:
        """The experts `flats` (layer * e_pad + lane) into free slots as long as there are any. At a safe point, from
        and into the mirror."""
        s, offsets = self.state, self.arena.plan.offsets()
        free = [
            iter(np.flatnonzero(s.owner_of[begin : begin + count] < 0) + begin)
            for begin, count in zip(s.class_begin, s.class_count, strict=True)
        ]
        for flat in flats:
            i, expert = divmod(flat, s.e_pad)
            if expert >= s.experts or s.slot_of[i, expert] >= 0:
                continue
            slot = int(next(free[int(s.layer_class[i])], -1))
            if slot < 0:
                continue
            resident, size = self.bank.layers[self.order[i].layer], self.order[i].slot_bytes
            if isinstance(resident, Resident) and self.reachable(i):
                source = torch.from_numpy(resident.view[expert])
                self.arena.slot(int(offsets[slot]), size).copy_(source, non_blocking=True)
            else:
                self.bounce.copy(self, i, expert, int(offsets[slot]))
            s.owner_of[slot] = flat
            s.slot_of[i, expert] = slot

    def reachable(self, index: int) -> bool:
        """Whether the GPU can read this layer's experts."""
        return self.bank.pinned[self.order[index].layer]

    # ------------------------------------------------------------------------------------------------- a layer

    def place(self, layer: int, x: Activations, ids: torch.Tensor, weights: torch.Tensor) -> Placement:
        index = self.index[layer]
        # The last layer of a prompt runs for its wanted rows alone, and so as decode does.
        if ids.shape[0] > (self.decode_rows if self.prompting else self.most_rows):
            self.prefill_passes += index == 0
            return self.prefill.place(index, x, ids, weights)
        b, n = self.buffers, ids.numel()
        may_share = ids.shape[0] <= MAX_ROWS  # more rows have their hidden rows in another type
        residency_step(self.device_state, index, ids, b, 1 if index == 0 else 0, may_share)
        kernels.publish(self.mail.addresses, self.mail.ticket, b, index, x.x, weights)
        kernels.fill(b, self.specs[layer].slot_bytes, self.stamps, self.programs, self.parts[index])
        down = b.place_down[:n].view(ids.shape) if may_share else None
        return Placement(b.place[:n].view(ids.shape), self.addresses, down=down)

    def complete(self, layer: int, placement: Placement, hidden: torch.Tensor) -> None:
        if placement.ticket is None:
            kernels.take(self.mail.addresses, self.mail.ticket, self.buffers, hidden, self.stamps)

    def collect(self, layer: int, placement: Placement) -> torch.Tensor | None:
        if placement.ticket is not None:
            return self.prefill.collect(placement.ticket)
        out = self.share[: placement.slots.shape[0]]
        kernels.collect(self.mail.addresses, self.mail.ticket, self.buffers, self.index[layer], out, self.stamps)
        return out

    # ------------------------------------------------------------------------------------------------- between passes

    def takes_short(self, rows: int) -> bool:
        """Where the slots of each size hold all experts that `rows` rows may want: what is filled must stay until it
        is used, and a cache of a few slots would be emptied each time."""
        most = min(rows * self.top_k, self.state.experts)
        return rows <= self.most_rows and most <= min(self.arena.plan.counts(), default=0)

    def start(self, prompt: bool = False, rows: int = 1) -> None:
        super().start(prompt, rows)
        self.splits.follow(rows if not prompt and rows > self.decode_rows else 0)
        self._step_started = time.perf_counter()

    def finish(self, rows: int, waited: bool) -> None:
        error = self.mail.error()
        if error:
            raise ExecutorLost(f"{error}; start the engine again, or use --moe-mode offload")
        super().finish(rows, waited)
        if not waited:
            self._mixed = True
            return
        self.prefill.end()
        self.overlap()  # what no pass has run beside
        self.meter.take()
        # What the CPU did since it was last taken: this step's work, unless a pass that nobody waited for came between.
        mixed, self._mixed = self._mixed, False
        if rows > self.decode_rows:
            return
        if not mixed:
            self._taken = (time.perf_counter() - self._step_started, rows, self.splits.running)
        self._steps += 1
        if self._steps % EVERY == 0 and not all(self.bank.pinned.values()) and self.arena.chunks:
            promote(self)
        if self._steps % REBASE_LOOK == 0:
            self.rebase()

    def overlap(self) -> None:
        """Learn from the step before, while the device runs this one: between steps it took 0.3 ms."""
        if self._taken is None:
            return
        seconds, rows, arm = self._taken
        sample, self._taken = self.meter.read(seconds, rows), None
        if sample is None or self.splits.forced is not None:
            return  # a forced split shows one path alone, and the estimates are of both at once
        for path in sample.paths.values():
            self.fill_seconds += path.fill_seconds
            self.fill_bytes_timed += path.fill_bytes
        running, switches = self.controller.running, self.controller.switches
        self.controller.record(sample, arm)
        if self.controller.switches != switches:
            log.info("misses are served by another arm: %s", self.controller.reason)
        self.splits.due |= self.controller.running is not running or self._steps % WRITE_EVERY == 0

    def force_split(self, share: int, least: int, part: tuple[int, int] = (0, 0)) -> None:
        """See SplitWriter.force."""
        self.splits.force(share, least, part)

    def rebase(self) -> None:
        """Move the keys back if it is time, and slabs between size classes; a safe point."""
        self.device_state.store(self.state)
        if residency.needs_rebase(self.state):
            residency.rebase(self.state)
            self.device_state.load(self.state)
        resizing.rebalance(self)

    def abandon(self) -> int:
        self.prefill.abandon()
        self._taken = None
        self._mixed = True  # what the CPU did for it is no part of the next step
        self.room_given += 1
        # A chunk that is longer than its plan counts as a whole in the arena: never ask for the ring's memory.
        return min(2 * self.arena.chunk, self.arena.bytes, self.budget - 2 * self.ring.half)

    def resize(self, budget: int) -> dict[str, int]:
        """See experts.resize.resize."""
        return resizing.resize(self, budget)

    def rebuild(self) -> dict[str, int]:
        """See experts.resize.rebuild."""
        return resizing.rebuild(self)

    def wait(self) -> None:
        """Until the device is done."""
        if self.memory.device.type == "cuda":
            torch.cuda.synchronize(self.memory.device)

    def statistics(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """int64 [layers, STAT_COLUMNS]: residency.Stat's sums of the decode steps (waits for the device)."""
        stats: np.ndarray[Any, np.dtype[np.int64]] = self.device_state.arrays["stats"].cpu().numpy()
        return stats

    def hit_rate(self) -> float:
        """Share of the experts that decode steps wanted and found in a slot."""
        total = self.statistics().sum(0)
        return float(total[Stat.HITS] / max(1, total[Stat.EXPERTS]))

    def close(self) -> None:
        """Stop the threads and give the pinned memory back."""
        self.wait()
        super().close()
        self.mail.close()
        self.prefill.close()
        self.bank.close()
