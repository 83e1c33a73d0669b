"""Chat templates, reasoning and text."""

from __future__ import annotations

from typing import Any

from ftgguf.flags import special
from ftgguf.flags import values as v
from ftgguf.flags.row import UNSET, Assignment, Flag, Warn, grouped, switch, value, void

_ENV = "LLAMA_ARG_"
_KWARGS = "chat.template_kwargs."


def _kwargs(given: dict[str, Any]) -> tuple[Assignment, ...]:
    return tuple(Assignment(_KWARGS + key, item) for key, item in given.items())


def _parse_kwargs(text: str, warn: Warn) -> dict[str, Any]:
    given = v.json_object(text, warn)
    if "enable_thinking" in given:
        warn("setting 'enable_thinking' by --chat-template-kwargs is deprecated; use --reasoning on or off")
    if "preserve_reasoning" in given:
        warn("setting 'preserve_reasoning' by --chat-template-kwargs is deprecated; use --reasoning-preserve")
    return given


def _reasoning(mode: str) -> tuple[Assignment, ...]:
    thinking = () if mode == "auto" else (Assignment(_KWARGS + "enable_thinking", mode == "on"),)
    return (Assignment("chat.reasoning", mode), *thinking)


def _effort(level: str) -> tuple[Assignment, ...]:
    return (Assignment(_KWARGS + "reasoning_effort", UNSET if level == "default" else level),)


def _template(source: str, path: str = "") -> tuple[Assignment, ...]:
    return (Assignment("chat.template", source), Assignment("chat.template_file", path))


FLAGS: tuple[Flag, ...] = grouped(
    "server",
    switch("--jinja", no=("--no-jinja",), to="chat.jinja", env=_ENV + "JINJA", tier_off="B",
           note_off="a model's template is matched to llama-server's built-in ones by what it contains; no tools",
           help="render chats with the Jinja template"),
    value("--chat-template", hint="JINJA_TEMPLATE", parse=v.text, expand=_template, env=_ENV + "CHAT_TEMPLATE",
          shown="from the model",
          help="chat template: Jinja source, or the name of a built-in one (chatml, llama3, ...)"),
    value("--chat-template-file", hint="JINJA_TEMPLATE_FILE", parse=special.template_file,
          expand=lambda found: _template(*found), env=_ENV + "CHAT_TEMPLATE_FILE",
          shown="from the model", completes="*.jinja", help="file with the chat template"),
    value("--chat-template-kwargs", hint="STRING", parse=_parse_kwargs, expand=_kwargs, shown="{}",
          env=_ENV + "CHAT_TEMPLATE_KWARGS", help="variables for the template, as a JSON object"),
    switch("--skip-chat-parsing", no=("--no-skip-chat-parsing",), to="chat.skip_parsing",
           env=_ENV + "SKIP_CHAT_PARSING",
           help="leave reasoning and tool calls in the content, unparsed"),
    value("--reasoning-format", hint="FORMAT", to="chat.reasoning_format", env=_ENV + "THINK",
          parse=v.choice("none", "auto", "deepseek", "deepseek-legacy", words="Unknown reasoning format: {}"),
          help="where reasoning goes: none (stays in content), deepseek (reasoning_content), deepseek-legacy (both), "
               "auto"),
    value("-rea", "--reasoning", hint="[on|off|auto]", parse=v.on_off_auto("--reasoning"), expand=_reasoning,
          env=_ENV + "REASONING", shown="auto, as the template allows",
          help="ask the model to reason: on, off, auto"),
    value("--reasoning-effort", hint="LEVEL", parse=v.text, expand=_effort, env=_ENV + "REASONING_EFFORT",
          shown="default, the template's",
          help="effort given to the template: minimal, low, medium, high, xhigh, max, or default"),
    value("--reasoning-budget", hint="N", parse=v.whole(-1), to="chat.reasoning_budget", env=_ENV + "THINK_BUDGET",
          help="most tokens of reasoning, 0 to end it at once, -1 for no limit"),
    value("--reasoning-budget-message", hint="MESSAGE", parse=v.text, to="chat.reasoning_budget_message",
          env=_ENV + "THINK_BUDGET_MESSAGE", shown="none",
          help="text put before the end of reasoning when the budget is used up"),
    switch("--reasoning-preserve", no=("--no-reasoning-preserve",), env=_ENV + "REASONING_PRESERVE",
           expand=lambda on: (Assignment(_KWARGS + "preserve_reasoning", on),), shown="on",
           help="keep the reasoning of earlier turns where the template can"),
    switch("--prefill-assistant", no=("--no-prefill-assistant",), to="chat.prefill_assistant",
           env=_ENV + "PREFILL_ASSISTANT",
           help="go on with a last message of the assistant instead of answering it"),
    value("-r", "--reverse-prompt", hint="PROMPT", parse=lambda text, warn: (text,), to="chat.reverse_prompt",
          mode="append", shown="none", help="stop at this text where a request gives no stop of its own"),
    void("-sp", "--special", to="chat.special", help="show special tokens in the output"),
    void("--spm-infill", to="chat.spm_infill", tier="B",
         note="/infill prompts are ordered suffix, prefix, middle", help="order /infill as suffix, prefix, middle"),
    switch("-e", "--escape", no=("--no-escape",), to="legacy.escape", shown="on",
           help=r"read \n \r \t \' \" \\ in --reverse-prompt and --dry-sequence-breaker"),
)  # fmt: skip
