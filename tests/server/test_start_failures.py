"""What fails while a server starts fails once, at once, with one line and a status that is not 0.

What is a failure is llama-server's: a file, a flag or memory that makes the start impossible. A crash of an engine that
was ready is something else (test_process.py): that one is started again.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ftgguf.chat.template import load_templates
from ftgguf.engine.devices import list_devices
from ftgguf.engine.messages import Ready
from ftgguf.flags import parse_server
from ftgguf.pull.layers import NO_EXTRAS, apply_template
from ftgguf.server.engine_client import EngineClient
from ftgguf.server.errors import ApiError
from ftgguf.server.startup import block, no_gpu, template_text

ROOT = Path(__file__).parents[2]
NO_GPU = not list_devices()


def serve(*flags: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ftgguf", "serve", "-t", "1", "--port", "0", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("-m", "stories", "-c", "2000000000"), r"2000000000 KV cells need 1\d+.\d GiB and .* take a smaller context"),
        (("-m", "/nowhere/model.gguf"), r"/nowhere/model.gguf: no such file"),
        (("-m", "{folder}/cut.gguf"), r"cut.gguf: at byte 4: .* truncated or damaged"),
        (("-m", "{folder}/page.gguf"), r"page.gguf: .* web page"),
        (("-m", "stories", "--override-kv", "llama.block_count=int:7"), r"missing tensor 'blk.5"),
        (("-m", "stories", "--override-kv", "llama.attention.head_count=int:7"), r"7 attention heads"),
        (("-m", "stories", "--cpu-mask", "0xf00000000000000000000"), r"leave no CPU"),
        pytest.param(("-m", "stories", "-dev", "CUDA0"), r"-dev CUDA0: no NVIDIA GPU", marks=pytest.mark.skipif(
            not NO_GPU, reason="needs a machine without a GPU")),
    ],
)  # fmt: skip
def test_one_line_and_status_1(flags: tuple[str, ...], words: str, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    (tmp_path / "page.gguf").write_text("<!DOCTYPE html><html><body>Not found</body></html>")
    process = serve(*(flag.format(folder=tmp_path) for flag in flags))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert re.search(words, lines[0]), err


@pytest.mark.parametrize(
    ("last_words", "message"),
    [
        ("os.kill(os.getpid(), 9)", r"killed while it loaded the model \(signal 9\).*memory.*smaller"),
        ("os.abort()", r"ended by signal 6 while it loaded"),
        ("sys.exit(3)", r"exited with code 3 while it loaded"),
    ],
)
def test_an_engine_that_dies_at_its_first_start_is_not_started_again(
    last_words: str, message: str, tmp_path: Path
) -> None:
    """The system's memory killer, an abort of native code: the second try would end the same way, minutes later."""
    starts = tmp_path / "starts"
    code = f"import os, resource, sys; open({str(starts)!r}, 'a').write('x'); "
    code += f"resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); {last_words}"

    async def scenario() -> None:
        client = EngineClient(b"", (sys.executable, "-c", code))
        await client.start()
        with pytest.raises(ApiError, match=message) as caught:
            await asyncio.wait_for(client.wait_ready(), 30)
        assert caught.value.code == 503
        assert client.state == "failed"
        await client.stop()

    asyncio.run(scenario())
    assert starts.read_text() == "x"


def test_an_engine_that_cannot_end_after_its_last_words_is_replaced(tmp_path: Path) -> None:
    """A lost GPU: `Fatal` is sent, and the process hangs in a driver's clean-up with its socket open."""
    once = tmp_path / "once"
    code = f"""
import os, socket, struct, sys, time
from ftgguf.engine import messages as m
connection = socket.socket(fileno=int(sys.argv[2]))
def send(message):
    data = m.encode(message)
    connection.sendall(struct.pack("<I", len(data)) + data)
send(m.Ready(info={{}}, n_ctx=64, n_slots=1))
if not os.path.exists({str(once)!r}):
    open({str(once)!r}, "w").close()
    send(m.Fatal(message="the executor is lost"))
time.sleep(600)
"""

    async def scenario() -> None:
        client = EngineClient(b"", (sys.executable, "-c", code))
        client.exit_grace_s = 0.2
        await client.start()
        deadline = time.monotonic() + 30
        while client.restarts == 0 or client.state != "ready":
            assert time.monotonic() < deadline, (client.state, client.failure)
            await asyncio.sleep(0.02)
        assert client.failure == ""
        await client.stop()

    asyncio.run(scenario())


def test_a_signal_to_the_whole_group_ends_the_server_in_order() -> None:
    """`timeout`, a shell's `kill %1` and service managers signal the engine too: nothing is restarted for that."""
    process = serve("-m", "stories", start_new_session=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Talk to it"):
            break
    os.killpg(process.pid, signal.SIGTERM)
    end = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    assert process.returncode == 0
    assert process.stderr is not None
    assert process.stderr.read().splitlines() == ["stopping; once more to leave at once"]


def test_layers_for_a_gpu_that_is_not_there_are_said() -> None:
    """llama-server: "no usable GPU found, --gpu-layers option will be ignored"."""
    cpu = {"device": "CPU", "device_reason": "no NVIDIA GPU found"}
    line = no_gpu(parse_server(["-m", "x", "-ngl", "99"], {}), cpu)
    assert line == "no usable GPU (no NVIDIA GPU found): -ngl without effect, the model runs on the CPU"
    assert "--vram-budget" in no_gpu(parse_server(["-m", "x", "--vram-budget", "4096"], {}), cpu)
    for flags in ([], ["-ngl", "0"], ["-ngl", "99", "-dev", "none"]):
        assert no_gpu(parse_server(["-m", "x", *flags], {}), cpu) == ""
    assert no_gpu(parse_server(["-m", "x", "-ngl", "99"], {}), {"device": "CUDA0"}) == ""


def test_the_start_says_what_is_held_on_the_gpu() -> None:
    info = {
        "device": "CUDA0", "device_name": "GPU", "vram": {"weights": 3 << 20, "experts": 0, "KV": 1 << 20},
        "vram_budget": 2 << 30, "vram_budget_reason": "--vram-budget",
    }  # fmt: skip
    text = block(Ready(info=info, n_ctx=64, n_slots=1), "m", [])
    assert "VRAM     4.0 MiB of 2.0 GiB (--vram-budget): weights 3.0 MiB, KV 1.0 MiB" in text
    assert "VRAM" not in block(Ready(info={"device": "CPU"}, n_ctx=64, n_slots=1), "m", [])


@pytest.mark.skipif(not NO_GPU, reason="needs a machine without a GPU")
def test_the_start_says_which_device_it_is() -> None:
    process = serve("-m", "stories", "-ngl", "99")
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if line.startswith("Talk to it"):
            break
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert "device   CPU (no NVIDIA GPU found)" in text
    assert "template the file's own" in text
    assert [line for line in err.splitlines() if line.startswith("no usable GPU")]


@pytest.mark.parametrize(
    ("flags", "own", "go", "words"),
    [
        ([], "{{ messages }}", "", "the file's own"),
        ([], "{{ messages }}", "<|im_start|><|im_end|>", "the file's own"),
        ([], "", "", "the file has none: chatml, as llama-server takes it"),
        ([], "", "<|im_start|>{{ .Prompt }}<|im_end|>", "built-in 'chatml', as the Go template of m:1 has its marks"),
        ([], "", "{{ .Prompt }} ~", "none that can be used (a Go template of its own): chat is refused"),
        (["--chat-template", "llama3"], "{{ messages }}", "{{ .Prompt }} ~", "built-in 'llama3' (--chat-template)"),
        (["--chat-template", "{{ messages }}"], "", "", "the one given by --chat-template"),
    ],
)
def test_the_chosen_chat_template_is_told(flags: list[str], own: str, go: str, words: str) -> None:
    """The order: the user's, the GGUF's Jinja, a known format of Ollama's Go template, else a refusal; and what is
    printed says which it was."""
    config = parse_server(["-m", "x", *flags], {})
    if go:
        config = apply_template(config, replace(NO_EXTRAS, template=go), bool(own), "m:1")
    templates = load_templates(config.chat.template, own)
    assert template_text(config, templates) == words
