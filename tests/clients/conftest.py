"""A whole server, engine included, on a model that says what a test's prompt calls for."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from compat.requests import SCRIPT
from compat.scripted import make_scripted
from compat.server import our_server


def call(name: str, /, **arguments: object) -> str:
    """A tool call as the model writes it."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


ANN = {"name": "Ann", "age": 30}
SCRIPTS = [
    {"when": "<tool_response>", "text": "It is sunny in Paris."},
    {"when": "final_result", "text": call("final_result", **ANN)},
    {"when": '"Person"', "text": call("Person", **ANN)},
    {"when": "as JSON", "text": json.dumps(ANN)},
    {"when": "two cities", "text": call("get_weather", city="Paris") + "\n" + call("get_weather", city="Rome")},
    {"when": "get_weather", "text": "<think>\nI look it up.\n</think>\n\n" + call("get_weather", city="Paris")},
    {"when": "Why", "text": "<think>\nBecause.\n</think>\n\nSo it is, na\u00efve \u2615."},
    {"when": "ends with end", "text": "Short.<|endoftext|>not this"},
    {"when": "ends with im_", "text": "Short.<|im_end|>not this"},
    {"text": "Hello there, na\u00efve \u2615."},
]
"""The first whose `when` is in the prompt; tools are in the system text, so their names are."""


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("clients")
    make_scripted(folder / "vocab.gguf", SCRIPT)
    scripts = [{**script, "text": script["text"] + "<|im_end|>"} for script in SCRIPTS]
    (folder / "script.json").write_text(json.dumps({"vocab": "vocab.gguf", "scripts": scripts}))
    with our_server(f"scripted:{folder / 'script.json'}", ["-c", "8192", "-a", "scripted", "--metrics"]) as address:
        yield address
