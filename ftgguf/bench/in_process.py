"""ours and libllama, each in a process of its own, step against step: no server, no sampling, no template.

Both weight layouts of llama.cpp are peers: its default (repacked) and the mapped file, since neither wins everywhere;
one where ggml has no repacked kernels for the file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ftgguf.bench.child import Child, ChildError, openmp_note
from ftgguf.bench.options import Options
from ftgguf.bench.outputs import Greedy, compare, compare_tokens
from ftgguf.bench.plan import SpeedTest, random_tokens
from ftgguf.bench.prompts import TEXTS
from ftgguf.bench.report import NOT_COMPARABLE, OURS_FAILED, PEER_FAILED, Contestant, Divergence, Report, missing_isa
from ftgguf.engine.memory import available_memory

GREEDY_TOKENS = 48
"""Tokens of each output that is compared."""
ENGINES = {"ftgguf": "ftgguf", "llama.cpp repacked": "repacked", "llama.cpp plain": "plain"}
"""Contestant -> what the worker loads."""


@dataclass(slots=True)
class Side:
    """A contestant and its process."""

    contestant: Contestant
    engine: str
    child: Child | None = None
    lost: bool = False
    n_vocab: int = 0
    warm: set[SpeedTest] = field(default_factory=set)

    def end(self) -> None:
        if self.child is not None:
            self.child.end()
            self.child = None
            self.warm.clear()


class SameLayout:
    """Ours again with its weights in a peer's layout, for outputs that part by more than rounding should move them.

    There ours calls the same kernels as the peer: logits are equal to the bit (tests/models), and tokens must be.
    By default ours has both layouts, each where it is faster, and its rounding is neither peer's.
    """

    def __init__(self, timeout: float, argv: list[str], prompts: list[list[int]], layout: str) -> None:
        """`argv`: our engine's flags; `layout`: the one that it had."""
        self.timeout, self.argv, self.prompts, self.layout = timeout, argv, prompts, layout
        self.children: dict[str, Child] = {}

    def __call__(self, fault: Divergence, theirs: Sequence[int], free: Callable[[], None]) -> str:
        """Why `fault` is none, or an empty string. `theirs`: the peer's tokens; `free` makes room for a process.

        Raises ChildError where ours fails in that layout.
        """
        peer = fault.b if fault.b in ENGINES and fault.b != "ftgguf" else fault.a
        layout = ENGINES[peer]
        if layout == self.layout:
            return ""
        if layout not in self.children:
            free()
            say(f"outputs of ftgguf with {layout} weights, because one parts from that of {peer}")
            self.children[layout] = Child(self.timeout, ours=True)
            argv = [*self.argv, "--repack", "--weights-layout", layout]
            self.children[layout].ask("load", engine="ftgguf", argv=argv)
        prompt = self.prompts[fault.prompt]
        answer = self.children[layout].ask("greedy", prompt=prompt, n=len(theirs))["tokens"]
        same = [int(token) for token, _ in answer] == list(theirs)
        return f"with {layout} weights ours says the same tokens as {peer}" if same else ""

    def end(self) -> None:
        """End the processes."""
        while self.children:
            self.children.popitem()[1].end()


class Duel:
    """One comparison. `argv`: the flags of our engine; `shared`: those of them that libllama takes too."""

    def __init__(self, report: Report, options: Options, argv: list[str], shared: list[str], size: int) -> None:
        self.report = report
        self.options = options
        self.argv = {True: argv, False: shared}
        # the mapped file is shared, ours and libllama's repacked copies are not
        self.together = available_memory() >= 3 * size + (2 << 30)
        self.sides = [Side(Contestant(name, ours=name == "ftgguf"), engine) for name, engine in ENGINES.items()]
        report.contestants = [side.contestant for side in self.sides]

    def run(self) -> None:
        """Measure everything; failures become rows. Interrupts pass through, with the report as far as it came."""
        report = self.report
        how = "all loaded at once" if self.together else "one loaded at a time, as memory does not hold all"
        report.notes.append(f"each side in a process of its own, {how}; order rotated every round")
        try:
            self._outputs()
            for round_number, side, test in self._schedule():
                if not side.lost:
                    self._measure(round_number, side, test)
            for side in self.sides:
                self._note_memory(side)
        except KeyboardInterrupt:
            report.progress = self._progress()
            raise
        finally:
            for side in self.sides:
                side.end()

    def _progress(self) -> str:
        """Whole rounds of each test: those that every side which has not failed was measured in."""
        names = [side.contestant.name for side in self.sides if not side.lost]
        rows = {row.workload: row.samples for row in self.report.rows if row.metric == "tok/s"}
        found = []
        for test in self.options.tests:
            done = min((len(rows.get(test.name, {}).get(name, [])) for name in names), default=0)
            found.append(f"{test.name}: {done} of {self.options.repetitions} rounds")
        return ", ".join(found)

    def _schedule(self) -> Iterator[tuple[int, Side, SpeedTest]]:
        """Interleaved; test by test where all are loaded, else load by load. Each test once, and again as long as
        `--limit` has time for it."""
        rounds, tests = range(self.options.repetitions), self.options.tests
        if self.together:
            for test in tests:
                for r in rounds:
                    began = time.monotonic()
                    yield from ((r, side, test) for side in self._rotated(r))
                    if self._over(r, began, f"{test.name}: "):
                        break
            return
        for r in rounds:
            began = time.monotonic()
            for side in self._rotated(r):
                yield from ((r, side, test) for test in tests)
            if self._over(r, began, ""):
                break

    def _over(self, r: int, began: float, what: str) -> bool:
        """Whether no time is left for a round as long as round `r`; noted."""
        rounds = self.options.repetitions
        if r + 1 == rounds or self.options.time_for(time.monotonic() - began):
            return False
        self.report.notes.append(f"{what}{r + 1} of {rounds} rounds: there was no time for more (--limit)")
        return True

    def _rotated(self, r: int) -> list[Side]:
        n = r % len(self.sides)
        return self.sides[n:] + self.sides[:n]

    # ------------------------------------------------------------------------------------------------- processes

    def _ready(self, side: Side) -> Child:
        """The side's process with its engine loaded. Raises ChildError."""
        if side.child is not None:
            return side.child
        self._free()
        say(f"loading {side.contestant.name}")
        side.child = Child(self.options.timeout, ours=side.contestant.ours)
        facts = side.child.ask("load", engine=side.engine, argv=self.argv[side.contestant.ours])
        c = side.contestant
        c.build, c.isa, c.layout = facts["build"], list(facts["isa"]), facts["layout"]
        c.load_seconds = facts["load_seconds"]
        c.notes = [openmp_note(ours=c.ours), *facts["notes"]]
        c.command = " ".join([f"{'ftgguf' if c.ours else 'libllama'}, in process:", *self.argv[c.ours]])
        side.n_vocab = facts["n_vocab"]
        if c.ours and facts["one_layout"]:
            self._one_layout(facts["one_layout"])
        ours = self.sides[0].contestant
        if c.ours and facts["device"] != "CPU":
            text = (
                f"ours runs on {facts['device']} and libllama of this wheel on the CPU: give -ngl 0 or --llama-server"
            )
            self.report.trouble(NOT_COMPARABLE, text)
        if not c.ours:
            c.lower_isa = missing_isa(ours.isa, c.isa)
            if c.lower_isa:
                text = f"{c.name} does not use {', '.join(c.lower_isa)}, which ours does: no ratio is given"
                self.report.trouble(NOT_COMPARABLE, text)
        return side.child

    def _one_layout(self, why: str) -> None:
        """The same peer twice would be two chances, and its better half by chance the headline's."""
        twice = [s for s in self.sides if s.engine == "repacked"]
        if not twice:
            return
        self.sides = [s for s in self.sides if s not in twice]
        self.report.contestants = [s.contestant for s in self.sides]
        self.report.notes.append(f"llama.cpp's two weight layouts are one, measured once: {why}")

    def _free(self) -> None:
        """Room for one more process, where memory does not hold all."""
        if self.together:
            return
        for other in self.sides:
            self._note_memory(other)
            other.end()

    def _lose(self, side: Side, error: ChildError, workload: str, metric: str = "tok/s") -> None:
        """A failure is a row, and the end of that side."""
        side.lost = True
        side.end()
        name = side.contestant.name
        side.contestant.errors.append(str(error))
        self.report.row(workload, metric).failures[name] = str(error)
        status = OURS_FAILED if side.contestant.ours else PEER_FAILED
        self.report.trouble(status, f"{name}: {error}")

    def _note_memory(self, side: Side) -> None:
        if side.child is None:
            return
        try:
            memory = side.child.ask("resident")
        except ChildError as error:
            self._lose(side, error, "resident set", "bytes")
            return
        c = side.contestant
        c.rss_steady, c.rss_peak = memory["now"], max(c.rss_peak, memory["peak"])

    # ------------------------------------------------------------------------------------------------- measuring

    def _outputs(self) -> None:
        """Token ids and greedy outputs of every side on the same texts."""
        said: dict[str, list[Greedy]] = {}
        ids: dict[str, list[list[int]]] = {}
        prompts: list[list[int]] | None = None
        for side in list(self.sides):
            name = side.contestant.name
            if side not in self.sides:
                continue  # ours, loaded first, found that it is another one's twin
            try:
                child = self._ready(side)
                own = [child.ask("tokenize", text=text)["tokens"] for text in TEXTS]
                prompts = prompts or own  # the first side's ids go to all
                say(f"outputs of {name}")
                answers = [child.ask("greedy", prompt=p, n=GREEDY_TOKENS)["tokens"] for p in prompts]
            except ChildError as error:
                self._lose(side, error, "outputs", "greedy")
                continue
            ids[name] = own
            said[name] = [[(int(t), float(g)) for t, g in answer] for answer in answers]
        compare_tokens(self.report, ids)
        again = SameLayout(self.options.timeout, self.argv[True], prompts or [], self.sides[0].contestant.layout)
        try:
            compare(self.report, said, lambda fault, tokens: again(fault, tokens, self._free))
        except ChildError as error:
            self.report.trouble(OURS_FAILED, f"ftgguf in a peer's layout: {error}")
        finally:
            again.end()
        sizes = {s.contestant.name: s.n_vocab for s in self.sides if not s.lost}
        if len(set(sizes.values())) > 1:
            self.report.trouble(NOT_COMPARABLE, f"the sides disagree about the vocabulary's size: {sizes}")

    def _measure(self, round_number: int, side: Side, test: SpeedTest) -> None:
        n_vocab = min(s.n_vocab for s in self.sides if s.n_vocab)
        t = random_tokens(test, n_vocab, self.options.seed)
        name = side.contestant.name
        fields = {"test": [test.n_prompt, test.n_gen, test.n_depth], "tokens": [t.depth, t.prompt, t.gen]}
        try:
            child = self._ready(side)
            if self.options.warm_up and test not in side.warm:
                child.ask("warm_up", **fields)
                side.warm.add(test)
            ns = child.ask("run", **fields)["ns"]
        except ChildError as error:
            self._lose(side, error, test.name)
            return
        speed = test.n_tokens / (ns * 1e-9)
        row = self.report.row(test.name, "tok/s", paired=True)
        row.samples.setdefault(name, []).append(speed)
        say(f"{test.name} round {round_number + 1}: {name} {speed:.1f} tok/s")


def say(line: str) -> None:
    """Progress, on standard error."""
    print(line, file=sys.stderr, flush=True)
