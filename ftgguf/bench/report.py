"""The report that every comparison writes: what was compared, the samples, the outputs, and whether it is fair.

Samples are kept raw; tables, pages and ratios are computed from them, so that a stored report can be read again.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ftgguf.bench import stats
from ftgguf.bench.stats import Ratio

OK, OURS_FAILED, OUTPUTS_DIFFER, NOT_COMPARABLE, PEER_FAILED, INTERRUPTED = 0, 1, 2, 3, 4, 130
"""Exit statuses (options.USAGE says what they mean)."""

NOISE_NATS = 0.05
"""A divergence of greedy outputs where the two best tokens are closer than this is numeric noise: llama.cpp itself is
not bit-stable across batch shapes and cache hits."""


SHOWN_ERRORS = 5
"""Failed turns of a side that are kept word for word."""

_ISA = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512", "avx512_vbmi", "avx512_vnni", "avx512_bf16"),
    *("neon", "dotprod", "matmul_int8", "sve"),
)
"""Instruction sets that decide the speed of a quantised product."""
_COVERED = {"avx_vnni": ("avx_vnni", "avx512_vnni")}
"""The products of `avx_vnni` are in `avx512_vnni` too, in the same width: llama.cpp's own build for Sapphire Rapids
(`GGML_CPU_ALL_VARIANTS`) has the latter alone."""


class Contestant(msgspec.Struct):
    """One side. Sizes in bytes, 0 where unknown; `isa` is empty where it cannot be known."""

    name: str
    ours: bool
    build: str = ""
    isa: list[str] = []
    command: str = ""
    layout: str = ""
    load_seconds: float = 0.0
    rss_peak: int = 0
    rss_steady: int = 0
    vram_peak: int = 0
    lower_isa: list[str] = []
    """Instruction sets our side's kernels use and this side's do not."""
    other_file: bool = False
    """It serves another model than ours: its figures stand, no ratio is formed."""
    unlike: str = ""
    """Why it cannot be told to do ours' work (its model is not known, its tokens differ): no ratio either."""
    notes: list[str] = []
    errors: list[str] = []


class Row(msgspec.Struct):
    """One metric of one workload. `samples` and `failures` by contestant's name."""

    workload: str
    metric: str
    """`tok/s`, `TTFT ms`, `gap ms` ..."""
    higher_is_better: bool = True
    samples: dict[str, list[float]] = {}
    failures: dict[str, str] = {}
    paired: bool = False
    """Sample i (with `blocks`: block i) of every side was measured in round i."""
    quantiles: bool = False
    """Show p50, p90 and p99 instead of the mean."""
    blocks: dict[str, list[int]] = {}
    """Where a round gives several samples: how many each round gave, by contestant. They are no independent witnesses
    of a side's speed, so that intervals are formed over rounds. Empty: one sample a round, or request."""
    unit: str = "rounds"
    """What blocks are."""
    clocks_apart: list[str] = []
    """Contestants whose own clock disagrees with the client's by more than half: no ratio is formed with them."""

    def add(self, name: str, values: list[float]) -> None:
        """Samples that one round gave to the contestant of that name."""
        self.samples.setdefault(name, []).extend(values)
        self.blocks.setdefault(name, []).append(len(values))

    def statistic(self, samples: list[float]) -> float:
        """What ratios compare, of one side's samples."""
        return stats.percentile(samples, self.compared) if self.compared else stats.mean(samples)

    @property
    def compared(self) -> int:
        """The percentile that ratios compare; 0 for the mean. For gaps between tokens the 99th: a server that sends
        tokens in bursts has a median gap of nothing, and its user waits all the same."""
        if not self.quantiles:
            return 0
        return 99 if self.metric.startswith("gap") else 50


class Divergence(msgspec.Struct):
    """Where the greedy outputs of two sides part: gaps between the two best tokens in nats, -1 where not known."""

    a: str
    b: str
    prompt: int
    index: int
    token_a: int
    token_b: int
    gap_a: float
    gap_b: float
    settled: str = ""
    """Why it is no fault whatever the gap: ours says the peer's tokens where it computes as the peer does, or another
    build of the peer's library says ours."""

    @property
    def gap(self) -> float:
        """The larger of the known gaps: both sides must have been undecided. A side that was sure is not explained by
        the other's tie, which may have been between two more tokens. -1: unknown."""
        known = [g for g in (self.gap_a, self.gap_b) if g >= 0]
        return max(known, default=-1.0)


class Outputs(msgspec.Struct):
    """Greedy outputs compared. `length` tokens for each of `prompts` prompts; `pairs` compared sides."""

    prompts: int = 0
    length: int = 0
    pairs: list[tuple[str, str]] = []
    divergences: list[Divergence] = []
    noise: float = NOISE_NATS
    """Nats up to which a divergence is noise: raised to what the peer's own layouts differ by."""

    def faults(self) -> list[Divergence]:
        """Divergences between the sides that nothing explains; those of unknown gap count."""
        return [d for d in self.divergences if not d.settled and not 0 <= d.gap <= self.noise]


class Turn(msgspec.Struct):
    """One request of a replayed session. Times in milliseconds by the client's clock."""

    contestant: str
    session: str
    turn: int
    prompt_n: int
    cached_n: int
    """Prompt tokens the server says it took from its cache; -1 where it does not say."""
    ttft_ms: float
    """-1 where the answer was not streamed: nobody knows when its first token was made."""
    total_ms: float
    n_gen: int
    started_s: float = 0.0
    """Since the session began."""
    kind: str = ""
    """`append`, `edited`, `side`: how the prompt relates to the turn before."""
    error: str = ""
    at_s: float = 0.0
    """Since the round began, or the proxy started."""


class CacheSample(msgspec.Struct):
    """What a server's expert cache had counted at one moment; counts and bytes since that server started."""

    contestant: str
    run: int
    """Which start of that server: counters begin again with each."""
    at_s: float
    """Seconds since the run's first sample."""
    label: str
    """What was measured in the time that ends here."""
    wanted: int = 0
    hits: int = 0
    fills: int = 0
    cpu: int = 0
    fill_bytes: int = 0
    cpu_bytes: int = 0
    prefill_bytes: int = 0
    """Copied to the device for prompts, outside of the slots."""
    slots: int = 0
    arena_bytes: int = 0


class Pace(msgspec.Struct):
    """How fast the tokens of one generation came: points (seconds since the request, tok/s since the point before)."""

    contestant: str
    workload: str
    round: int
    points: list[tuple[float, float]]


class Line(msgspec.Struct):
    """Points (x, y) of one thing in a plot. A point whose x is not above the one before starts a new stroke."""

    label: str
    points: list[tuple[float, float]]


class Plot(msgspec.Struct):
    """Lines with markers, or with `categories` bars side by side: point (i, y) belongs to category i."""

    title: str
    x_name: str
    y_name: str
    lines: list[Line]
    note: str = ""
    categories: list[str] = []
    root_x: bool = False
    """x by its square root, 0 to 100."""


class Table(msgspec.Struct):
    """A table with a title; columns named in `left` hold words."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    left: list[str] = []
    note: str = ""


class Trouble(msgspec.Struct):
    """Why the numbers are not to be trusted, and the exit status that says so."""

    status: int
    text: str


class Report(msgspec.Struct):
    """Everything."""

    kind: str
    command: str
    host: dict[str, str] = {}
    model: dict[str, str] = {}
    settings: dict[str, str] = {}
    contestants: list[Contestant] = []
    rows: list[Row] = []
    outputs: Outputs = msgspec.field(default_factory=Outputs)
    turns: list[Turn] = []
    paces: list[Pace] = []
    cache: list[CacheSample] = []
    tables: list[Table] = []
    """Of measurements that compare no sides (`bench bw`, `bench cache`)."""
    plots: list[Plot] = []
    data: dict[str, Any] = {}
    """The same measurements as numbers."""
    notes: list[str] = []
    troubles: list[Trouble] = []
    interrupted: bool = False
    progress: str = ""
    """How many rounds or repetitions of how many were measured: said where an interrupt ended them."""

    @property
    def interruption(self) -> str:
        """What an interrupt left, in words."""
        done = f" ({self.progress})" if self.progress else ""
        return f"what was measured until then is shown{done}"

    @property
    def quiet(self) -> bool:
        """Nothing else kept the machine busy when the measurement began (host.describe)."""
        return "not a quiet machine" not in self.host.get("other load", "")

    @property
    def ours(self) -> Contestant | None:
        return next((c for c in self.contestants if c.ours), None)

    @property
    def peers(self) -> list[Contestant]:
        return [c for c in self.contestants if not c.ours]

    def trouble(self, status: int, text: str) -> None:
        """Note a trouble, once."""
        if all(t.text != text for t in self.troubles):
            self.troubles.append(Trouble(status, text))

    def turn_failed(self, c: Contestant, text: str) -> None:
        """A turn of `c` failed: the first few are kept word for word, and the trouble is one a side."""
        if len(c.errors) < SHOWN_ERRORS:
            c.errors.append(text[:300])
        elif len(c.errors) == SHOWN_ERRORS:
            c.errors.append("more turns failed: the turns say which")
        self.trouble(OURS_FAILED if c.ours else PEER_FAILED, f"{c.name}: turns failed, the first: {c.errors[0]}")

    @property
    def status(self) -> int:
        """The exit status: our own failure first, then outputs, fairness, the peer's failure, interruption."""
        found = {t.status for t in self.troubles}
        for status in (OURS_FAILED, OUTPUTS_DIFFER, NOT_COMPARABLE, PEER_FAILED):
            if status in found:
                return status
        return INTERRUPTED if self.interrupted else OK

    def row(
        self,
        workload: str,
        metric: str,
        *,
        higher_is_better: bool = True,
        paired: bool = False,
        quantiles: bool = False,
    ) -> Row:
        """The row of that name, made on first use."""
        for row in self.rows:
            if (row.workload, row.metric) == (workload, metric):
                return row
        row = Row(workload, metric, higher_is_better, paired=paired, quantiles=quantiles)
        self.rows.append(row)
        return row

    def no_ratio(self, peer: Contestant) -> str:
        """Why no ratio to `peer` is fair; empty where one is."""
        if peer.other_file:
            return "it serves another file"
        if peer.unlike:
            return peer.unlike
        faults = self.outputs.faults()
        if any(peer.name in (d.a, d.b) for d in faults):
            return "its outputs differ from ours by more than noise"
        if faults:  # a fault is of one side; a slower placement of the same peer that agrees by luck proves nothing
            return f"our outputs differ from those of {faults[0].b} by more than noise"
        return f"it does not use {', '.join(peer.lower_isa)}, which ours does" if peer.lower_isa else ""

    def ratio(self, row: Row, peer: Contestant) -> Ratio | None:
        """Ours against `peer` in `row.compared`, above 1 where ours is better; None where none is fair (`no_ratio`), a
        side has no samples, or failed at that workload in any round (those that survived are not the whole), or the
        clocks of one disagree."""
        return None if self.no_ratio(peer) else self.bare_ratio(row, peer)

    def bare_ratio(self, row: Row, peer: Contestant) -> Ratio | None:
        """`ratio` whether or not it is fair: to name what is lost even to a peer of lesser instruction sets."""
        ours = self.ours
        if ours is None or self.failed(row.workload, ours) or self.failed(row.workload, peer):
            return None
        if {ours.name, peer.name} & {*row.clocks_apart}:
            return None
        a, b = row.samples.get(ours.name, []), row.samples.get(peer.name, [])
        if not a or not b:
            return None
        blocks = (row.blocks[ours.name], row.blocks[peer.name]) if row.blocks else None
        units = (len(a), len(b)) if blocks is None else (len(blocks[0]), len(blocks[1]))
        found = stats.ratio(
            a,
            b,
            higher_is_better=row.higher_is_better,
            statistic=stats.quantile_of(row.compared) if row.compared else stats.mean_of,
            paired=row.paired and units[0] == units[1],
            blocks=blocks,
        )
        found = found if blocks is None else found._replace(unit=row.unit)
        return found if math.isfinite(found.value) else None

    def failed(self, workload: str, c: Contestant) -> bool:
        """Whether `c` failed at that workload in any round."""
        return any(row.workload == workload and c.name in row.failures for row in self.rows)

    def best_peer(self, row: Row) -> Contestant | None:
        """The peer that does best at this row."""
        able = [p for p in self.peers if row.samples.get(p.name) and not self.failed(row.workload, p)]
        able = [p for p in able if p.name not in row.clocks_apart]
        sign = 1 if row.higher_is_better else -1
        return max(able, key=lambda p: sign * row.statistic(row.samples[p.name]), default=None)


def from_json(data: bytes) -> Report:
    """A report that `publish.to_json` wrote. msgspec.DecodeError."""
    return msgspec.json.decode(data, type=Report)


def missing_isa(ours: list[str], peer: list[str]) -> list[str]:
    """Instruction sets that our kernels use and the peer's do not.

    AMX is left out, as our engine does not use it; a peer of unknown sets (empty) is not called lower.
    """
    lower = [name for name in _ISA if name in ours and not {*_COVERED.get(name, (name,))} & {*peer}]
    return lower if peer else []
