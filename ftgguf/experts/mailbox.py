"""Memory that the GPU and the CPU's workers share, and the workers' doorbell on it."""

from __future__ import annotations

import torch

from ftgguf import _ggml_cpu as native  # type: ignore[attr-defined]
from ftgguf.kernels.fill import TRACE_FIELDS, MailAddresses

WATCHDOG_SECONDS = 20.0
"""A layer's experts take below a millisecond; a machine that swaps takes seconds."""


class Mailbox:
    """Buffers for jobs of up to `rows` rows of `k` choices over `layers` layers, and the thread that serves them.

    Pinned where there is a device. The parts lie in one allocation, each at a multiple of 128 bytes.
    """

    def __init__(
        self,
        worker: native.ExpertWorker,
        device: torch.device,
        *,
        rows: int,
        k: int,
        width: int,
        hidden: int,
        layers: int,
        timeout: float = WATCHDOG_SECONDS,
    ) -> None:
        entries = rows * k
        sizes = {
            "words": 8 * native.DOORBELL_WORDS, "header": 4 * native.DOORBELL_HEADER, "expert": 4 * entries,
            "start": 4 * (entries + 1), "rows_of": 4 * entries, "weights": 4 * entries, "x": 4 * rows * width,
            "y": 4 * rows * width, "hidden": 4 * rows * hidden, "trace": 8 * TRACE_FIELDS * layers,
        }  # fmt: skip
        at: dict[str, int] = {}
        end = 0
        for name, size in sizes.items():
            at[name] = end
            end += -(-size // 128) * 128
        pinned = device.type == "cuda"
        self.memory = torch.zeros(end + 128, dtype=torch.uint8, pin_memory=pinned)
        base = -(-self.memory.data_ptr() // 128) * 128
        self.addresses = MailAddresses(**{name: base + offset for name, offset in at.items()})
        start = base - self.memory.data_ptr() + at["trace"]
        self.trace = self.memory[start : start + sizes["trace"]].view(torch.int64).view(layers, TRACE_FIELDS).numpy()
        """int64 [layers, TRACE_FIELDS], see kernels.fill.TRACE_FIELDS; true once the pass is done."""
        self.ticket = torch.zeros(1, dtype=torch.int64, device=device)
        a = self.addresses
        self.doorbell = native.Doorbell(
            worker, a.words, a.header, a.expert, a.start, a.rows_of, a.weights, a.x, a.y, a.hidden,
            rows=rows, k=k, width=hidden, layers=layers, timeout=timeout,
        )  # fmt: skip

    def error(self) -> str:
        """Why the service ended, or ""."""
        text: str = self.doorbell.error()
        return text

    def close(self) -> None:
        """Stop the threads; the device must not wait any more."""
        self.doorbell.close()
