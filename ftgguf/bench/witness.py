"""Another build of llama.cpp as a witness: where ours and a peer part, what does libllama say at that very place?

A peer may be built for other instruction sets than our kernels, and what llama.cpp's builds differ by among themselves
is noise by definition. Asked is the library that llama-cpp-python installs, in a process of its own, between rounds:
nothing that is timed runs meanwhile, and it has ended before the next round begins.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ftgguf.bench.child import Child, ChildError
from ftgguf.bench.report import Divergence, Report
from ftgguf.engine.memory import available_memory

INSTALL = "pip install llama-cpp-python==0.3.36"
LAYOUTS = ("plain", "repacked")
"""The mapped file first: it costs no memory of its own."""


class NotInstalled(ChildError):
    """There is no libllama here; the text says how to get it."""


class Builds(Protocol):
    """Other builds of llama.cpp, by name of their weights' layout."""

    def load(self, layout: str) -> str:
        """What it is: version, layout, instruction sets. Raises ChildError where it is not to be had."""

    def next_token(self, prompt: Sequence[int], forced: Sequence[int]) -> tuple[int, float]:
        """Its most probable token after `prompt` and then `forced`, evaluated one by one as generation does, and the
        gap to the next in nats. Raises ChildError."""

    def end(self) -> None:
        """Free what is loaded."""


@dataclass(slots=True)
class InProcess:
    """libllama of llama-cpp-python in a child process. `argv`: the flags that it takes; `size`: bytes of the model."""

    argv: list[str]
    size: int
    timeout: float
    _child: Child | None = None

    def load(self, layout: str) -> str:
        self.end()
        if importlib.util.find_spec("llama_cpp") is None:
            raise NotInstalled(f"none is here ({INSTALL})")
        if layout != "plain" and available_memory() < 2 * self.size + (2 << 30):
            # a second copy of the weights would push the file out of the page cache, which the next round starts from
            raise ChildError(f"memory does not hold a {layout} copy of the weights beside the file")
        self._child = Child(self.timeout, ours=False)
        facts: dict[str, Any] = self._child.ask("load", engine=layout, argv=self.argv)
        return f"{facts['build']}, {facts['layout']} weights, instruction sets {' '.join(facts['isa'])}"

    def next_token(self, prompt: Sequence[int], forced: Sequence[int]) -> tuple[int, float]:
        assert self._child is not None
        answer = self._child.ask("greedy", prompt=list(prompt), forced=list(forced), n=1, ignore_ends=True)
        token, gap = answer["tokens"][0]
        return int(token), float(gap)

    def end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


@dataclass(slots=True)
class Witness:
    """Settles faults between ours and a peer of llama.cpp's make, place by place (`outputs.Witness`).

    It is no fault where another build says our token, nor where it parts from the peer at that place itself, by as
    much. Where it says the peer's token and ours does not, the fault stays: no difference elsewhere excuses it.
    """

    report: Report
    builds: Builds
    prompts: Sequence[Sequence[int]]
    ours: str

    def settle(self, faults: Sequence[tuple[Divergence, Sequence[int]]]) -> None:
        """Set `settled` of each fault that is none; the peer's tokens of that prompt go with each."""
        left = list(faults)
        try:
            for layout in LAYOUTS:
                left = self._asked(layout, left) if left else []
        except NotInstalled as error:
            self._note(f"no other build of llama.cpp was asked where outputs part, to tell noise from faults: {error}")
        finally:
            self.builds.end()

    def _asked(
        self, layout: str, faults: list[tuple[Divergence, Sequence[int]]]
    ) -> list[tuple[Divergence, Sequence[int]]]:
        """Those of `faults` that the build of that layout does not explain. Raises NotInstalled."""
        left = list(faults)
        try:
            what = self.builds.load(layout)
            self._note(f"asked where outputs part, to tell noise from faults, and not measured: {what}")
            said: dict[tuple[int, ...], tuple[int, float]] = {}
            for fault, theirs in faults:
                place = (fault.prompt, *theirs[: fault.index])
                if place not in said:  # layouts of a peer often part from ours at the same place
                    said[place] = self.builds.next_token(self.prompts[fault.prompt], theirs[: fault.index])
                if self._explained(fault, layout, *said[place]):
                    left.remove((fault, theirs))
        except NotInstalled:
            raise
        except ChildError as error:
            self._note(f"libllama with {layout} weights, to tell noise from faults: {error}")
        return left

    def _explained(self, fault: Divergence, layout: str, token: int, gap: float) -> bool:
        """Whether that build's most probable `token`, `gap` before its next, explains `fault`: then it is settled."""
        ours_first = fault.a == self.ours
        own, peers = (fault.token_a, fault.token_b) if ours_first else (fault.token_b, fault.token_a)
        peer, gap_of_peer = (fault.b, fault.gap_b) if ours_first else (fault.a, fault.gap_a)
        name = f"libllama with {layout} weights"
        if token == own:
            fault.settled = f"{name}, llama.cpp too, says {token} there as {self.ours} does"
        elif token != peers and 0 <= fault.gap <= max(gap, gap_of_peer):
            fault.settled = f"{name}, llama.cpp too, says {token} there, which is neither"
        else:
            place = f"at token {fault.index} of prompt {fault.prompt}"
            self._note(f"{name} says {token} {place}, {peer} {peers}, {self.ours} {own}: this explains nothing")
        return bool(fault.settled)

    def _note(self, text: str) -> None:
        if text not in self.report.notes:
            self.report.notes.append(text)
