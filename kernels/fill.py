# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Experts on their way: gathered from host memory into slots, handed to the CPU, and the CPU's share taken back.

All three kernels read what `residency` decided from device memory and have fixed grids, so a captured graph needs no
host. Addresses of host memory come as int64. The doorbell's words and the order of writes are those of
ggml_cpu/doorbell.cpp: data first, then the number with release at system scope; the wait is a load with acquire, never
an atomic operation on a word that the CPU writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .device import INTERPRET, aligned
from .overlap import after_previous, overlap
from .residency import StepBuffers

CHUNK = 16384
"""Bytes a program of the gather copies at a time."""
REQUEST: tl.constexpr = tl.constexpr(0)
DONE: tl.constexpr = tl.constexpr(16)
ABORT: tl.constexpr = tl.constexpr(32)
HIDDEN: tl.constexpr = tl.constexpr(48)
LOOK_FOR_ABORT: tl.constexpr = tl.constexpr(64)
"""Every so many looks at `done` the wait looks at `abort` too."""

TRACE_FIELDS = 16
"""int64 a layer: hits, misses, fills, CPU experts, nanoseconds from the fill's begin to the wait's (0: no fills)
without the wait for a shared expert's hidden rows, of the fill, of the wait, time of its end, whether an expert was
shared, the nanoseconds waited for its hidden rows."""


@triton.jit
def _now(dummy):
    """The GPU's clock in nanoseconds; 0 under the interpreter."""
    if INTERPRET:
        return dummy.to(tl.int64) * 0
    else:
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,l", [dummy.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
        )


@triton.jit
def _acquire(address):
    """The int64 at `address` in host memory, and everything written before it."""
    if INTERPRET:
        return tl.load(address.to(tl.pointer_type(tl.int64)))
    else:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.s64 $0, [$1];", "=l,l", [address], dtype=tl.int64, is_pure=False, pack=1
        )


_RELEASE_ASM: tl.constexpr = tl.constexpr("""
{
    .reg .pred first;
    .reg .u32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first st.release.sys.global.s64 [$1], $2;
    mov.s64 $0, $2;
}
""")


@triton.jit
def _release(address, number):
    """Store int64 `number` at `address` in host memory, behind all that the program has written; after a barrier. A
    store, where an exchange would wait for the word's old value to come over the link."""
    if INTERPRET:
        tl.store(address.to(tl.pointer_type(tl.int64)), number)
    else:
        tl.inline_asm_elementwise(_RELEASE_ASM, "=l,l,l", [address, number], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["slot_bytes", "part_at", "part_bytes"])
def _fill(
    header, fill_src, fill_dst, part_src, part_dst, slot_bytes, part_at, part_bytes, stamps,
    PROGRAMS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Copy `slot_bytes` (a multiple of 256) from fill_src[i, 0] to fill_dst[i] for each fill, then of a shared expert
    the `part_bytes` (a multiple of 16) that begin at `part_at`."""
    after_previous()
    pid = tl.program_id(0)
    fills = tl.load(header + 3)
    shared = tl.load(header + 8)
    if fills + shared > 0:
        begin = _now(fills)
        if pid == 0:
            tl.store(stamps, begin)
            tl.store(stamps + 2, begin * 0)
        blocks = (slot_bytes + SIZE - 1) // SIZE
        whole = fills * blocks
        at = tl.arange(0, SIZE // 8)
        for unit in range(pid, whole + shared * ((part_bytes + SIZE - 1) // SIZE), PROGRAMS):
            is_part = unit >= whole
            i = tl.where(is_part, 0, unit // blocks)
            start = tl.where(is_part, unit - whole, unit - i * blocks).to(tl.int64) * SIZE
            ok = at < (tl.where(is_part, part_bytes, slot_bytes) - start) // 8
            start += tl.where(is_part, part_at, 0)
            source = tl.where(is_part, tl.load(part_src), tl.load(fill_src + i * 3)) + start
            target = tl.where(is_part, tl.load(part_dst), tl.load(fill_dst + i)) + start
            value = tl.load(aligned(source, tl.int64) + at, mask=ok)
            tl.store(aligned(target, tl.int64) + at, value, mask=ok)
        tl.debug_barrier()
        tl.atomic_max(stamps + 1, _now(fills))


@triton.jit(do_not_specialize=["layer", "rows", "n_weights", "most"])
def _publish(
    words, mail_header, mail_expert, mail_start, mail_rows, mail_weights, mail_x, ticket,
    header, cpu_expert, cpu_start, cpu_rows, weights, x, layer, rows, n_weights, most, n_x, SIZE: tl.constexpr,
):  # fmt: skip
    """One program: the CPU's list, of `most` experts at most, and the experts' inputs into the mailbox, then ring.
    Nothing where it has none.

    The first piece of everything is loaded before any of it is stored: a program's instructions are issued in order, so
    that a load behind a store came only when what was stored had been loaded, and there were five in a row. (With the
    CPU's answer before its sums, a layer that asks the CPU takes 1 us less on an H200.)
    """
    after_previous()
    at = tl.arange(0, SIZE)
    small = tl.arange(0, 128)
    head = tl.arange(0, 8)
    n_cpu = tl.load(header + 4)
    entries = tl.load(header + 5)
    shared = tl.load(header + 8)
    number = tl.load(ticket) + 1
    value = tl.load(x + at, mask=at < n_x, other=0.0)
    weight = tl.load(weights + small, mask=small < n_weights, other=0.0)
    expert = tl.load(cpu_expert + small, mask=small < most, other=0)
    row = tl.load(cpu_rows + small, mask=small < n_weights, other=0)
    first = tl.load(cpu_start + small, mask=small <= most, other=0)
    if n_cpu > 0:
        tl.store(aligned(mail_x, tl.float32) + at, value, mask=at < n_x)
        tl.store(mail_weights.to(tl.pointer_type(tl.float32)) + small, weight, mask=small < n_weights)
        tl.store(mail_expert.to(tl.pointer_type(tl.int32)) + small, expert, mask=small < n_cpu)
        tl.store(mail_rows.to(tl.pointer_type(tl.int32)) + small, row, mask=small < entries)
        tl.store(mail_start.to(tl.pointer_type(tl.int32)) + small, first, mask=small <= n_cpu)
        both = tl.where(head == 2, n_cpu, tl.where(head == 3, entries, tl.where(head == 4, shared, 0)))
        line = tl.where(head == 0, layer, tl.where(head == 1, rows, both))
        tl.store(mail_header.to(tl.pointer_type(tl.int32)) + head, line)
        for start in range(SIZE, n_x, SIZE):
            i = start + at
            value = tl.load(x + i, mask=i < n_x, other=0.0)
            tl.store(aligned(mail_x, tl.float32) + i, value, mask=i < n_x)
        for start in range(128, n_weights, 128):
            i = start + small
            weight = tl.load(weights + i, mask=i < n_weights, other=0.0)
            tl.store(mail_weights.to(tl.pointer_type(tl.float32)) + i, weight, mask=i < n_weights)
            expert = tl.load(cpu_expert + i, mask=i < n_cpu, other=0)
            tl.store(mail_expert.to(tl.pointer_type(tl.int32)) + i, expert, mask=i < n_cpu)
            row = tl.load(cpu_rows + i, mask=i < entries, other=0)
            tl.store(mail_rows.to(tl.pointer_type(tl.int32)) + i, row, mask=i < entries)
        for start in range(128, n_cpu + 1, 128):
            i = start + small
            first = tl.load(cpu_start + i, mask=i <= n_cpu, other=0)
            tl.store(mail_start.to(tl.pointer_type(tl.int32)) + i, first, mask=i <= n_cpu)
        tl.debug_barrier()
        tl.store(ticket, number)
        _release(words + REQUEST * 8, number)


@triton.jit
def _await(words, which: tl.constexpr, number):
    """Spin until word `which` of the doorbell has reached `number`, or the wait is released; the word as it is then."""
    done = _acquire(words + which * 8)
    stop = done * 0 - 1
    looks = 0
    while (done < number) & (stop < number):
        done = _acquire(words + which * 8)
        looks += 1
        if looks % LOOK_FOR_ABORT == 0:
            stop = _acquire(words + ABORT * 8)
    return done


@triton.jit
def _take(
    words, mail_hidden, ticket, header, cpu_start, cpu_rows, hidden, stamps, F, SIZE: tl.constexpr,
):  # fmt: skip
    """Wait for the CPU's hidden rows of a shared expert and put them where its pairs' rows are expected; NaN where the
    wait was released. Nothing where no expert is shared."""
    after_previous()
    shared = tl.load(header + 8)
    if shared > 0:
        number = tl.load(ticket)
        begin = _now(shared)
        done = _await(words, HIDDEN, number)
        pid = tl.program_id(0)
        at = pid * SIZE + tl.arange(0, SIZE)
        for j in range(0, tl.load(cpu_start + 1)):
            source = aligned(mail_hidden, tl.float32) + j * F + at
            value = tl.load(source, mask=at < F, other=0.0, cache_modifier=".cv")
            value = tl.where(done < number, float("nan"), value)
            tl.store(hidden + tl.load(cpu_rows + j).to(tl.int64) * F + at, value, mask=at < F)
        if pid == 0:
            tl.store(stamps + 2, _now(shared) - begin)


@triton.jit(do_not_specialize=["layer"])
def _collect(words, mail_y, trace, ticket, header, share, stamps, layer, n, SIZE: tl.constexpr):
    """Wait for the CPU where it was asked, and copy its share; zeros where it was not, NaN where it was released."""
    after_previous()
    pid = tl.program_id(0)
    at = pid * SIZE + tl.arange(0, SIZE)
    # what the trace has is loaded before the wait, so that little comes after it
    n_cpu = tl.load(header + 4)
    number = tl.load(ticket)
    fills = tl.load(header + 3)
    shared = tl.load(header + 8)
    hits = tl.load(header + 1).to(tl.int64)
    misses = tl.load(header + 2).to(tl.int64)
    began = tl.load(stamps)
    filled = tl.load(stamps + 1)
    hidden_ns = tl.where(shared > 0, tl.load(stamps + 2), 0)
    value = tl.zeros([SIZE], tl.float32)
    begin = _now(n_cpu)
    if n_cpu > 0:
        done = _await(words, DONE, number)
        value = tl.load(aligned(mail_y, tl.float32) + at, mask=at < n, other=0.0, cache_modifier=".cv")
        value = tl.where(done < number, float("nan"), value)
    tl.store(share + at, value, mask=at < n)
    if pid == 0:
        end = _now(n_cpu)
        i = tl.arange(0, 16)
        fill_ns = tl.where(fills + shared > 0, filled - began, 0)
        busy_ns = tl.where(fills + shared > 0, begin - began - hidden_ns, 0)
        counts = tl.where(i == 0, hits, tl.where(i == 1, misses, tl.where(i == 2, fills, n_cpu).to(tl.int64)))
        times = tl.where(i == 4, busy_ns, tl.where(i == 5, fill_ns, tl.where(i == 6, end - begin, end)))
        more = tl.where(i == 8, shared.to(tl.int64), tl.where(i == 9, hidden_ns, 0))
        line = (trace + layer.to(tl.int64) * 128).to(tl.pointer_type(tl.int64))
        tl.store(line + i, tl.where(i < 4, counts, tl.where(i < 8, times, more)))


@dataclass(frozen=True, slots=True)
class MailAddresses:
    """Host addresses of the mailbox's parts (experts.mailbox)."""

    words: int
    header: int
    expert: int
    start: int
    rows_of: int
    weights: int
    x: int
    y: int
    hidden: int
    trace: int


def programs(device: torch.device) -> int:
    """Programs of the gather: enough requests in flight for the link, two on each multiprocessor."""
    if device.type != "cuda":
        return 3
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True, slots=True)
class Part:
    """A shared expert's down: the bytes [at, at + size) of a slot, both multiples of 16; `slot` int64 [1] is the
    address of the slot that takes them."""

    slot: torch.Tensor
    at: int
    size: int


def fill(out: StepBuffers, slot_bytes: int, stamps: torch.Tensor, n_programs: int, part: Part | None = None) -> None:
    """Queue the copies that `out` lists; `stamps` int64 [3] on the device takes their begin and end. `part` is needed
    where the decision may share an expert."""
    if stamps.numel() < 3 or stamps.dtype != torch.int64:
        raise ValueError(f"the fill stores three int64 stamps, not {stamps.numel()} of {stamps.dtype}")
    if slot_bytes % 256 or (part and (part.at % 16 or part.size % 16)):
        raise ValueError(f"slots are multiples of 256 bytes and parts of 16, not {slot_bytes}, {part}")
    _fill[(n_programs,)](
        out.header, out.fill_src, out.fill_dst, out.part_src, out.part_src if part is None else part.slot, slot_bytes,
        0 if part is None else part.at, 0 if part is None else part.size, stamps, PROGRAMS=n_programs, SIZE=CHUNK,
        num_warps=8, launch_pdl=overlap(),
    )  # fmt: skip


def take(
    mail: MailAddresses, ticket: torch.Tensor, out: StepBuffers, hidden: torch.Tensor, stamps: torch.Tensor
) -> None:
    """Queue the wait for a shared expert's hidden rows; `hidden` float32 [pairs, F] has them afterwards."""
    if hidden.dtype != torch.float32 or not hidden.is_contiguous():
        raise ValueError("the experts' hidden rows must be contiguous float32")
    width = hidden.shape[1]
    _take[(triton.cdiv(width, 1024),)](
        mail.words, mail.hidden, ticket, out.header, out.cpu_start, out.cpu_rows, hidden, stamps, width, SIZE=1024,
        num_warps=4, launch_pdl=overlap(),
    )  # fmt: skip


def publish(
    mail: MailAddresses, ticket: torch.Tensor, out: StepBuffers, layer: int, x: torch.Tensor, weights: torch.Tensor
) -> None:
    """Queue the message to the CPU: x float32 [rows, n_embd], weights float32 [rows, k], `ticket` int64 [1]."""
    rows = x.shape[0]
    if any(t.dtype != torch.float32 or not t.is_contiguous() for t in (x, weights)):
        raise ValueError("the experts' inputs and weights must be contiguous float32")
    _publish[(1,)](
        mail.words, mail.header, mail.expert, mail.start, mail.rows_of, mail.weights, mail.x, ticket,
        out.header, out.cpu_expert, out.cpu_start, out.cpu_rows, weights, x, layer, rows, weights.numel(),
        out.cpu_expert.numel(), x.numel(), SIZE=2048, num_warps=8, launch_pdl=overlap(),
    )  # fmt: skip


def collect(
    mail: MailAddresses, ticket: torch.Tensor, out: StepBuffers, layer: int, share: torch.Tensor, stamps: torch.Tensor
) -> None:
    """Queue the wait; `share` float32 [rows, n_embd] is the CPU's part afterwards, and the layer's trace is written."""
    n = share.numel()
    _collect[(triton.cdiv(n, 2048),)](
        mail.words, mail.y, mail.trace, ticket, out.header, share, stamps, layer, n, SIZE=2048, num_warps=4,
        launch_pdl=overlap(),
    )  # fmt: skip
