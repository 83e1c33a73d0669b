"""Ours and a peer as HTTP servers, one at a time, interleaved: the clocks are the client's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftgguf.bench.against import shared_flags
from ftgguf.bench.alone import config_for
from ftgguf.bench.cache_watch import CacheWatch, watched
from ftgguf.bench.client import Answer, RequestFailed, Target, identify
from ftgguf.bench.contenders import Contender, Running, make_contenders, other_backend
from ftgguf.bench.identity import differs, figures
from ftgguf.bench.in_process import GREEDY_TOKENS, say
from ftgguf.bench.options import HTTP_PROMPTS, Options
from ftgguf.bench.outputs import Greedy, compare, compare_texts, compare_tokens
from ftgguf.bench.peers import Peer
from ftgguf.bench.placement import best_placements, check_budget, sizes_of
from ftgguf.bench.prompts import TEXTS
from ftgguf.bench.report import NOT_COMPARABLE, OURS_FAILED, PEER_FAILED, Divergence, Report, missing_isa
from ftgguf.bench.servers import ServerError
from ftgguf.bench.stats import mean
from ftgguf.bench.witness import Builds, InProcess, Witness
from ftgguf.bench.workloads import CALIBRATION, Bench, Plan, Source, TextSource, make_plan
from ftgguf.pull.ollama_gguf import open_model

CLOCKS_AGREE = 0.05
"""Client's and server's decode rates may differ by this share before the report says so."""
CLOCKS_APART = 0.5
"""And by this before a row is left out of ratios: its tokens came in a burst, not as they were made."""


def compare_over_http(report: Report, options: Options, path: str, peer: Peer) -> None:
    """Measure every workload in `options.repetitions` rounds. What fails becomes rows and troubles of `report`."""
    with open_model(path) as gguf:
        size = gguf.size
        limit, n_vocab = gguf.arch("context_length"), len(gguf.metadata["tokenizer.ggml.tokens"])
        sizes = sizes_of(gguf)
    remote = _asked(peer, options) if peer.kind == "url" else None
    if remote is not None and 0 < remote.n_ctx < limit:
        report.notes.append(f"the peer runs with a context of {remote.n_ctx} tokens a request; nothing longer is sent")
        limit = remote.n_ctx
    prompts = options.prompts or [t for t in HTTP_PROMPTS if t < limit] or list(HTTP_PROMPTS[:1])
    gens = [n for n in options.gens or [128] if n]
    plan = make_plan(options.workloads, prompts, gens, [d for d in options.depths if d], limit, report)
    engine = options.engine_lines()[0]
    config = config_for(path, ["-c", str(plan.cells), *engine], ())
    flags = ["-m", path, "-c", str(plan.cells), "-np", "4", "-kvu", *engine]
    for spelling, name in (("-t", "threads"), ("-tb", "threads_batch")):
        if f"cpu.{name}" not in config.given:
            flags += [spelling, str(getattr(config.cpu, name))]  # both sides get the same, said aloud
    # a server that runs all the time may remember the prompts of the last comparison
    salt = options.seed if peer.kind in ("llama-server", "xllamacpp") else int(time.time())
    report.settings |= {
        "context": f"{config.context.size} cells, 4 slots, unified",
        "batch": f"{config.context.n_batch}/{config.context.n_ubatch}",
        "KV": f"{config.context.type_k}/{config.context.type_v}",
        "threads": f"{config.cpu.threads} decode, {config.cpu.threads_batch} prefill",
        "rounds": str(options.repetitions),
        "prompts": f"random tokens, seed {salt}, the same for all sides; tg: short texts of {len(TEXTS)} domains",
        "sampling": "greedy, end of text ignored",
        "warm-up": "the shortest prompt, 8 tokens, all streams at once, each round" if options.warm_up else "none",
        "prefix cache": "empty, except where a row says `on` or `@`: there the prefix is cached",
        "clock": "the client's",
    }
    text_only = peer.kind == "ollama" or (remote is not None and not remote.native)
    placements = best_placements(report, options, flags, peer, sizes) if peer.kind == "llama-server" else {}
    sides = make_contenders(options, flags, peer, placements, plan.cells)
    other = other_backend(options, flags, peer) if placements else None
    builds = None
    if peer.kind in ("llama-server", "xllamacpp"):  # a server at a URL may be of any make
        plain = [flag.replace("_", "-") if flag.startswith("--") else flag for flag in flags]
        builds = InProcess(shared_flags(plain), size, options.timeout)
    duel = HttpDuel(report, options, sides, Source(n_vocab), text_only, salt, other, builds)
    if placements:
        duel.start_ours_once()
    duel.run(plan)
    check_budget(report, config.placement.vram_budget)


@dataclass(frozen=True, slots=True)
class _Remote:
    """What a server at a URL says about itself: does it take token ids, and how many of them (0: unknown)?"""

    native: bool
    n_ctx: int


def _asked(peer: Peer, options: Options) -> _Remote:
    try:
        target = identify(peer.where, options.peer_model, options.timeout, options.peer_key)
        if target.dialect != "native":
            return _Remote(False, 0)
        settings = target.get("/props").get("default_generation_settings") or {}
        return _Remote(True, int(settings.get("n_ctx") or 0))
    except RequestFailed:  # the first round says what is wrong
        return _Remote(False, 0)


class HttpDuel:
    """Rounds over contenders. `text_only`: a side takes no token ids, so that all get text. Asked only where outputs
    differ: `other`, the peer on another backend, or `builds`, other builds of its library."""

    def __init__(
        self,
        report: Report,
        options: Options,
        sides: list[Contender],
        source: Source,
        text_only: bool,
        salt: int = 0,
        other: Contender | None = None,
        builds: Builds | None = None,
    ) -> None:
        self.report = report
        self.options = options
        self.sides = sides
        self.source = source
        self.text_only = text_only
        self.salt = salt
        self.other = other
        self.builds = builds
        self._compared = False
        self._once = 0.0
        """Seconds of the round that went into what no further round does."""
        self.plan: Plan | None = None
        self._figures: dict[str, int] = {}
        self._said: dict[str, list[Greedy]] = {}
        self._answers: dict[str, list[Answer]] = {}
        self._ids: dict[str, list[list[int]]] = {}
        self._templates: dict[str, list[str]] = {}
        self._rates: dict[str, list[tuple[str, float, float]]] = {}
        self._counts: dict[str, dict[str, int]] = {}
        report.contestants = [side.contestant for side in sides]
        report.notes.append(
            "a side is brought up as a server when its turn comes, once a round; order rotated every round"
        )
        if text_only:
            report.notes.append("prompts are text, as the peer takes no token ids")

    def start_ours_once(self) -> None:
        """On a GPU, as the sweep has started the peer many times: the first start compiles the model's kernels, half a
        minute that no later one takes, and from which `--limit` would conclude how long a round takes."""
        ours = self.sides[0]
        say(f"{ours.contestant.name} is started once, so that its kernels are compiled")
        began = time.monotonic()
        try:
            with ours.up():
                took = time.monotonic() - began
        except (ServerError, RequestFailed):
            return  # the first round says what is wrong
        self.report.notes.append(
            f"{ours.contestant.name} was started once before the rounds, in {took:.1f} s with the kernels that were "
            "not compiled yet; `load s` is of a later start"
        )

    def run(self, plan: Plan) -> None:
        """All rounds that `--limit` has time for. Outputs are compared also where an interrupt ends the first."""
        try:
            self._rounds(plan)
        finally:
            self._compare(interrupted=True)
            self._check_clocks()

    def _rounds(self, plan: Plan) -> None:
        for r in range(self.options.repetitions):
            self.report.progress = f"{r} of {self.options.repetitions} rounds complete"
            began, self._once = time.monotonic(), 0.0
            if len(self.sides) > 1 and all(side.lost for side in self.sides[1:]):
                break  # nothing to compare with; the first round of ours is there
            n = r % len(self.sides)
            # ours first in the first round: its tokenizer makes the prompts
            for side in self.sides[n:] + self.sides[:n]:
                if self.sides[0].lost:  # nothing to compare with
                    return
                if not side.lost:
                    self._round(r, side, plan)
            self.report.progress = f"{r + 1} of {self.options.repetitions} rounds complete"
            self._timed(self._compare)
            rounds = self.options.repetitions
            if r + 1 < rounds and not self.options.time_for(time.monotonic() - began - self._once):
                self.report.notes.append(f"{r + 1} of {rounds} rounds: there was no time for more (--limit)")
                break

    def _timed(self, work: Callable[[], None]) -> None:
        began = time.monotonic()
        work()
        self._once += time.monotonic() - began

    def _round(self, r: int, side: Contender, plan: Plan) -> None:
        name = side.contestant.name
        say(f"round {r + 1} of {self.options.repetitions}: starting {name}")
        try:
            with side.up() as running, watched(self.report, name, running.target) as watch:
                if r == 0:
                    watch.mark("greedy outputs")
                    self._timed(lambda: self._first(side, running))
                self._measure(r, side, running, plan, watch)
        except (ServerError, RequestFailed) as error:
            self._lose(side, str(error))

    def _lose(self, side: Contender, error: str) -> None:
        """A side that does not come up or dies is a row, and is not tried again."""
        side.lost = True
        c = side.contestant
        c.errors.append(error)
        if not any(c.name in row.failures for row in self.report.rows):
            self.report.row("server", "up").failures[c.name] = error
        self.report.trouble(OURS_FAILED if c.ours else PEER_FAILED, f"{c.name}: {error}")

    def _measure(self, r: int, side: Contender, running: Running, plan: Plan, watch: CacheWatch) -> None:
        c = side.contestant
        if self.text_only and not isinstance(self.source, TextSource):
            self.source = TextSource(running.target.tokenize)  # the first side up is ours
        plan = self.plan or plan
        bench = Bench(self.report, c, running.target, self.source, plan, self.options.workloads, r, self.salt)
        watch.mark("warm-up")
        if self.options.warm_up:
            bench.warm_up()
        if self.plan is None:
            self.plan = bench.plan = self._bearable(bench, plan)
        for workload, measure in bench.steps():
            say(f"round {r + 1}: {c.name}: {workload}")
            watch.mark(workload)
            try:
                measure()
            except RequestFailed as error:
                bench.failed(workload, str(error))
                c.errors.append(f"{workload}: {error}")
                status = OURS_FAILED if c.ours else PEER_FAILED
                self.report.trouble(status, f"{c.name}: {workload}: {error}")
                running.check()  # a dead server ends the round
                if "hangs" in str(error):
                    raise
        self._rates.setdefault(c.name, []).extend(bench.rates)
        self._counts.setdefault(c.name, {}).update(bench.prompt_ns)

    def _bearable(self, bench: Bench, plan: Plan) -> Plan:
        """`plan` without what would take too long here, settled once for all sides and rounds by ours."""
        if max(*plan.prompts, *plan.depths, plan.context, 0, 0) <= 2 * CALIBRATION:
            return plan
        reads, writes = bench.calibrate()
        plan = plan.within(reads, self.options.longest, self.report)
        read, written = plan.tokens()
        seconds = (read / reads + written / max(writes, 1e-9)) * len(self.sides) * self.options.repetitions
        say(f"about {seconds / 60:.0f} minutes if all sides are as fast as ours")
        return plan

    # ------------------------------------------------------------------------------------------------ the outputs

    def _first(self, side: Contender, running: Running) -> None:
        """Once a side: instruction sets against ours, token ids and templates of the texts, greedy outputs."""
        c, target = side.contestant, running.target
        ours = self.sides[0].contestant
        if not c.ours:
            c.lower_isa = missing_isa(ours.isa, c.isa)
            if c.lower_isa:
                sets = ", ".join(c.lower_isa)
                self.report.trouble(NOT_COMPARABLE, f"{c.name} does not use {sets}, which ours does: no ratio is given")
        if c.ours:
            self._figures = figures(target)
        elif self.report.model:
            other, known = differs(target, self._figures, Path(self.report.model["file"]), self.report.model["sha256"])
            c.notes.append(known)
            if other:
                c.other_file = True
                self.report.trouble(NOT_COMPARABLE, f"{c.name}: {known}: no ratio is given, no output compared")
                return
        if target.dialect == "native":
            self._ids[c.name] = [target.tokenize(text) for text in TEXTS]
            self._templates[c.name] = [_template(target, text) for text in TEXTS]
        prompts: Sequence[list[int] | str] = TEXTS
        if target.dialect == "native" and not self.text_only:
            prompts = self.source.texts = self._ids[ours.name]
        self._answers[c.name] = [target.greedy(p, GREEDY_TOKENS) for p in prompts]
        if target.dialect == "native":
            self._said[c.name] = [list(zip(a.tokens, a.gaps, strict=False)) for a in self._answers[c.name]]

    def _compare(self, *, interrupted: bool = False) -> None:
        """Once, after the first round, with what each side has said until then."""
        if self._compared:
            return
        self._compared = True
        ours = self.sides[0].contestant.name
        compare_tokens(self.report, self._ids)
        if interrupted:
            compare(self.report, self._said)
        else:
            compare(self.report, self._said, others=self._ask_other, witness=self._ask_builds)
        for name, answers in self._answers.items():
            if name not in self._said and ours in self._answers:
                compare_texts(self.report, ours, self._answers[ours], name, answers)
        for name, texts in self._templates.items():
            differ = sum(a != b for a, b in zip(self._templates.get(ours, []), texts, strict=False))
            if differ:
                text = f"{name} renders the chat template of {differ} of {len(texts)} texts otherwise than ours"
                self.report.trouble(NOT_COMPARABLE, text)

    def _ask_other(self) -> dict[str, list[Greedy]]:
        """What the peer says to the same prompts on its other backend; empty where it has none, or fails."""
        if self.other is None or not self.source.texts:
            return {}
        name = self.other.contestant.name
        say(f"outputs of {name}, because one parts from that of ours")
        try:
            with self.other.up() as running:
                answers = [running.target.greedy(p, GREEDY_TOKENS) for p in self.source.texts]
        except (ServerError, RequestFailed) as error:
            self.report.notes.append(f"{name}, to tell noise from faults: {error}")
            return {}
        self.report.notes.append(f"{name}, to tell noise from faults: {self.other.contestant.command}")
        return {name: [list(zip(a.tokens, a.gaps, strict=False)) for a in answers]}

    def _ask_builds(self, faults: Sequence[tuple[Divergence, Sequence[int]]]) -> None:
        """Settle the faults that another build of the peer's library explains."""
        prompts = [p for p in self.source.texts if not isinstance(p, str)]
        if self.builds is not None and prompts:
            say("libllama is asked, because outputs part")
            Witness(self.report, self.builds, prompts, self.sides[0].contestant.name).settle(faults)

    def _check_clocks(self) -> None:
        """Server-side timings as a cross-check; prompt lengths as each side counted them."""
        for name, rates in self._rates.items():
            client, server = mean([a for _, a, _ in rates] or [0.0]), mean([b for _, _, b in rates] or [0.0])
            if server and abs(client - server) > CLOCKS_AGREE * server:
                text = f"{name}: it reports {server:.1f} tok/s in decode, the client's clock says {client:.1f}"
                self.report.notes.append(text)
            self._leave_out(name, rates)
        ours = self._counts.get(self.sides[0].contestant.name, {})
        for name, counts in self._counts.items():
            differ = [k for k, n in counts.items() if n and ours.get(k) and n != ours[k]]
            if differ:
                k = differ[0]
                text = f"{name} counts other prompt lengths than ours: {k}: {counts[k]} against {ours[k]} tokens"
                self.report.trouble(NOT_COMPARABLE, text)

    def _leave_out(self, name: str, rates: list[tuple[str, float, float]]) -> None:
        """Rows of `name` for which its clock and the client's disagree by more than half."""
        for workload in dict.fromkeys(w for w, _, _ in rates):
            client = mean([a for w, a, _ in rates if w == workload])
            server = mean([b for w, _, b in rates if w == workload])
            if abs(client - server) <= CLOCKS_APART * server:
                continue
            text = f"{name}: {workload} is in no ratio: it reports {server:.1f} tok/s, the client's clock says "
            self.report.notes.append(f"{text}{client:.1f}")
            for row in self.report.rows:
                if row.workload == workload or row.workload.startswith(f"{workload}, "):
                    row.clocks_apart += [name] * (row.metric in ("tok/s", "gap ms"))


def _template(target: Target, text: str) -> str:
    try:
        reply = target.post("/apply-template", {"messages": [{"role": "user", "content": text}]})
    except RequestFailed as error:
        return f"refused: {str(error)[:40]}"
    return str(reply.get("prompt", ""))
