"""What a report concludes: fairness, exit status, tables and pages. Expectations follow from the rules of
docs (exit statuses in `ftgguf bench --help`)."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ftgguf.bench import headline, html, outputs, table
from ftgguf.bench.publish import neutral, save, to_json
from ftgguf.bench.report import (
    INTERRUPTED,
    NOT_COMPARABLE,
    OK,
    OURS_FAILED,
    OUTPUTS_DIFFER,
    PEER_FAILED,
    Report,
    Turn,
    from_json,
    missing_isa,
)
from ftgguf.bench.stats import Ratio
from ftgguf.bench.svg import Bar

from .report_support import make_report, said


def test_ratios_point_the_right_way_and_losses_are_in_the_table() -> None:
    report = make_report()
    text = table.render(report)
    lines = {
        line.split("|")[1].strip() + line.split("|")[2].strip(): line for line in text.splitlines() if line[:2] == "| "
    }
    assert "1.50 [1." in lines["pp512tok/s"]
    assert "worse" not in lines["pp512tok/s"]
    assert lines["pp512tok/s"].count("better") == 2
    assert re.search(r"0\.50 \[0\.\d\d, 0\.\d\d\] worse", lines["tg128tok/s"])
    assert "failed" in lines["tg128tok/s"]
    assert "1.00" in lines["tg128gap ms p50/p99"]


def test_headline_is_against_the_best_peer() -> None:
    """B is the better one in prefill, A the only one in decode."""
    said = "\n".join(headline.headline(make_report()))
    assert "reading prompts: pp512 1.25 [1.2" in said
    assert "better than B" in said
    assert re.search(r"writing: tg128 0\.50 \[.*\] worse than A", said)
    assert "of all 3 rows of figures, each against the best peer there: ftgguf better in 1, ftgguf worse in 1, " in said


def suffixes() -> Report:
    """Short suffixes of which one is lost and one is won; the prompt's own time is its speed once more."""
    report = make_report()
    for name, own, theirs in (("+1 on 8192", 12.0, 10.0), ("+16 on 8192", 30.0, 60.0), ("pp512", 9.0, 9.0)):
        row = report.row(name, "TTFT ms", higher_is_better=False, quantiles=True, paired=True)
        for i in range(5):
            row.add("ftgguf", [own + 0.1 * i])
            row.add("A", [theirs + 0.1 * i])
    return report


def test_times_to_the_first_token_are_in_the_headline_lost_or_won() -> None:
    report = suffixes()
    (line,) = [x for x in headline.headline(report) if "time to the first token" in x]
    assert re.search(r"\+1 on 8192 0\.8\d \[.*?\] worse than A; \+16 on 8192 1\.99 \[.*?\] better than A$", line)
    assert line in table.render(report)
    page = html.page(report).split("</style>")[1]
    tiles = re.findall(r'class="tile (\w+)"><small>([^<]*)</small><b>([\d.]+)x</b><i>(\w+)', page)
    assert ("bad", "first token: 1 new token on a cached context of 8192", "0.84", "slower") in tiles
    assert ("good", "first token: 16 new tokens on a cached context of 8192", "1.99", "faster") in tiles
    assert {kind for kind, words, *_ in tiles if words.startswith("writing")} == {"bad"}


def test_memory_and_loading_stand_beside_the_speeds() -> None:
    report = make_report()
    for c, size in zip(report.contestants, (600, 500, 400), strict=True):
        c.rss_peak, c.load_seconds = size << 20, size / 100
    text = "RSS peak 600 MiB (the least of a peer: 400 MiB); loading 6.0 s (the least of a peer: 4.0 s)"
    assert text in table.render(report)
    assert text in html.page(report)


def test_no_headline_ratio_against_lesser_instruction_sets() -> None:
    """But what is lost even to them is named."""
    report = make_report()
    for peer in report.peers:
        peer.lower_isa = ["avx512"]
    said = headline.headline(report)
    assert said == [
        "no headline ratio: A: it does not use avx512, which ours does",
        "A is ahead all the same in: tg128 tok/s (20.0, ours 10.0)",
    ]
    assert said[1] in html.page(report)
    assert 'class="tile' not in html.page(report).split("</style>")[1]
    assert all(report.ratio(row, peer) is None for row in report.rows for peer in report.peers)


def test_rows_whose_clocks_disagree_are_left_out() -> None:
    """Of ratios, and of what a peer is ahead in; gaps are quoted by the p99 that the table shows."""
    report = make_report()
    for peer in report.peers:
        peer.lower_isa = ["avx512"]
    row = report.row("tg128", "gap ms")
    row.samples = {"ftgguf": [1.0, 1.1, 1.2], "A": [0.5, 0.55, 0.6]}
    report.row("tg128", "tok/s").clocks_apart = ["A"]
    quoted, said = [table.cell(row, c).split(" / ")[-1] for c in report.contestants[:2]], headline.headline(report)
    assert table.metric_of(row) == "gap ms p50/p99"
    assert said[1:] == [
        f"A is ahead all the same in: tg128 gap ms p99 ({quoted[1]}, ours {quoted[0]})",
        "A: left out, as a side's clock and the client's disagree: tg128 tok/s",
    ]
    report.peers[0].lower_isa = []
    assert report.ratio(report.row("tg128", "tok/s"), report.peers[0]) is None
    assert report.best_peer(report.row("tg128", "tok/s")) is None


def test_what_is_not_comparable_has_no_headline() -> None:
    """A side tokenises otherwise, or took too much: the figures stand, the reason takes the ratio's place."""
    report = make_report()
    report.trouble(NOT_COMPARABLE, "A took 9000 MiB of VRAM, the budget is 4096 MiB")
    assert headline.headline(report) == ["no headline ratio: A took 9000 MiB of VRAM, the budget is 4096 MiB"]
    assert 'class="tile' not in html.page(report).split("</style>")[1]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_fewer_than_three_samples_give_no_verdict(n: int) -> None:
    """However far apart the sides are; and n gaps of one generation are one sample."""
    report = make_report()
    report.rows = []
    report.row("tg8", "tok/s", paired=True).samples = {"ftgguf": [20.0] * n, "A": [10.0] * n}
    report.row("pp8", "tok/s", paired=True).samples = {"ftgguf": [10.0] * 5, "A": [20.0] * n}
    gaps = report.row("tg8", "gap ms", higher_is_better=False, quantiles=True, paired=True)
    for _ in range(n):
        gaps.add("ftgguf", [1.0] * 50)
        gaps.add("A", [2.0] * 50)
    text, page = table.render(report), html.page(report)
    assert [report.ratio(row, report.peers[0]).verdict for row in report.rows] == (  # type: ignore[union-attr]
        ["too few"] * 3 if n < 3 else ["better", "worse", "better"]
    )
    rows = [line for line in text.splitlines() if line.startswith(("| tg8", "| pp8"))]
    assert [("better" in r, "worse" in r) for r in rows] == (
        [(False, False)] * 3 if n < 3 else [(True, False), (False, True), (True, False)]
    )
    assert text.count("(too few samples)") == (4 if n < 3 else 0)  # two rows and the headline
    assert text.count("(too few rounds)") == (1 if n < 3 else 0)
    assert ('class="tile good"' in page) == ('class="tile bad"' in page) == (n >= 3)
    assert ("too few samples to judge against A" in page) == (n < 3)
    assert f"| {50 * n} in {n} |" in text


def test_a_side_that_failed_in_a_round_has_no_ratio_there() -> None:
    """The rounds that it survived are not the whole."""
    report = make_report()
    row = report.rows[0]
    assert report.best_peer(row) is report.peers[1]
    row.failures["B"] = "out of memory"
    assert report.ratio(row, report.peers[1]) is None
    assert report.best_peer(row) is report.peers[0]
    row.failures["ftgguf"] = "out of memory"
    assert report.ratio(row, report.peers[0]) is None
    assert "ftgguf failed at pp512" in headline.tally(report)


def test_the_best_peer_is_best_in_what_is_compared() -> None:
    """A has the lower mean, B the lower median."""
    report = make_report()
    row = report.row("+1 on 8", "TTFT ms", higher_is_better=False, quantiles=True)
    row.samples = {"ftgguf": [1.0] * 3, "A": [4.0, 4.0, 4.0], "B": [3.0, 3.0, 30.0]}
    assert report.best_peer(row) is report.peers[1]


def test_percentiles_are_shown_where_there_are_samples_for_them() -> None:
    """Nine values have no 90th percentile and ninety-nine no 99th: the worst is shown; of speeds the slow end is."""
    report = make_report()
    row = report.row("x", "TTFT ms", higher_is_better=False, quantiles=True)
    for n, text in ((1, "0"), (9, "4 / 8"), (99, "49.0 / 88.2 / 98.0"), (101, "50.0 / 90.0 / 99.0")):
        row.samples = {"ftgguf": [float(i) for i in range(n)]}
        assert table.cell(row, report.contestants[0]) == text
    assert table.metric_of(row) == "TTFT ms p50/p90/p99"
    row.samples["A"] = [5.0, 7.0]
    assert table.cell(row, report.contestants[1]) == "p50 6 / max 7"
    assert table.count_cell(row) == "2-101"
    fast = report.row("x", "tok/s", quantiles=True)
    fast.samples = {"ftgguf": [float(i) for i in range(101)]}
    assert (table.metric_of(fast), table.cell(fast, report.contestants[0])) == ("tok/s p50/p10/p1", "50.0 / 10.0 / 1")


def test_missing_isa_leaves_amx_and_unknown_peers_alone() -> None:
    assert missing_isa(["avx2", "avx512", "amx_int8"], ["avx2"]) == ["avx512"]
    assert missing_isa(["avx2", "amx_int8"], ["avx2"]) == []
    assert missing_isa(["avx2"], []) == []
    # llama.cpp's ggml-cpu/CMakeLists: the Sapphire Rapids variant has AVX512_VNNI and no AVX_VNNI
    assert missing_isa(["avx2", "avx_vnni", "avx512_vnni"], ["avx2", "avx512_vnni"]) == []
    assert missing_isa(["avx2", "avx_vnni"], ["avx2"]) == ["avx_vnni"]


def test_gaps_are_compared_in_the_tail() -> None:
    """Bursts: the median gap is nothing, the waits are as long."""
    report = make_report()
    row = report.row("burst", "gap ms", higher_is_better=False, quantiles=True)
    row.samples = {"ftgguf": [0.001] * 7 + [8.0] * 3, "A": [8.0] * 10}
    ratio = report.ratio(row, report.peers[0])
    assert ratio is not None
    assert ratio.value == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ([], OK),
        ([PEER_FAILED], PEER_FAILED),
        ([PEER_FAILED, NOT_COMPARABLE], NOT_COMPARABLE),
        ([NOT_COMPARABLE, OUTPUTS_DIFFER], OUTPUTS_DIFFER),
        ([OUTPUTS_DIFFER, OURS_FAILED], OURS_FAILED),
    ],
)
def test_exit_status(found: list[int], status: int) -> None:
    report = make_report()
    for number in found:
        report.trouble(number, f"trouble {number}")
        report.trouble(number, f"trouble {number}")
    assert report.status == status
    assert len(report.troubles) == len(found)
    report.interrupted = True
    assert report.status == (status or INTERRUPTED)


def test_there_is_no_ratio_against_another_file() -> None:
    report = make_report()
    row = report.row("pp", "tok/s")
    row.samples = {"ftgguf": [2.0, 2.0], "A": [1.0, 1.0]}
    peer = next(c for c in report.contestants if c.name == "A")
    assert report.ratio(row, peer) is not None
    peer.other_file = True
    assert report.ratio(row, peer) is None


def test_one_sample_gives_no_verdict() -> None:
    """There is no interval to decide by."""
    assert table.ratio_cell(Ratio(0.98, 0.98, 0.98, 1)) == "0.98 (too few samples)"
    assert table.ratio_cell(Ratio(0.98, 0.97, 0.99)) == "0.98 [0.97, 0.99] worse"
    assert table.ratio_cell(Ratio(1.02, 0.97, 1.09)) == "1.02 [0.97, 1.09]"
    assert table.ratio_cell(Ratio(0.96, 0.90, 0.998)) == "0.96 [0.90, 0.998] worse"
    assert table.ratio_cell(None) == "-"
    assert [Bar("x", 0.9, 0.9, 0.9).colour, Bar("x", 0.9, 0.8, 0.95).colour] == ["--even", "--bad"]


def test_reports_name_no_folder_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In files as on the terminal; what only looks like the home stays."""
    monkeypatch.setenv("HOME", str(tmp_path / "jane"))
    report = make_report()
    report.model["file"] = str(tmp_path / "jane" / "m.gguf")
    report.contestants[0].command = f"{sys.executable} -m ftgguf serve -m {tmp_path}/janes/m.gguf"
    save(report, page=str(tmp_path / "r.html"), report_file=str(tmp_path / "r.json"))
    kept = from_json((tmp_path / "r.json").read_bytes())
    assert kept.model["file"] == "~/m.gguf"
    assert kept.contestants[0].command == f"python -m ftgguf serve -m {tmp_path}/janes/m.gguf"
    assert "/jane/" not in (tmp_path / "r.html").read_text()
    assert report.model["file"].startswith("/")
    assert neutral(kept) == kept


def test_json_round_trip() -> None:
    report = make_report()
    outputs.compare(report, {"ftgguf": [said(1, 2)], "A": [said(1, 3)]})
    report.turns = [Turn("ftgguf", "s", 0, 10, 0, 5.0, 9.0, 3)]
    report.interrupted = True
    assert from_json(to_json(report)) == report


class _Reader(HTMLParser):
    """Checks nesting and collects tags and what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [str(v) for k, v in attrs if k in ("src", "href", "data")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_whole_self_contained_and_escapes() -> None:
    """Well nested, nothing fetched, no script; a hostile model name stays text."""
    report = make_report()
    report.model = {"file": "<script>alert(1)</script>.gguf"}
    report.turns = [
        Turn(name, f"s{s}", t, 10, t, 5.0 + t, 9.0 + t, 3, float(t), "append")
        for name in ("ftgguf", "A")
        for s in range(2)
        for t in range(3)
    ]
    reader = _Reader()
    reader.feed(html.page(report))
    assert reader.open == []
    assert reader.fetched == []
    assert "script" not in reader.tags
    assert reader.tags.count("svg") == 7  # ratios of two peers, two sessions, speed over time, two rows over rounds


def test_turn_table_has_every_side_and_failures() -> None:
    report = make_report()
    report.turns = [
        Turn("ftgguf", "s", 0, 10, 7, 5.0, 9.0, 3, kind="first"),
        Turn("ftgguf", "s", 0, 10, 7, 7.0, 9.0, 3, kind="first"),
        Turn("A", "s", 0, 10, -1, 0.0, 0.0, 0, kind="first", error="it hangs"),
    ]
    row = next(line for line in table.turns_table(report).splitlines() if line.startswith("| s "))
    assert [c.strip() for c in row.strip("|").split("|")] == [
        "s",
        "0",
        "first",
        "10",
        "7",
        "6",
        "-",
        "failed",
        "-",
        "-",
    ]
