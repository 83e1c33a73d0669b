"""The chat dialects: how a family of templates marks thinking and tool calls, recognised by its template's text.

A dialect says what is done to the messages before rendering, how the last assistant message is continued, which
control tokens must stay visible, and which parser reads the output. The table's order is llama.cpp's order of
detection (`common_chat_try_specialized_template`); what no entry knows is `generic`, whose thinking tags are found by
rendering (`probe_thinking`) and whose tool format is found by the markers in the template.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from ftgguf.chat.messages import Message, text_of

Adjust = Callable[[list[Message]], list[Message]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """One family. `turn` opens an assistant message when a prefilled one is continued; `think`/`unthink` surround the
    thinking there; `final` comes between them and the content. `tags` are the thinking tags in generated text, the
    first the opening one; any of the others ends the thinking."""

    name: str
    tools: str = "hermes"
    """Key of the tool-call parser in `ftgguf.chat.tools`."""
    turn: str | None = None
    """None: the template's own generation prompt up to the thinking tag."""
    think: str = ""
    unthink: str = ""
    final: str = ""
    tags: tuple[str, ...] = ()
    preserved: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    adjust: Adjust | None = None
    keep_developer: bool = False
    loose: str = ""
    """White space that is layout, beyond what the template writes: `lead` (before thinking), `tail` (after), `both`."""
    format: str = "peg-native"
    """llama-server's name of the output format, shown in `generation_settings.chat_format`."""


# --------------------------------------------------------------------------------------- message adjustments


def thinking_field(messages: list[Message]) -> list[Message]:
    """LFM2: the template reads `thinking`."""
    return [m | {"thinking": m["reasoning_content"]} if "reasoning_content" in m else m for m in messages]


def harmony_fields(messages: list[Message]) -> list[Message]:
    """gpt-oss reads `thinking`, and refuses content beside it in a message with tool calls."""
    out = thinking_field(messages)
    return [
        {key: value for key, value in m.items() if key != "content"} if "thinking" in m and m.get("tool_calls") else m
        for m in out
    ]


def thinking_parts(messages: list[Message]) -> list[Message]:
    """Ministral 3: system and assistant contents are lists of `thinking` and `text` blocks."""
    out: list[Message] = []
    for message in messages:
        if message["role"] in ("system", "assistant"):
            content = message.get("content", "")
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
            if "reasoning_content" in message:
                blocks.insert(0, {"type": "thinking", "thinking": message["reasoning_content"]})
            message = {k: v for k, v in message.items() if k != "reasoning_content"} | {"content": blocks}
        out.append(message)
    return out


def sorted_results(messages: list[Message]) -> list[Message]:
    """DeepSeek V4: tool results of a run come in the order of the calls they answer."""
    out = list(messages)
    order: dict[str, int] = {}
    start = 0
    while start < len(out):
        message = out[start]
        if message["role"] == "assistant" and message.get("tool_calls"):
            order = {call["id"]: i for i, call in enumerate(message["tool_calls"]) if call.get("id")}
        if message["role"] not in ("user", "tool"):
            start += 1
            continue
        end = start
        while end < len(out) and out[end]["role"] in ("user", "tool"):
            end += 1
        places = [i for i in range(start, end) if out[i]["role"] == "tool"]
        if len(places) > 1 and order:
            results = sorted((out[i] for i in places), key=lambda m: order.get(m.get("tool_call_id", ""), 0))
            for place, result in zip(places, results, strict=True):
                out[place] = result
        start = end
    return out


def gemma_responses(messages: list[Message]) -> list[Message]:
    """Older Gemma 4 templates: calls, their results and the answer are one message with `tool_responses`."""
    out: list[Message] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        if message["role"] != "assistant" or not message.get("tool_calls"):
            out.append(message)
            continue
        calls = message["tool_calls"]
        joined: Message = {"role": "assistant", "tool_calls": calls}
        responses: list[dict[str, Any]] = []
        while position < len(messages) and messages[position]["role"] == "tool":
            result = messages[position]
            index = len(responses)
            name = calls[index]["function"]["name"] if index < len(calls) else result.get("tool_call_id", "")
            responses.append({"name": name, "response": _json_or_text(result.get("content", ""))})
            position += 1
        if responses:
            joined["tool_responses"] = responses
        following = messages[position] if position < len(messages) else {"role": ""}
        if following["role"] == "assistant" and not following.get("tool_calls") and following.get("content"):
            joined["content"] = following["content"]
            position += 1
        if "reasoning_content" in message:
            joined["reasoning_content"] = message["reasoning_content"]
        out.append(joined)
    return out


def _json_or_text(content: Any) -> Any:
    if not isinstance(content, str):
        return content
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError:
        return content


# ---------------------------------------------------------------------------------------------------- table

CHATML_TURN = "<|im_start|>assistant\n"
DSML = "｜DSML｜"
_DEEPSEEK = Dialect(
    "deepseek-v3.2", "deepseek_dsml", "<｜Assistant｜>", "<think>", "</think>", "",
    ("<think>", "</think>", f"<{DSML}function_calls>"), (DSML, "<think>", "</think>"),
)  # fmt: skip

MINISTRAL = Dialect(
    "ministral-3", "mistral", "", "[THINK]", "[/THINK]", "", ("[THINK]", "[/THINK]"),
    ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"), adjust=thinking_parts, loose="tail",
)  # fmt: skip
HARMONY = Dialect(
    "gpt-oss", "harmony", "<|start|>assistant<|channel|>analysis<|message|>", "", "<|end|>",
    "<|start|>assistant<|channel|>final<|message|>", ("<|channel|>analysis<|message|>", "<|end|>"),
    ("<|channel|>", "<|constrain|>", "<|message|>", "<|start|>", "<|end|>"),
    adjust=harmony_fields, keep_developer=True,
)  # fmt: skip
MUSE = Dialect(
    "muse-glimmer", "muse", "<|start|>assistant to=self<|message|>", "", "<|eom|>",
    "<|start|>assistant to=user<|message|>", (" to=self<|message|>", "<|eom|>"),
    ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>", "<atem:function_calls>", "<atem:invoke", "<atem:parameter",
     "</atem:parameter>", "</atem:invoke>", "</atem:function_calls>"),
)  # fmt: skip
FUNCTIONARY = Dialect(
    "functionary-v3.2", "functionary", "<|start_header_id|>assistant<|end_header_id|>\n\n>>>all\n", "", "", "",
    (), (">>>all",),
)  # fmt: skip
KIMI_K2 = Dialect(
    "kimi-k2", "kimi_k2", "<|im_assistant|>assistant<|im_middle|>", "<think>", "</think>", "",
    ("<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
     "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<think>", "</think>"),
)  # fmt: skip
KIMI_K3 = Dialect(
    "kimi-k3", "kimi_k3", '<|open|>message role="assistant"<|sep|>', "<|open|>think<|sep|>", "<|close|>think<|sep|>",
    "<|open|>response<|sep|>", ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
)  # fmt: skip
LING_3 = Dialect(
    "ling-3", "glm", "<role>ASSISTANT</role>\n", "<think>", "</think>", "", ("<think>", "</think>", "<tool_call>"),
    ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ("<|role_end|>",),
)  # fmt: skip
COHERE_2 = Dialect(
    "cohere2-moe", "cohere", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|START_THINKING|>", "<|END_THINKING|>",
    "<|START_TEXT|>", ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|START_ACTION|>", "<|END_ACTION|>"),
)  # fmt: skip
_LFM = ("<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>")
LFM_2 = Dialect(
    "lfm2", "lfm2", CHATML_TURN, "<think>", "</think>", "", ("<think>", "</think>"),
    (*_LFM, "<|tool_list_start|>", "<|tool_list_end|>"), adjust=thinking_field,
)  # fmt: skip
LFM_25 = Dialect(
    "lfm2.5", "lfm2", CHATML_TURN, "<think>", "</think>", "", ("<think>", "</think>"), _LFM, adjust=thinking_field
)
GIGACHAT = Dialect(
    "gigachat-3", "gigachat", "assistant<|role_sep|>\n", "", "", "", (), ("<|message_sep|>\n\n", "<|role_sep|>\n")
)
MINIMAX_M3 = Dialect(
    "minimax-m3", "minimax_m3", None, "<mm:think>", "</mm:think>", "", ("<mm:think>", "</mm:think>"),
    ("]<]minimax[>[", "<tool_call>", "</tool_call>", "<mm:think>", "</mm:think>"), format="peg-minimax-m3",
)  # fmt: skip
DEEPSEEK_V4 = Dialect(
    "deepseek-v4", "deepseek_dsml", "<｜Assistant｜>", "<think>", "</think>", "",
    ("<think>", "</think>", f"<{DSML}tool_calls>"), (DSML, "<think>", "</think>"), adjust=sorted_results,
)  # fmt: skip
GEMMA_4 = Dialect(
    "gemma-4", "gemma4", "<|turn>model\n", "<|channel>thought\n", "<channel|>", "", ("<|channel>thought", "<channel|>"),
    ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|turn>"), loose="lead", format="peg-gemma4",
)  # fmt: skip
GEMMA_4_OLD = Dialect(
    "gemma-4", "gemma4", "<|turn>model\n", "<|channel>thought\n", "<channel|>", "", ("<|channel>thought", "<channel|>"),
    GEMMA_4.preserved, adjust=gemma_responses, loose="lead", format="peg-gemma4",
)  # fmt: skip
MINICPM_5 = Dialect(
    "minicpm-5", "minicpm5", CHATML_TURN, "<think>\n", "\n</think>\n\n", "", ("<think>", "</think>"),
    ("<function", "<param", "</function>", "</param>", "<think>", "</think>"), loose="both",
)  # fmt: skip
QWEN_CODER = Dialect(
    "qwen3-coder", "qwen3_coder", CHATML_TURN, preserved=("<tool_call>", "</tool_call>"),
)  # fmt: skip
QWEN_35 = Dialect(
    "qwen3.5", "qwen3_coder", CHATML_TURN, "<think>\n", "\n</think>\n\n", "", ("<think>", "</think>", "<tool_call>"),
    ("<tool_call>", "</tool_call>", "<think>", "</think>"), loose="both",
)  # fmt: skip


APRIEL = Dialect(
    "apriel-1.6", "tool_calls_list", "\n<|begin_assistant|>\n", "", "\n[BEGIN FINAL RESPONSE]\n", "",
    ("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"), ("<tool_calls>", "</tool_calls>"),
)  # fmt: skip


def detect(source: str) -> Dialect | None:
    """The dialect that `source`'s markers name, or None (see `generic`)."""

    def has(*markers: str) -> bool:
        return all(marker in source for marker in markers)

    if has("[SYSTEM_PROMPT]", "[TOOL_CALLS]", "[ARGS]") and not has("[CALL_ID]"):
        return MINISTRAL
    if has("<|channel|>"):
        return HARMONY
    if has("<atem:function_calls>", "<|eom|>"):
        return MUSE
    if has(">>>all", ">>>${recipient}"):
        return FUNCTIONARY
    if has("<|tool_calls_section_begin|>", "<|tool_call_begin|>"):
        return KIMI_K2
    if has("<|open|>", "<|close|>", "<|end_of_msg|>"):
        return KIMI_K3
    if has("<role>ASSISTANT</role>", "<arg_key>"):
        return LING_3
    if has("<|START_TEXT|>", "<|START_ACTION|>"):
        return COHERE_2
    if has("<|tool_list_start|>", "<|tool_list_end|>"):
        return LFM_2
    if has("List of tools: [") and not has("<|tool_list_start|>"):
        return LFM_25
    if has("<|role_sep|>", "<|message_sep|>") and not has("<|function_call|>"):
        return GIGACHAT
    if has("]<]minimax[>[", "<tool_call>", "<invoke name="):
        return MINIMAX_M3
    if has("dsml_token", "DSML") and ("function_calls" in source or "tool_calls" in source):
        return _DEEPSEEK if has("function_calls") else DEEPSEEK_V4
    if has("'<|tool_call>call:'"):
        return GEMMA_4 if has("{#- OpenAI Chat Completions:") else GEMMA_4_OLD
    if has("Tool usage guidelines:", '<function name="', '<param name="'):
        return MINICPM_5
    if has("<tool_call>", "<function=", "<parameter=") and not has("'<tool_call><function=' ~ tool_call.name ~ '>'"):
        return QWEN_35 if has("<think>") else QWEN_CODER
    if has("[BEGIN FINAL RESPONSE]", "<|begin_assistant|>"):
        return APRIEL
    return None


_DEEPSEEK_TOKENS = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
_GLM_TOKENS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

TOOL_MARKERS: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_r1", _DEEPSEEK_TOKENS),
    (("<｜tool▁calls▁begin｜>",), "deepseek", _DEEPSEEK_TOKENS),
    (("<minimax:tool_call>",), "minimax_m2", ("<minimax:tool_call>", "</minimax:tool_call>")),
    (("<seed:tool_call>",), "seed", ("<seed:tool_call>", "</seed:tool_call>")),
    (("<tool_call>", "<arg_key>"), "glm", _GLM_TOKENS),
    (("<tool_call>", "<function=", "<parameter="), "qwen3_coder", ("<tool_call>", "</tool_call>")),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    (("[TOOL_CALLS]",), "mistral_list", ("[TOOL_CALLS]",)),
    (("<TOOLCALL>",), "nemotron", ("<TOOLCALL>", "</TOOLCALL>")),
    (("<|tools_prefix|>",), "apertus", ("<|tools_prefix|>", "<|tools_suffix|>")),
    (("<|START_ACTION|>",), "cohere", ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    (("<|tool_call:begin|>",), "solar", ("<|tool_calls|>", "<|tool_call:begin|>", "<|tool_call:name|>",
                                         "<|tool_call:args|>", "<|tool_call:end|>", "<|calls|>")),
    (("<tool_sep", "arg_key"), "hy3", ()),
    (("<|function_call|>", "<|role_sep|>"), "gigachat_31", ("<|function_call|>",)),
    (("<tool_calls>", "</tool_calls>"), "tool_calls_list", ("<tool_calls>", "</tool_calls>")),
    (("<|tool_call|>",), "granite", ("<|tool_call|>",)),
    (("<tool_call>",), "hermes", ("<tool_call>", "</tool_call>")),
    (("functools[",), "functools", ()),
    (("<function=", "</function>"), "function_tag", ()),
    (("<|python_tag|>",), "llama3", ("<|python_tag|>",)),
    (('{"name": function name, "parameters"',), "llama3", ()),
)  # fmt: skip
"""Markers in a template's text -> the parser of its calls, and the tokens that must stay visible; first match."""


def generic(source: str, think: tuple[str, str] | None) -> Dialect:
    """The dialect of a template no entry knows; `think` are its thinking tags as rendered, with white space."""
    tools, preserved = "generic", ()
    for markers, name, tokens in TOOL_MARKERS:
        if all(marker in source for marker in markers):
            tools, preserved = name, tokens  # type: ignore[assignment]
            break
    if think is None:
        return Dialect("generic", tools, preserved=preserved)
    tags = (think[0].strip(), think[1].strip())
    return Dialect("generic", tools, None, *think, "", tags, (*preserved, *tags))


_OPEN = re.compile(r"(<[^<>\s]{1,24}>|\[[A-Z_]{2,24}\])[ \n]*$")
_CLOSE = re.compile(r"^[ \n]*(</[^<>\s]{1,24}>|<[^<>\s]{1,24}>|\[/[A-Z_]{2,24}\])[ \n]*")
_KNOWN = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
REASON, ANSWER = "REASONING_PROBE_TEXT", "ANSWER_PROBE_TEXT"


def probe_thinking(source: str, render: Callable[[list[Message], bool], str]) -> tuple[str, str] | None:
    """The texts a template puts around an assistant's thinking: from how it renders one, or tags it names.

    `render(messages, add_generation_prompt)`. Where the generation prompt itself opens the thinking, its form of the
    opening wins (a template may render history with other white space than it prefills).
    """
    user = {"role": "user", "content": "User message"}
    try:
        text = render([user, {"role": "assistant", "content": ANSWER, "reasoning_content": REASON}], False)
        prefill = render([user], True)
    except ValueError:
        return None
    before, found, after = text.partition(REASON)
    start, end = "", ""
    if found and ANSWER in after:
        opening, closing = _OPEN.search(before), _CLOSE.search(after[: after.index(ANSWER)])
        if opening and closing:
            start, end = before[opening.start() :], closing.group()
    if not start:
        if "<SPECIAL_11>" in source and "</think>" in source:
            return "<think>\n", "</think>"  # Nemotron Nano v2: it only ever strips thinking from the history
        return next((pair for pair in _KNOWN if pair[0] in source and pair[1] in source), None)
    opening = _OPEN.search(prefill)
    if opening and opening.group(1) == start.strip() and prefill[opening.start() :] != start:
        start = prefill[opening.start() :]
        end = end.strip() if start == start.strip() else end
    return start, end


def continuation(dialect: Dialect, generation_prompt: str, message: Message, with_content: bool) -> str:
    """What opens the assistant's turn when its last message is continued: thinking, then (`with_content`) its text."""
    opening = dialect.turn
    if opening is None:
        tag = dialect.think.strip()
        cut = generation_prompt.find(tag) if tag else -1
        opening = generation_prompt if cut < 0 else generation_prompt[:cut]
    out = opening
    reasoning = message.get("reasoning_content", "")
    if dialect.name == "deepseek-v4" and not reasoning:
        out += dialect.unthink
    elif dialect.tags:
        out += dialect.think + reasoning + (dialect.unthink if with_content else "")
    if with_content:
        out += dialect.final + text_of(message.get("content", ""))
    return out
