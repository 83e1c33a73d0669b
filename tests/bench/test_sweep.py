"""The placement sweep: on a model of a GPU whose answers are known in closed form, and on a fake llama-server and
nvidia-smi as processes, with a peer that runs out of memory, hangs, dies, or cannot be measured."""

from __future__ import annotations

import re
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftgguf.bench import host, placement
from ftgguf.bench.contenders import asked_isa, make_contenders, other_backend, without
from ftgguf.bench.options import parse
from ftgguf.bench.peers import Peer
from ftgguf.bench.placement import Sizes, best_placements, check_budget, kept, sizes_of
from ftgguf.bench.report import NOT_COMPARABLE, OK, PEER_FAILED, Contestant, Report
from ftgguf.bench.servers import Server
from ftgguf.bench.stepper import parse_isa
from ftgguf.bench.sweep import UBATCHES, BudgetError, Found, Hung, Sweep, Trial
from ftgguf.gguf import open_gguf

from .fake_llama_server import LAYERS, memory

MIB = 1 << 20
SIZES = Sizes((300 * MIB,) * LAYERS, 500 * MIB)


EXPERTS = [300 * MIB] * 48


def gpu(n: int, ubatch: int, mapped: bool = True) -> Trial:
    """48 layers of 300 MiB of experts, 1500 MiB besides, 0.5 MiB a row of the batch; fewer on the CPU is faster. A file
    that is read is no faster."""
    vram = (1500 + 300 * (48 - n) + ubatch // 2) * MIB
    return Trial(n, ubatch, vram, pp=400.0 * ubatch**0.5 / (1 + n / 12), tg=100.0 / (1 + n / 12), mapped=mapped)


def all_settings(budget: int) -> list[Trial]:
    return [t for n in range(49) for u in UBATCHES if (t := gpu(n, u)).fits(budget)]


def pinned(n: int, ubatch: int, mapped: bool = True, extra: int = 0) -> Trial:
    """The memory of `gpu` and `extra` MiB more for a file that is read. A pass of a prompt takes 25 us a row and, for
    each layer on the CPU, the time its 300 MiB take over the link: 15 GB/s mapped, 50 read."""
    vram = gpu(n, ubatch).vram + (0 if mapped or n == 0 else extra * MIB)
    seconds = ubatch * 25e-6 + n * (0.021 if mapped else 0.0063)
    return Trial(n, ubatch, vram, pp=ubatch / seconds, tg=100.0 / (1 + n / 12), mapped=mapped)


@given(
    st.integers(1757, 20000),
    st.sampled_from([0, 1500, 2500]),
    st.sampled_from([gpu, pinned]),
    st.sampled_from([0, 3, 90, 301]),
)
def test_it_finds_the_best_of_all_settings(mib: int, besides: int, machine: Any, extra: int) -> None:
    """Against trying every one of the 392; with a start or two for each batch and way of loading, whatever is known
    besides the experts, and also where a file that is read needs another layer on the CPU."""

    def measure(n: int, ubatch: int, mapped: bool) -> Trial:
        return machine(n, ubatch, mapped, extra) if machine is pinned else gpu(n, ubatch, mapped)

    every = [t for n in range(49) for u in UBATCHES for m in (True, False) if (t := measure(n, u, m)).fits(mib * MIB)]
    found = Sweep(measure, EXPERTS, mib * MIB, besides * MIB).run()
    assert found.best.seconds == min(t.seconds for t in every)
    assert found.reading.pp == max(t.pp for t in every)
    assert found.writing.tg == max(t.tg for t in every)
    assert all(t.fits(mib * MIB) for t in (found.best, found.reading, found.writing))
    assert len(found.tried) <= (20 if extra > 100 else 16)
    assert len({(t.n_cpu_moe, t.ubatch, t.mapped) for t in found.tried}) == len(found.tried), "none is tried twice"


@pytest.mark.parametrize(("second", "late", "mapped"), [(200, False, False), (290, False, True), (200, True, True)])
def test_one_quick_sample_does_not_choose_the_slower_way_of_loading(second: int, late: bool, mapped: bool) -> None:
    """Mapped wrote 270 tok/s and read 1700, the same setting read from the file 250 and 9000: both are measured again,
    and unless mapped writes clearly faster on average (280 against 250; 235 is not), it is not what writes best."""
    calls: list[tuple[int, int, bool]] = []

    def measure(n: int, ubatch: int, by_map: bool) -> Trial:
        again = (n, ubatch, by_map) in calls
        calls.append((n, ubatch, by_map))
        tg = (second if again else 270) if by_map else 250
        return replace(gpu(n, ubatch), pp=1700.0 if by_map else 9000.0, tg=tg, mapped=by_map)

    budget = gpu(40, 512).vram
    sweep = Sweep(measure, EXPERTS, budget, late=lambda: late and len(calls) > 1)
    found = sweep.run([512])
    assert found.writing.mapped is mapped
    assert len(found.tried) == len(calls)
    assert calls.count((40, 512, True)) == (1 if late else 2)


def test_a_file_that_is_read_gets_the_next_layer_on_the_cpu_where_it_needs_it() -> None:
    """The larger of two batches fits mapped and misses the budget by a little when read: it is tried with a layer more
    on the CPU, and wins the prompts there."""
    found = Sweep(lambda n, u, m: pinned(n, u, m, 30), EXPERTS, 8230 * MIB).run((512, 2048))
    tried = [(t.ubatch, t.mapped, t.n_cpu_moe, t.fits(8230 * MIB)) for t in found.tried if t.ubatch == 2048]
    n = next(n for n in range(49) if gpu(n, 2048).fits(8230 * MIB))
    assert (2048, False, n, False) in tried
    assert (2048, False, n + 1, True) in tried
    assert (found.reading.ubatch, found.reading.mapped, found.reading.n_cpu_moe) == (2048, False, n + 1)


def test_every_batch_is_tried_both_ways_until_it_reads_slower() -> None:
    """On a machine whose prompts gain from the file being read, mapped ones from larger batches alone: each way of
    loading ends by itself, and what was not tried is named with the reason."""

    def measure(n: int, ubatch: int, mapped: bool) -> Trial:
        trial = gpu(n, ubatch, mapped)
        return trial if mapped else replace(trial, pp=9000.0 * 0.9 ** UBATCHES.index(ubatch))

    found = Sweep(measure, EXPERTS, 8000 * MIB).run()
    fitting = {(t.ubatch, t.mapped) for t in found.tried if t.fits(8000 * MIB)}
    assert fitting == {(u, True) for u in UBATCHES} | {(512, False), (2048, False)}
    why = "file read: -ub 2048 reads prompts slower than a smaller one already"
    assert found.left_out == (f"-ub 4096, {why}", f"-ub 8192, {why}")
    assert (found.reading.ubatch, found.reading.mapped) == (512, False)


def test_a_peer_that_runs_only_when_the_file_is_read_is_measured_so() -> None:
    def measure(n: int, ubatch: int, mapped: bool) -> Trial:
        return Trial(n, ubatch, error="mmap failed") if mapped else gpu(n, ubatch, mapped)

    found = Sweep(measure, EXPERTS, 8000 * MIB).run()
    assert not found.best.mapped
    assert found.best.n_cpu_moe == min(t.n_cpu_moe for t in all_settings(8000 * MIB) if t.ubatch == found.best.ubatch)


def test_a_setting_that_hangs_does_not_cost_what_was_found() -> None:
    """Each start more would wait as long; nothing found before it is an error as before."""

    def measure(n: int, ubatch: int, mapped: bool) -> Trial:
        if ubatch == 4096:
            raise Hung(Trial(n, ubatch, error="no answer", mapped=mapped))
        return gpu(n, ubatch, mapped)

    found = Sweep(measure, EXPERTS, 8000 * MIB).run()
    assert {t.ubatch for t in found.tried} == {512, 2048}
    assert "-ub 4096, which hung" in found.left_out[-1]
    with pytest.raises(Hung, match="hangs with --n-cpu-moe"):
        Sweep(measure, EXPERTS, 8000 * MIB).run((4096,))


@given(st.lists(st.integers(0, 900), min_size=1, max_size=60), st.integers(0, 30000), st.integers(-60, 60))
def test_uneven_layers_and_sums_that_are_a_little_wrong(sizes: list[int], mib: int, wrong: int) -> None:
    """The smallest N that fits, found by trying every one; each start of the server counts."""

    def measure(n: int, ubatch: int, mapped: bool = True) -> Trial:
        vram = (1000 + sum(sizes[n:]) + (wrong if n % 2 else 0)) * MIB
        return Trial(n, ubatch, vram, 100.0, 10.0)

    fitting = [n for n in range(len(sizes) + 1) if measure(n, 512).fits(mib * MIB)]
    sweep = Sweep(measure, [size * MIB for size in sizes], mib * MIB)
    if not fitting:
        with pytest.raises(BudgetError):
            sweep.run([512])
        return
    rising = all(measure(n, 512).fits(mib * MIB) for n in range(fitting[0], len(sizes) + 1))
    found = sweep.run([512]).best
    assert found.fits(mib * MIB)
    if rising:
        assert found.n_cpu_moe == fitting[0]


def test_a_file_that_is_read_is_tried_where_experts_are_on_the_cpu() -> None:
    """It wins prompts alone: a side of its own. With all experts on the GPU it changes nothing, and costs no start."""

    def fast(n: int, ubatch: int, mapped: bool) -> Trial:
        trial = gpu(n, ubatch, mapped)
        return trial if mapped else replace(trial, pp=2 * trial.pp, tg=trial.tg / 9)

    found = Sweep(fast, EXPERTS, 8000 * MIB).run()
    assert (found.reading.mapped, found.writing.mapped) == (False, True)
    assert found.reading.flags[-2:] == ["--load-mode", "none"]
    assert "--load-mode none" in found.reading.describe()
    assert all(t.mapped for t in Sweep(fast, EXPERTS, 10**12).run().tried)

    def wide(n: int, ubatch: int, mapped: bool) -> Trial:
        return replace(gpu(n, ubatch, mapped), pp=4000.0 if ubatch <= 2048 else 2000.0)

    # nor with a batch that is tried no more because the one before it read slower
    assert [(t.ubatch, t.mapped) for t in Sweep(wide, EXPERTS, 10**12).run().tried] == [
        (512, True),
        (2048, True),
        (4096, True),
    ]


def test_no_time_for_larger_batches_is_said() -> None:
    found = Sweep(gpu, EXPERTS, 8000 * MIB, late=lambda: True).run()
    assert found.best.ubatch == 512
    assert [line.partition(": ")[0] for line in found.left_out] == [
        *("-ub 512, file read", "-ub 2048", "-ub 2048, file read"),
        *("-ub 4096", "-ub 4096, file read", "-ub 8192", "-ub 8192, file read"),
    ]
    assert all(line.endswith("no time was left (--limit)") for line in found.left_out)


def test_a_budget_that_cannot_be_met_says_what_is_needed() -> None:
    with pytest.raises(BudgetError, match="does not fit 1000 MiB of VRAM: it takes 1756 MiB at least"):
        Sweep(gpu, EXPERTS, 1000 * MIB).run()
    with pytest.raises(BudgetError, match="runs with none of the settings that would fit: no CUDA"):
        Sweep(lambda n, u, m: Trial(n, u, error="no CUDA"), EXPERTS, 1000 * MIB).run()


def test_settings_that_crash_are_passed_over() -> None:
    """Out of memory at load is an error and not a number, so that halving takes the place of reckoning."""

    def crashing(n: int, ubatch: int, mapped: bool) -> Trial:
        trial = gpu(n, ubatch)
        return trial if trial.vram <= 8000 * MIB else Trial(n, ubatch, error="out of memory")

    found = Sweep(crashing, EXPERTS, 10**12).run()
    assert found.best.seconds == min(t.seconds for t in all_settings(8000 * MIB))
    assert any(t.error for t in found.tried)


def test_work_that_takes_more_memory_than_loading_moves_one_layer_on() -> None:
    """What does not fit when it is loaded is not asked to work, so that its memory says less than it would take."""

    def growing(n: int, ubatch: int, mapped: bool) -> Trial:
        trial = gpu(n, ubatch)
        worked = trial.fits(8000 * MIB)
        return Trial(n, ubatch, trial.vram + 200 * MIB * worked, trial.pp * worked, trial.tg * worked)

    found = Sweep(growing, EXPERTS, 8000 * MIB).run([512])
    assert found.best.vram <= 8000 * MIB
    assert gpu(found.best.n_cpu_moe - 1, 512).vram + 200 * MIB > 8000 * MIB


def test_a_larger_batch_is_not_cut_by_llama_cpps_logical_one() -> None:
    flags = Trial(3, 8192).flags
    assert flags[flags.index("-b") + 1] == "8192"
    assert Trial(3, 512).flags[5] == "2048"


def test_settings_that_only_read_or_write_better_get_a_side_of_their_own() -> None:
    best, prompts, same = Trial(5, 2048, 1, 1000, 50), Trial(9, 8192, 1, 3000, 30), Trial(4, 512, 1, 300, 51)
    report = Report("t", "t")
    assert list(kept(report, Found(best, prompts, same, []))) == ["", " for prompts"]
    assert "--n-cpu-moe 9" in report.notes[0]


def test_placement_flags_of_ours_do_not_reach_the_sweep() -> None:
    assert without(["-m", "f", "-ngl", "20", "-cmoe", "-t", "2", "-ub", "512"], ("-ngl", "-ub", "-cmoe")) == [
        *("-m", "f", "-t", "2"),
    ]


def test_more_vram_than_the_budget_is_unfair() -> None:
    report = Report("t", "t", contestants=[Contestant("A", ours=True, vram_peak=8100 * MIB)])
    check_budget(report, 8000)
    assert report.status == OK
    assert report.notes == [
        "A took 8100 MiB of VRAM, the budget is 8000 MiB: within the 2% that every side may take more"
    ]
    check_budget(report, 7000)
    assert report.status == NOT_COMPARABLE
    check_budget(report, None)


# -------------------------------------------------------------------------------------------- a server as a process


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Peer:
    """A machine with a GPU and a llama-server, both pretended."""
    (tmp_path / "smi").mkdir()
    script = Path(__file__).with_name("fake_llama_server.py")
    for name, what in (("llama-server", "serve"), ("nvidia-smi", "smi")):
        file = tmp_path / name
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" {what} "$@"\n')
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_SMI", str(tmp_path / "smi"))
    monkeypatch.setattr(placement, "PROMPT", 1024)
    monkeypatch.setattr(placement, "GEN", 16)
    return Peer("llama-server", str(tmp_path / "llama-server"))


def swept(peer: Peer, budget: int = 0, timeout: str = "20") -> tuple[Report, dict[str, list[str]]]:
    """`budget` in MiB, 0: none is given."""
    options = parse(["--against", "llama.cpp", "--timeout", timeout])
    report = Report("t", "t")
    flags = ["-m", "f.gguf", "-c", "4096", "-t", "1", "-ngl", "5"]
    flags += ["--vram-budget", str(budget)] if budget else []
    return report, best_placements(report, options, flags, peer, SIZES)


def test_the_sweep_of_a_running_server(fake: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is read from nvidia-smi by process; the best settings are those of the script's own formula, and reach the
    sides of the comparison."""
    monkeypatch.setattr("ftgguf.bench.placement.UBATCHES", (512, 2048))
    assert host.gpu_names() == "NVIDIA Fake 8000"
    report, sides = swept(fake, 3000)
    moe = sides[""][sides[""].index("--n-cpu-moe") + 1]
    ubatch = sides[""][sides[""].index("-ub") + 1]
    most = 3000 * placement.TOLERANCE  # as much more as our side may take
    assert memory(int(moe), int(ubatch)) <= most < memory(int(moe) - 1, int(ubatch))
    assert report.status == OK
    assert any(n.startswith("sweep: ") and "MiB, pp" in n for n in report.notes)
    options = parse(["--against", "llama.cpp", "--peer-args", "--no-mmap"])
    peers = make_contenders(options, ["-m", "f", "-ngl", "5", "-ub", "99"], fake, sides)[1:]
    command = peers[0].contestant.command
    # the fake is as fast either way, so a busy machine decides whether the file read instead of mapped looked faster
    assert re.search(rf"--n-cpu-moe {moe} -b 2048 -ub {ubatch} -fa on( --load-mode none)? --no-mmap", command)
    assert "99 --n" in command
    assert "-ub 99" not in command


def test_a_peer_that_runs_out_of_memory_is_passed_over_and_named(fake: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the GPU is asked for, but it dies above 2500 MiB."""
    monkeypatch.setenv("FAKE_OOM_MIB", "2500")
    monkeypatch.setattr("ftgguf.bench.placement.UBATCHES", (512,))
    report, sides = swept(fake)
    moe = int(sides[""][sides[""].index("--n-cpu-moe") + 1])
    assert memory(moe, 512) <= 2500 < memory(moe - 1, 512)
    assert any("out of memory: the server ended with status 1" in n for n in report.notes)


@pytest.mark.parametrize(
    ("trouble", "words", "status"),
    [
        ({"FAKE_OOM_MIB": "10"}, "out of memory", PEER_FAILED),
        ({"FAKE_HANG": "1"}, "no answer at /health within 2 s", PEER_FAILED),
        ({"FAKE_DIE": "1"}, "the server ended with status 9", PEER_FAILED),
    ],
)
def test_a_peer_that_cannot_run_is_a_trouble_that_says_so(
    fake: Peer, monkeypatch: pytest.MonkeyPatch, trouble: dict[str, str], words: str, status: int
) -> None:
    for name, text in trouble.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr("ftgguf.bench.placement.UBATCHES", (512,))
    report, sides = swept(fake, 8000, timeout="2")
    assert sides == {}
    assert report.status == status
    assert words in report.troubles[0].text
    assert any(n.startswith("sweep: ") for n in report.notes)


def test_memory_of_processes_that_nvidia_smi_does_not_know(
    fake: Peer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a container: what the device holds beyond the 100 MiB that were there before."""
    monkeypatch.setenv("FAKE_NO_PIDS", "1")
    with Server([fake.where, "--n-cpu-moe", "3"], tmp_path / "log", 20) as server:
        assert server.memory is not None
        server.memory.look()
        assert server.memory.vram_peak == memory(3, 512) * MIB
        assert server.memory.by_device


def test_no_gpu_and_placement_by_hand_are_not_swept(fake: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report("t", "t")
    options = parse(["--against", "llama.cpp", "--peer-args", "--n-cpu-moe 3"])
    assert best_placements(report, options, ["-m", "f"], fake, SIZES) == {}
    assert "not swept" in report.notes[0]
    monkeypatch.setattr(host, "gpu_names", lambda: "")
    assert swept(fake, 100) == (Report("t", "t"), {})


def test_placement_by_hand_is_one_side(fake: Peer) -> None:
    options = parse(["--against", "llama.cpp", "--peer-args", "-ngl 99 --n-cpu-moe 3"])
    sides = make_contenders(options, ["-m", "f", "-ub", "99"], fake)
    assert [s.contestant.name for s in sides] == ["ftgguf", "llama-server"]
    assert sides[1].contestant.command.endswith("-ub 99 -ngl 99 --n-cpu-moe 3")


def test_sizes_are_those_of_the_files_experts() -> None:
    """The dense stories model has none; against its size as the reader has it."""
    with open_gguf(Path(__file__).parents[1] / "data" / "stories260K.gguf") as gguf:
        sizes = sizes_of(gguf)
        assert sizes == Sizes((0,) * gguf.arch("block_count"), gguf.size)


def test_the_servers_instruction_sets_are_asked_for(fake: Peer, tmp_path: Path) -> None:
    """It goes on running when it has said them: it is ended. One that does not say them, or is none, has none."""
    assert asked_isa(fake.where) == ["avx2", "avx512"]
    assert asked_isa("/bin/true") == []
    assert asked_isa(str(tmp_path / "nothing")) == []


def test_the_other_backend_has_no_gpu(fake: Peer) -> None:
    options = parse(["--against", "llama.cpp"])
    side = other_backend(options, ["-m", "f", "-ngl", "5", "--vram-budget", "9"], fake).contestant
    assert side.command.endswith("llama-server -m f --device none --no-repack")


def test_instruction_sets_are_those_of_the_cpu() -> None:
    """A CUDA build prints its own options in the same line."""
    line = "n_threads = 1 | CUDA : ARCHS = 900 | USE_GRAPHS = 1 | CPU : AVX2 = 1 | AVX512 = 1 | REPACK = 1 |"
    assert parse_isa(line) == ("avx2", "avx512")
