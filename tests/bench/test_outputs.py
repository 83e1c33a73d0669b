"""Do two sides say the same? What parts them is noise or a fault, by the rules of docs/bench.md."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ftgguf.bench import headline, outputs, table
from ftgguf.bench.client import Answer
from ftgguf.bench.report import (
    NOT_COMPARABLE,
    OK,
    OUTPUTS_DIFFER,
    Divergence,
)

from .report_support import make_report, said


def test_divergence_where_both_sides_are_sure_is_a_fault() -> None:
    report = make_report()
    outputs.compare(report, {"ftgguf": [said(1, 2, 3)], "A": [said(1, 2, 4)], "B": [said(1, 2, 4)]})
    assert report.status == OUTPUTS_DIFFER
    assert len(report.outputs.faults()) == 2
    assert "token 2 of prompt 0 (3 and 4, gaps 1.000 and 1.000" in report.troubles[0].text
    assert headline.headline(report)[0].startswith("no headline ratio: greedy outputs of ftgguf and A part")
    assert report.ratio(report.rows[0], report.peers[0]) is None


def test_a_fault_with_one_placement_leaves_no_ratio_to_the_other() -> None:
    """Ours is at fault or not: a peer's slower placement that says the same by luck would be all that is shown."""
    report = make_report()
    row = report.row("pp", "tok/s")
    row.samples = {"ftgguf": [2.0, 2.0], "A": [1.9, 1.9], "B": [0.5, 0.5]}
    assert None not in [report.ratio(row, p) for p in report.peers]
    report.outputs.divergences.append(Divergence("ftgguf", "A", 0, 2, 3, 4, 1.0, 1.0))
    assert [report.ratio(row, p) for p in report.peers] == [None, None]
    assert [report.no_ratio(p) for p in report.peers] == [
        "its outputs differ from ours by more than noise",
        "our outputs differ from those of A by more than noise",
    ]


def test_divergence_at_a_tie_is_noise() -> None:
    report = make_report()
    outputs.compare(report, {"ftgguf": [said(1, 2, gap=0.01)], "A": [said(1, 3, gap=0.02)]})
    assert report.status == OK
    assert len(report.outputs.divergences) == 1


def test_a_tie_of_one_side_alone_is_no_excuse() -> None:
    """Its tie was between two tokens of its own; the other side was sure of a third."""
    report = make_report()
    outputs.compare(report, {"ftgguf": [said(1, 2, gap=0.0)], "A": [said(1, 3, gap=0.5)]})
    assert report.status == OUTPUTS_DIFFER


def test_what_the_peers_own_layouts_differ_by_is_noise() -> None:
    """A and B are one library: they part at a gap of 0.3 themselves, so 0.2 between ours and A is no fault."""
    report = make_report()
    a, b = said(1, 3, gap=0.3), said(1, 4, gap=0.3)
    ours = said(1, 5, gap=0.2)
    outputs.compare(report, {"ftgguf": [ours], "A": [a], "B": [b]})
    assert report.outputs.noise == pytest.approx(0.3)
    assert report.status == OK


def parted(rng: random.Random, scale: float) -> Sequence[outputs.Greedy]:
    """Eight texts that part from everybody's at their first token, gaps exponentially distributed."""
    return [[(rng.randrange(10**9), rng.expovariate(1 / scale))] for _ in range(8)]


def alarms(ours: float) -> int:
    """How many of 400 comparisons call ours at fault, whose gaps are `ours` times its peers'. Where two part the larger
    of both gaps counts; three peers are 24 partings among themselves, as in reports/cuda-4096.md."""
    rng, found = random.Random(5), 0
    for _ in range(400):
        report = make_report()
        others = {"C": parted(rng, 0.1)}
        said_by = {"ftgguf": parted(rng, 0.1 * ours), "A": parted(rng, 0.1), "B": parted(rng, 0.1)}
        outputs.compare(report, said_by, others=lambda others=others: others)  # type: ignore[misc]
        found += report.status == OUTPUTS_DIFFER
    return found


def test_equal_sides_whose_texts_all_part_are_seldom_called_different() -> None:
    """9 of 400, where the rule says one in a hundred: the mean is of few partings. The peers' largest gap as the bound
    called 100 of the same 400 a fault. A side whose gaps are six times theirs is told apart nearly always."""
    assert alarms(1.0) <= 12
    assert alarms(6.0) >= 360


def test_few_partings_of_the_peers_say_nothing_of_how_far_noise_goes() -> None:
    """Seven of eight: the bound is the largest that was seen."""
    report = make_report()
    same: outputs.Greedy = said(1, 2)
    a, b = [same] + [said(1, 3, gap=0.3)] * 7, [same] + [said(1, 4, gap=0.3)] * 7
    outputs.compare(report, {"ftgguf": [same] + [said(1, 5, gap=0.31)] * 7, "A": a, "B": b})
    assert report.outputs.noise == pytest.approx(0.3)
    assert report.status == OUTPUTS_DIFFER


def test_what_ours_says_in_the_peers_layout_settles_a_fault() -> None:
    """And nothing else does: an empty answer leaves it."""
    for why, status in (("the same tokens there", OK), ("", OUTPUTS_DIFFER)):
        report, asked = make_report(), []

        def settle(fault: Divergence, tokens: Sequence[int], why: str = why, asked: list[list[int]] = asked) -> str:
            asked.append(list(tokens))
            return why

        said_by = {"ftgguf": [said(1, 5, gap=0.9)], "A": [said(1, 3, gap=0.9)], "B": [said(1, 3, gap=0.9)]}
        outputs.compare(report, said_by, settle)
        assert report.status == status
        assert asked == [[1, 3], [1, 3]]
        assert [d.settled for d in report.outputs.divergences] == [why, why]
        assert ("FAULT" in table.render(report)) == (not why)


def test_unknown_gaps_do_not_excuse() -> None:
    report = make_report()
    outputs.compare(report, {"ftgguf": [said(1, gap=-1.0)], "A": [said(2, gap=-1.0)]})
    assert report.status == OUTPUTS_DIFFER


def test_tokenizers_that_differ_are_stated() -> None:
    report = make_report()
    outputs.compare_tokens(report, {"ftgguf": [[1], [2]], "A": [[1], [3]], "B": [[1], [2]]})
    assert report.status == NOT_COMPARABLE
    assert report.troubles[0].text == "A tokenises 1 of 2 texts otherwise than ftgguf"


def answer(*pieces: str, gaps: list[float] | None = None) -> Answer:
    """A text in chunks of one token each; ids by order of appearance."""
    ids = [100 + i for i in range(len(pieces))]
    return Answer(tokens=ids, gaps=gaps or [], pieces=list(pieces), piece_tokens=[1] * len(pieces))


@pytest.mark.parametrize(
    ("own", "peer", "gaps", "status"),
    [
        (("a", " b", " c"), ("a", " b", " c"), [9.0, 9.0, 9.0], OK),
        (("a", " b", " c"), ("a", " b"), [9.0, 9.0, 9.0], OK),  # it stopped early
        (("a", " b", " c"), ("a", " x"), [9.0, 9.0, 9.0], OUTPUTS_DIFFER),
        (("a", " b", " c"), ("a", " x"), [9.0, 0.01, 9.0], OK),
        # "m" and "my": both sides were undecided there, though the texts part only with the next token
        (("e", "m", "e"), ("e", "my", "!"), [9.0, 0.01, 9.0], OK),
        (("e", "m", "e"), ("e", "my", "!"), [9.0, 9.0, 0.01], OK),
        (("e", "m", "e"), ("e", "my", "!"), [0.01, 9.0, 9.0], OUTPUTS_DIFFER),
    ],
)
def test_texts_are_compared_where_a_peer_names_no_tokens(
    own: tuple[str, ...], peer: tuple[str, ...], gaps: list[float], status: int
) -> None:
    report = make_report()
    outputs.compare(report, {"ftgguf": [said(1)]})
    outputs.compare_texts(report, "ftgguf", [answer(*own, gaps=gaps)], "A", [answer(*peer)])
    assert report.status == status, report.troubles


def test_several_tokens_in_one_chunk_are_counted() -> None:
    """The third chunk holds two tokens: the difference in the fourth is at token 4, not 3."""
    report = make_report()
    outputs.compare(report, {"ftgguf": [said(1)]})
    own = answer("a", "b", "cd", "e", gaps=[9.0, 9.0, 9.0, 9.0, 0.01])
    own.tokens.append(104)
    own.piece_tokens = [1, 1, 2, 1]
    outputs.compare_texts(report, "ftgguf", [own], "A", [answer("a", "b", "c", "d", "x")])
    assert [(d.index, d.gap) for d in report.outputs.divergences] == [(4, 0.01)]
