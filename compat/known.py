"""Where we answer otherwise than llama-server to the requests of `compat.requests`, each with its reason.

`unexpected` compares what a run found with this table both ways: a difference that is not here, and an entry that did
not occur, are both faults. docs/compat.md prints the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from compat.differential import Difference

_KERNELS = "the peer's build is for AVX2 and sums in another order; ours equals libllama on this machine to the digit"

KNOWN: dict[tuple[str, str], str] = {
    ("completion nothing to generate", "body.content"): "n_predict 0 evaluates the prompt only, as documented; the "
    "peer generates one token",
    ("completion nothing to generate", "body.tokens_predicted"): "as above",
    ("completion json schema", "body.content"): "the peer's masks allow white space between any two characters of a "
    "literal; ours follow the schema",
    ("completion json schema", "body.generation_settings.grammar"): "the schema as given; the peer shows "
    "its own conversion",
    ("v1/chat json object", "body.choices.0.message.content"): "the same: other tokens are allowed",
    ("v1/chat stop stream", "body.last.0.timings"): "text is held back only as far as it may begin the stop string, so "
    "there is none left to send when that is found",
    ("v1/responses greedy", "body.usage.output_tokens_details"): "OpenAI's clients require it",
    ("v1/responses messages", "body.usage.output_tokens_details"): "as above",
    ("error messages without messages", "body.type"): "Anthropic's clients read `type: error`; llama-server's object "
    "stands beside it",
    ("error bad grammar", "body.error.message"): "the same sentence, and where the fault is",
}
"""(request, path) -> why it differs. Every entry must occur."""

SCRIPTED_KNOWN: dict[tuple[str, str], str] = {
    (
        "scripted stop in the text stream",
        "body.last.0.timings",
    ): "text is held back only as far as it may begin the stop "
    "string, so there is none left to send when that is found",
    ("scripted cut in the tool call", "body.text.0.tool_calls.0.arguments"): "an opening brace alone is held back: the "
    "call may turn out to have no arguments",
}
"""The same for `compat.requests.SCRIPTED` on the scripted model."""

MACHINE: dict[tuple[str, str], str] = {
    ("*probabilities*", "body.*logprob"): _KERNELS,
    ("* logprobs*", "body.*logprob"): _KERNELS,
    ("completion seeded", "body.content"): _KERNELS,
    ("completion mirostat", "body.content"): _KERNELS,
}
"""The same for what depends on the processor, so that an entry need not occur; patterns as in fnmatch."""


def unexpected(found: Iterable[Difference], known: Mapping[tuple[str, str], str] = KNOWN) -> list[str]:
    """Differences that no entry explains, and entries of `known` that did not occur, as lines to print."""
    left = dict(known)
    lines = []
    for difference in found:
        key = (difference.request, difference.path)
        if left.pop(key, None) is not None:
            continue
        if not any(fnmatchcase(key[0], name) and fnmatchcase(key[1], path) for name, path in MACHINE):
            lines.append(str(difference))
    return lines + [f"{name}: {path}: listed in compat/known.py, but alike" for name, path in left]
