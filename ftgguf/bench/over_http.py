"""Ours and a peer as HTTP servers, one at a time, interleaved: the clocks are the client's."""

from __future__ import annotations

from collections.abc import Sequence

from ftgguf.bench.alone import config_for
from ftgguf.bench.client import Answer, RequestFailed, Target
from ftgguf.bench.contenders import Contender, Running, make_contenders
from ftgguf.bench.in_process import GREEDY_TOKENS, say
from ftgguf.bench.options import Options
from ftgguf.bench.outputs import Greedy, compare, compare_texts, compare_tokens
from ftgguf.bench.peers import Peer
from ftgguf.bench.placement import best_placement, check_budget
from ftgguf.bench.prompts import TEXTS
from ftgguf.bench.report import NOT_COMPARABLE, OURS_FAILED, PEER_FAILED, Report, missing_isa
from ftgguf.bench.servers import ServerError
from ftgguf.bench.stats import mean
from ftgguf.bench.workloads import Bench, Plan, Source, TextSource, make_plan
from ftgguf.pull.ollama_gguf import open_model

CLOCKS_AGREE = 0.05
"""Client's and server's decode rates may differ by this share before the report says so."""


def compare_over_http(report: Report, options: Options, path: str, peer: Peer) -> None:
    """Measure every workload in `options.repetitions` rounds. What fails becomes rows and troubles of `report`."""
    with open_model(path) as gguf:
        limit, n_vocab = gguf.arch("context_length"), len(gguf.metadata["tokenizer.ggml.tokens"])
        n_layers = gguf.arch("block_count")
    tests = options.tests
    prompts = list(dict.fromkeys(t.n_prompt for t in tests if t.n_prompt and not t.n_gen))
    gens = list(dict.fromkeys(t.n_gen for t in tests if t.n_gen and not t.n_prompt))
    plan = make_plan(options.workloads, prompts, gens, [d for d in options.depths if d], limit, report)
    engine = options.engine_lines()[0]
    config = config_for(path, ["-c", str(plan.cells), *engine], ())
    flags = ["-m", path, "-c", str(plan.cells), "-np", "4", "-kvu", *engine]
    for spelling, name in (("-t", "threads"), ("-tb", "threads_batch")):
        if f"cpu.{name}" not in config.given:
            flags += [spelling, str(getattr(config.cpu, name))]  # both sides get the same, said aloud
    report.settings |= {
        "context": f"{config.context.size} cells, 4 slots, unified",
        "batch": f"{config.context.n_batch}/{config.context.n_ubatch}",
        "KV": f"{config.context.type_k}/{config.context.type_v}",
        "threads": f"{config.cpu.threads} decode, {config.cpu.threads_batch} prefill",
        "rounds": str(options.repetitions),
        "sampling": "greedy, end of text ignored",
        "prefix cache": "empty, except where a row says `on` or `@`: there the prefix is cached",
        "clock": "the client's",
    }
    text_only = peer.kind == "ollama" or (peer.kind == "url" and not _takes_ids(peer, options))
    placement = best_placement(report, options, flags, peer, n_layers) if peer.kind == "llama-server" else None
    HttpDuel(report, options, make_contenders(options, flags, peer, placement), Source(n_vocab), text_only).run(plan)
    check_budget(report, config.placement.vram_budget)


def _takes_ids(peer: Peer, options: Options) -> bool:
    from ftgguf.bench.client import identify

    try:
        return identify(peer.where, options.peer_model, options.timeout).dialect == "native"
    except RequestFailed:
        return False


class HttpDuel:
    """Rounds over contenders. `text_only`: a side takes no token ids, so that all get text."""

    def __init__(
        self, report: Report, options: Options, sides: list[Contender], source: Source, text_only: bool
    ) -> None:
        self.report = report
        self.options = options
        self.sides = sides
        self.source = source
        self.text_only = text_only
        self._said: dict[str, list[Greedy]] = {}
        self._answers: dict[str, list[Answer]] = {}
        self._ids: dict[str, list[list[int]]] = {}
        self._templates: dict[str, list[str]] = {}
        self._rates: dict[str, list[tuple[float, float]]] = {}
        self._counts: dict[str, dict[str, int]] = {}
        report.contestants = [side.contestant for side in sides]
        report.notes.append(
            "a side is brought up as a server when its turn comes, once a round; order rotated every round"
        )
        if text_only:
            report.notes.append("prompts are text, as the peer takes no token ids")

    def run(self, plan: Plan) -> None:
        """All rounds."""
        for r in range(self.options.repetitions):
            n = r % len(self.sides)
            # ours first in the first round: its tokenizer makes the prompts
            for side in self.sides[n:] + self.sides[:n]:
                if self.sides[0].lost:  # nothing to compare with
                    return
                if not side.lost:
                    self._round(r, side, plan)
            if r == 0:
                self._compare()
        self._check_clocks()

    def _round(self, r: int, side: Contender, plan: Plan) -> None:
        name = side.contestant.name
        say(f"round {r + 1} of {self.options.repetitions}: starting {name}")
        try:
            with side.up() as running:
                if r == 0:
                    self._first(side, running)
                self._measure(r, side, running, plan)
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

    def _measure(self, r: int, side: Contender, running: Running, plan: Plan) -> None:
        c = side.contestant
        if self.text_only and not isinstance(self.source, TextSource):
            self.source = TextSource(running.target.tokenize)  # the first side up is ours
        bench = Bench(self.report, c, running.target, self.source, plan, self.options.workloads, r)
        if self.options.warm_up:
            bench.warm_up()
        for workload, measure in bench.steps():
            say(f"round {r + 1}: {c.name}: {workload}")
            try:
                measure()
            except RequestFailed as error:
                metric = "tok/s in all" if " x " in workload else "tok/s"
                self.report.row(workload, metric, paired=True).failures[c.name] = str(error)
                c.errors.append(f"{workload}: {error}")
                status = OURS_FAILED if c.ours else PEER_FAILED
                self.report.trouble(status, f"{c.name}: {workload}: {error}")
                running.check()  # a dead server ends the round
                if "hangs" in str(error):
                    raise
        self._rates.setdefault(c.name, []).extend(bench.rates)
        self._counts.setdefault(c.name, {}).update(bench.prompt_ns)

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
        if target.dialect == "native":
            self._ids[c.name] = [target.tokenize(text) for text in TEXTS]
            self._templates[c.name] = [_template(target, text) for text in TEXTS]
        prompts: Sequence[list[int] | str] = TEXTS
        if target.dialect == "native" and not self.text_only:
            prompts = self._ids[ours.name]
        self._answers[c.name] = [target.complete(p, GREEDY_TOKENS, n_probs=3) for p in prompts]
        if target.dialect == "native":
            self._said[c.name] = [list(zip(a.tokens, a.gaps, strict=False)) for a in self._answers[c.name]]

    def _compare(self) -> None:
        ours = self.sides[0].contestant.name
        compare_tokens(self.report, self._ids)
        compare(self.report, self._said)
        for name, answers in self._answers.items():
            if name not in self._said and ours in self._answers:
                compare_texts(self.report, ours, self._answers[ours], name, answers)
        for name, texts in self._templates.items():
            differ = sum(a != b for a, b in zip(self._templates.get(ours, []), texts, strict=False))
            if differ:
                text = f"{name} renders the chat template of {differ} of {len(texts)} texts otherwise than ours"
                self.report.trouble(NOT_COMPARABLE, text)

    def _check_clocks(self) -> None:
        """Server-side timings as a cross-check; prompt lengths as each side counted them."""
        for name, rates in self._rates.items():
            client, server = mean([a for a, _ in rates] or [0.0]), mean([b for _, b in rates] or [0.0])
            if server and abs(client - server) > CLOCKS_AGREE * server:
                text = f"{name}: it reports {server:.1f} tok/s in decode, the client's clock says {client:.1f}"
                self.report.notes.append(text)
        ours = self._counts.get(self.sides[0].contestant.name, {})
        for name, counts in self._counts.items():
            differ = [k for k, n in counts.items() if n and ours.get(k) and n != ours[k]]
            if differ:
                k = differ[0]
                text = f"{name} counts other prompt lengths than ours: {k}: {counts[k]} against {ours[k]} tokens"
                self.report.trouble(NOT_COMPARABLE, text)


def _template(target: Target, text: str) -> str:
    try:
        reply = target.post("/apply-template", {"messages": [{"role": "user", "content": text}]})
    except RequestFailed as error:
        return f"refused: {str(error)[:40]}"
    return str(reply.get("prompt", ""))
