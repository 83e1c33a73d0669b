"""The plots of the page and the tables they stand for, from reports whose figures are known."""

from __future__ import annotations

import re

import pytest

from ftgguf.bench import figures, headline, html, svg, table
from ftgguf.bench.cache_watch import by_label, sample_of, stretches
from ftgguf.bench.client import Answer
from ftgguf.bench.report import CacheSample, Contestant, Line, Pace, Plot, Report, Turn
from ftgguf.bench.wording import in_words
from ftgguf.bench.workloads import Bench, Plan, Source


def two_sides() -> Report:
    report = Report("against llama.cpp", "ftgguf bench")
    report.contestants = [Contestant("ftgguf", ours=True), Contestant("A", ours=False)]
    return report


# ------------------------------------------------------------------------------------------------- the expert cache


def status(wanted: int, hits: int, fills: int, cpu: int) -> dict[str, object]:
    """`/v1/cache/status` as `experts.status.cache_status` words it; an expert is 2 MB."""
    return {
        "experts": {
            "enabled": True,
            "experts": {"wanted": wanted, "hits": hits, "fills": fills, "cpu": cpu, "hit_rate": 0.5},
            "fill": {"bytes": fills * 2_000_000},
            "cpu": {"bytes": cpu * 2_000_000, "seconds": 1.0},
            "prefill": {"copied_bytes": 0},
            "slots": 100,
            "arena_bytes": 200_000_000,
        }
    }


def recorded() -> list[CacheSample]:
    """Two runs of a server: in the first, 1000 experts with 30 % hits, then 2000 with 60 %; the second starts anew."""
    found = []
    for run in range(2):
        series = [(0, 0, 0, 0), (1000, 300, 350, 350), (3000, 1500, 750, 750)]
        for i, (label, counts) in enumerate(zip(("start", "tg128", "tg128"), series, strict=True)):
            sample = sample_of(status(*counts), "ftgguf", run, float(2 * i), label)
            assert sample is not None
            found.append(sample)
    return found


def test_a_server_without_a_cache_gives_no_sample() -> None:
    """As our server answers on a CPU, and a server that is not ours."""
    assert sample_of({"experts": {"enabled": False, "reason": "no"}, "kv": {}}, "x", 0, 0.0, "") is None
    assert sample_of({"error": "no such path"}, "x", 0, 0.0, "") is None


def test_hit_rates_are_those_of_the_time_between_two_looks() -> None:
    """Not the average since the start: 30 % and then 1200 of 2000."""
    assert [s.hit_rate for s in stretches(recorded())] == [0.3, 0.6, 0.3, 0.6]
    total = by_label(recorded())[("ftgguf", "tg128")]
    assert (total.wanted, total.hits, total.fills, total.seconds) == (6000, 3000, 1500, 8.0)


def test_a_cache_that_was_rebuilt_counts_from_nothing() -> None:
    samples = recorded()[:2]
    samples[0].wanted, samples[0].hits = 50_000, 50_000
    (stretch,) = stretches(samples)
    assert (stretch.wanted, stretch.hits) == (1000, 300)


def test_hit_rate_and_bytes_by_path_are_plotted_and_in_the_table() -> None:
    """700 MB in 2 s by each path of the first stretch: 0.35 GB/s; the second run's strokes go on after the first's."""
    report = two_sides()
    report.cache = recorded()
    (section,) = figures.sections(report)
    hits, moved = section.plots
    assert [(x, round(y, 6)) for x, y in hits.lines[0].points] == [(2, 30), (4, 60), (6, 30), (8, 60)]
    by_name = {line.label: line.points for line in moved.lines}
    assert by_name["over PCIe into slots"][0] == pytest.approx((2.0, 0.35))
    assert by_name["computed in place by the CPU"][1] == pytest.approx((4.0, 0.4))
    text = table.render(report)
    row = next(line for line in text.splitlines() if line.startswith("| ftgguf | tg128"))
    assert [c.strip() for c in row.strip("|").split("|")][3:] == ["6000", "50.0", "3.00", "3.00", "0.00"]
    assert "100 slots in 0.20 GB" in text
    page = html.page(report)
    assert "The expert cache" in page
    assert page.count("<svg") == 2
    assert "NaN" not in page


def test_without_a_cache_the_page_does_not_speak_of_one() -> None:
    report = two_sides()
    report.row("tg4", "tok/s", paired=True).samples = {"ftgguf": [1.0, 1.1], "A": [1.0, 1.0]}
    assert "expert cache" not in html.page(report)
    assert "expert cache" not in table.render(report)


# ------------------------------------------------------------------------------------------------------- other plots


def test_turns_are_plotted_by_session_and_over_time() -> None:
    report = two_sides()
    report.turns = [
        Turn(name, session, t, 10, t, 5.0 + t, 105.0 + t, 11, float(t), "append", at_s=float(t + 3 * (session == "y")))
        for name in ("ftgguf", "A")
        for _ in range(2)
        for session in ("x", "y")
        for t in range(3)
    ]
    first, second = figures.sections(report)
    assert [p.title for p in first.plots] == ["x", "y"]
    assert first.plots[0].lines[0].points == [(0.0, 5.0), (1.0, 6.0), (2.0, 7.0)]
    points = second.plots[0].lines[0].points
    assert points[0] == pytest.approx((0.105, 100.0))
    assert points[3][0] == pytest.approx(3.105)
    assert points[6][0] == pytest.approx(0.105)  # the second round from the beginning, in a stroke of its own
    page = html.page(report)
    assert page.count("<polyline") == 2 * 2 + 2 * 2  # sides x sessions, sides x rounds
    assert "over 120 s" in page


def test_pace_of_a_generation_is_in_stretches_of_equal_time() -> None:
    """200 tokens at 100 tok/s, then 200 at 50; a burst at the end of a wait does not stand out as a rate of its own."""
    report = two_sides()
    bench = Bench(report, report.contestants[0], None, Source(9), Plan((), (), (), 0, ()), (), 0)  # type: ignore[arg-type]
    times = [0.5 + 0.01 * i for i in range(200)]
    times += [times[-1] + 0.02 * (i + 1) for i in range(200)]
    bench._pace("tg400", Answer(arrivals=times, n_gen=400))
    (pace,) = report.paces
    assert 2 <= len(pace.points) <= 24
    assert pace.points[2][1] == pytest.approx(100, rel=0.05)
    assert pace.points[-2][1] == pytest.approx(50, rel=0.1)
    report.paces.append(Pace("A", "tg400", 0, [(1.0, 5.0), (2.0, 6.0)]))
    (section,) = figures.sections(report)
    assert [line.label for line in section.plots[0].lines] == ["ftgguf", "A"]


def test_bars_are_coloured_by_what_the_interval_says() -> None:
    bars = [svg.Bar("a", 1.3, 1.1, 1.5), svg.Bar("b", 0.8, 0.7, 0.9), svg.Bar("c", 1.2, 0.9, 1.5)]
    text = svg.ratio_bars(bars)
    assert re.findall(r"var\((--\w+)\)", text) == ["--good", "--bad", "--even"]
    assert "1.30 [1.10, 1.50]" in text
    assert svg.ratio_bars([]) == ""


def test_a_wild_interval_does_not_squeeze_the_others() -> None:
    """Its whisker is cut at the edge, its figures are not."""
    text = svg.ratio_bars([svg.Bar("a", 2.0, 1.9, 2.1), svg.Bar("b", 3.0, 0.001, 9000.0)])
    assert "[0.00, 9000.00]" in text
    assert max(float(x) for x in re.findall(r'x2="([\d.]+)"', text)) <= svg.WIDE


@pytest.mark.parametrize("width", [svg.WIDE, svg.NARROW])
def test_plots_keep_to_their_frame(width: int) -> None:
    """Every coordinate lies within the picture, for lines, single points and bars."""
    lines = [Line(f"side {i}", [(0.0, 1.0), (1e5, 2e6), (3e5, 0.0)]) for i in range(3)]
    plots = [Plot("p", "x", "y", lines), Plot("p", "x", "y", [Line("one", [(3.0, 0.0)])])]
    plots.append(Plot("p", "x", "y", [Line("a", [(0.0, 3.0), (1.0, 0.0)])], categories=["Q4_K", "Q6_K"]))
    plots.append(Plot("p", "x", "y", [Line("a", [(3.0, 0.1), (60.0, 0.9)])], root_x=True))
    for plot in plots:
        text = svg.draw(plot, width)
        places = [tuple(map(float, p.split(","))) for g in re.findall(r'points="([^"]+)"', text) for p in g.split()]
        assert all(0 <= x <= width and 0 <= y <= 300 for x, y in places)
        assert "nan" not in text.lower()
    assert svg.draw(Plot("p", "x", "y", [Line("a", [])])) == ""


def test_ticks_are_round_and_reach_the_top() -> None:
    assert svg.ticks(10.0) == [0, 2, 4, 6, 8, 10]
    assert svg.ticks(0.7) == pytest.approx([0, 0.2, 0.4, 0.6])
    assert svg.ticks(0.0) == [0.0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pp512", "reading a prompt of 512 tokens"),
        ("tg128 @ d4096", "writing 128 tokens after 4096 tokens of context"),
        ("+1 on 8192", "1 new token on a cached context of 8192"),
        ("4 x tg128", "4 requests at once, 128 tokens each"),
        ("tg300, first 128", "first 128 of 300 written tokens"),
        ("pp64+tg16", "reading 64 tokens, then writing 16"),
        ("server", ""),
    ],
)
def test_workloads_are_put_into_words(name: str, words: str) -> None:
    assert in_words(name) == words


def test_the_page_says_that_a_ratio_was_withheld_and_that_the_machine_was_busy() -> None:
    report = two_sides()
    report.host = {"other load": "1.50 CPUs (not a quiet machine)"}
    report.row("pp4", "tok/s", paired=True).samples = {"ftgguf": [4.0, 4.1, 4.0], "A": [2.0, 2.1, 2.0]}
    assert 'class="tile good"' in html.page(report)
    assert "The machine was busy" in html.page(report)
    assert "(the machine was busy" in headline.headline(report)[0]
    report.contestants[1].lower_isa = ["avx512"]
    report.trouble(3, "A does not use avx512, which ours does: no ratio is given")
    page = html.page(report)
    assert "no ratio is given (exit status 3)" in page
    assert 'class="tile' not in page.split("</style>")[1]
    assert "Against A" not in page
