"""The scripted executor under the real sampler and detokenizer: what it is told to say is what comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_support import ask, check_idle, generate, run_all

from ftgguf.engine.config import EngineConfig
from ftgguf.engine.engine import Engine
from ftgguf.engine.executor import Executor
from ftgguf.engine.messages import Generate, SamplingParams
from ftgguf.engine.scripted import Script, ScriptedExecutor, load_engine
from ftgguf.flags import parse_server
from ftgguf.gguf.reader import open_gguf
from ftgguf.vocab import Vocab

GGUF = Path(__file__).parents[1] / "data" / "stories260K.gguf"


@pytest.fixture(scope="module")
def vocab() -> Vocab:
    return Vocab.load(open_gguf(GGUF))


def engine_of(vocab: Vocab, scripts: list[Script], **config: int) -> Engine:
    executor = ScriptedExecutor(
        scripts, n_vocab=vocab.n_vocab, eog=min(vocab.eog_ids), text_of=lambda ids: vocab.detokenize(ids).decode()
    )
    assert isinstance(executor, Executor)
    return Engine(executor, vocab, EngineConfig(**({"n_ctx": 2048, "n_slots": 4} | config)))


def script(vocab: Vocab, *pieces: str, when: str = "", loop: bool = False) -> Script:
    return Script(tuple(t for piece in pieces for t in vocab.tokenize(piece, False, True)), when, loop)


def prompt(vocab: Vocab, text: str) -> list[int]:
    return vocab.tokenize(text, True, True)


def test_scripts_in_order_with_default_sampling(vocab: Vocab) -> None:
    """One script for each request in turn, then the end of generation, at temperature 0.8 and any seed."""
    engine = engine_of(vocab, [script(vocab, "Once upon"), script(vocab, "a time")])
    for id, text in enumerate(("Once upon", "a time", "Once upon")):
        request = Generate(id=id, prompt=tuple(prompt(vocab, "hello")))
        answer = ask(engine, request)
        assert answer.text.strip() == text
        assert answer.finished is not None
        assert answer.finished.stop_type == "eos"
    check_idle(engine)


def test_scripts_by_prompt_and_in_parallel(vocab: Vocab) -> None:
    """Prompts choose their script; eight at once on four slots never get each other's text."""
    engine = engine_of(vocab, [script(vocab, f"answer {c}" * 5, when=f"ask {c}") for c in "abcdefgh"])
    for id, c in enumerate("abcdefgh"):
        engine.submit(generate(id, prompt(vocab, f"please ask {c}")))
    answers = run_all(engine).answers
    for id, c in enumerate("abcdefgh"):
        assert answers[id].text.strip() == f"answer {c}" * 5


@pytest.mark.parametrize("stream", [True, False])
def test_stop_string_over_several_tokens(vocab: Vocab, stream: bool) -> None:
    """Bug log R01: pieces K, L .. R with stop "O P Q" end at " N "."""
    engine = engine_of(vocab, [script(vocab, *"KLMNOPQR")])
    full = ask(engine, generate(1, prompt(vocab, "x"))).text
    assert len(full) >= 8
    stop = full[full.index("O") : full.index("R")]
    answer = ask(engine, generate(2, prompt(vocab, "x"), stop=(stop,), stream=stream))
    assert answer.text == full[: full.index("O")]
    assert answer.finished is not None
    assert (answer.finished.stop_type, answer.finished.stopping_word) == ("word", stop)


def test_first_token_is_the_stop_word_with_probs(vocab: Vocab) -> None:
    """Bug log R04: empty text, no probabilities of what was dropped, no error."""
    engine = engine_of(vocab, [script(vocab, "\n", "x")])
    request = Generate(id=1, prompt=tuple(prompt(vocab, "x")), stop=("\n",), sampling=SamplingParams(n_probs=10))
    answer = ask(engine, request)
    assert answer.failed is None
    assert answer.text.strip() == ""
    assert answer.finished is not None
    assert answer.finished.stop_type == "word"


def test_emoji_in_byte_tokens(vocab: Vocab) -> None:
    """Bug log R05: four byte tokens are one delta with the emoji, none with U+FFFD."""
    table = {vocab.piece(i, True): i for i in range(vocab.n_vocab)}
    tokens = tuple(table[bytes([byte])] for byte in "😀".encode())
    engine = engine_of(vocab, [Script(tokens)])
    answer = ask(engine, generate(1, prompt(vocab, "x")))
    assert [delta.text for delta in answer.deltas if delta.text] == ["😀"]
    assert answer.tokens[:4] == list(tokens)


def test_loop_runs_to_the_limit(vocab: Vocab) -> None:
    """A looping script gives exactly as many tokens as asked for; without a limit, up to the context."""
    engine = engine_of(vocab, [script(vocab, "abc", loop=True)], n_ctx=256)
    assert len(ask(engine, generate(1, prompt(vocab, "x"), max_tokens=33)).tokens) == 33
    ids = prompt(vocab, "x")
    answer = ask(engine, generate(2, ids))
    assert len(answer.tokens) == 256 - len(ids)
    assert answer.finished is not None
    assert answer.finished.truncated


def test_from_a_file(tmp_path: Path) -> None:
    """`-m scripted:FILE.json` with text, pieces and ids; bad files are refused with their fault."""
    file = tmp_path / "s.json"
    file.write_text(
        json.dumps({"vocab": str(GGUF), "scripts": [{"text": "one"}, {"pieces": ["t", "wo"]}, {"tokens": [300, 301]}]})
    )
    engine = load_engine(parse_server(["-m", f"scripted:{file}", "-c", "512", "-np", "2"], {}), lambda *_: None)
    assert engine.ready().n_slots == 2
    answers = [ask(engine, generate(id, [1, 400])) for id in range(3)]
    assert [answer.text.strip() for answer in answers[:2]] == ["one", "t wo"]  # SPM puts a space
    assert answers[2].tokens[:2] == [300, 301]
    for content, fault in (("{", "JSON"), ("[]", "vocab"), (json.dumps({"scripts": []}), "vocab")):
        file.write_text(content)
        with pytest.raises(ValueError, match=fault):
            load_engine(parse_server(["-m", f"scripted:{file}"], {}), lambda *_: None)
