"""Chat templates: which one is used, what it can do, and rendering as llama-server renders.

`ChatTemplate.render` is llama.cpp's `common_chat_template_direct_apply`: the template's variables, its two known
repairs of published templates, and the removal of a leading BOS (trailing EOS) where the tokenizer adds one itself.
What is done to the messages before (roles, typed content, tool arguments) is in `ftgguf.chat.messages`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from jinja2 import TemplateError

from ftgguf.chat.builtin import BUILTIN, match_builtin
from ftgguf.chat.caps import Caps, preserve_reasoning, probe
from ftgguf.chat.sandbox import ChatEnvironment, Raised, RenderLimit


class ChatTemplateError(ValueError):
    """A template cannot be compiled or rendered; the text says why."""


REPAIRS = (
    # gpt-oss refuses histories that quote its own channel markers, Mistral ones with empty turns; llama-server
    # renders both
    (
        "<|channel|>",
        '{%- if "<|channel|>analysis<|message|>" in message.content or '
        '"<|channel|>final<|message|>" in message.content %}',
    ),
    (
        "[TOOL_CALLS]",
        "{%- if (message['content'] is none or message['content'] == '' or message['content']|length == 0) and "
        "(message['tool_calls'] is not defined or message['tool_calls'] is none or "
        "message['tool_calls']|length == 0) %}",
    ),
)


class ChatTemplate:
    """One compiled template. Thread-safe: a lock guards the environment's budget."""

    def __init__(
        self, source: str, bos_token: str = "", eos_token: str = "", add_bos: bool = False, add_eos: bool = False
    ) -> None:
        for marker, condition in REPAIRS:
            if marker in source:
                source = source.replace(condition, "{%- if false %}")
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.add_bos = add_bos
        self.add_eos = add_eos
        self._environment = ChatEnvironment()
        self._lock = threading.Lock()
        try:
            self._template = self._environment.from_string(source)
        except (TemplateError, RecursionError, ValueError, SyntaxError) as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from None
        try:
            self.caps: Caps = probe(self._run)
        except RenderLimit as error:
            raise ChatTemplateError(str(error)) from None

    def _run(self, variables: dict[str, Any]) -> str:
        """The raw rendering, bounded in time and size."""
        with self._lock:
            budget = self._environment.budget
            budget.reset()
            size, parts = 0, []
            for part in self._template.generate(variables):
                parts.append(part)
                size += len(part)
                budget.size(size)
            return "".join(parts)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool = True,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`. `variables` are `chat_template_kwargs`; they override what is set here.

        Raises `ChatTemplateError` with the template's own text where it refuses the conversation.
        """
        now = time.localtime()
        context: dict[str, Any] = {
            "messages": messages,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "enable_thinking": enable_thinking,
            "datetime": time.strftime("%b %d %Y", now),
            "date_string": time.strftime("%d %b %Y", now),
        }
        if tools:
            context["tools"] = tools
        context |= variables or {}
        if add_generation_prompt:
            context["add_generation_prompt"] = True
        if isinstance(context.get("preserve_reasoning"), bool):
            context |= preserve_reasoning(context["preserve_reasoning"])
        effort = context.get("reasoning_effort")
        if isinstance(effort, str):
            context["reasoning_strength"] = effort
        text = self._render(context)
        if self.add_bos and self.bos_token:
            text = text.removeprefix(self.bos_token)
        if self.add_eos and self.eos_token:
            text = text.removesuffix(self.eos_token)
        return text

    def _render(self, context: dict[str, Any]) -> str:
        try:
            return self._run(context)
        except Raised as error:
            raise ChatTemplateError(f"Jinja Exception: {error.message}") from None
        except RenderLimit as error:
            raise ChatTemplateError(str(error)) from None
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise ChatTemplateError(f"the chat template failed: {type(error).__name__}: {error}") from None
        except (RecursionError, ArithmeticError, MemoryError) as error:
            raise ChatTemplateError(f"the chat template failed: {type(error).__name__}") from None


class ChatTemplates:
    """The templates of one model: `default`, and `tool_use` where the file has a second one for tools."""

    def __init__(self, default: ChatTemplate, tool_use: ChatTemplate | None = None, explicit: bool = True) -> None:
        self.default = default
        self.tool_use = tool_use
        self.explicit = explicit
        """False: the file had none and chatml stands in."""
        self.supported = True
        """False: Jinja is off, and no built-in is like the model's template."""

    def without_jinja(self, build: Callable[[str], ChatTemplate]) -> ChatTemplates:
        """What `--no-jinja` leaves: the built-in that is like the default template, made by `build`."""
        source = self.default.source
        name = next((name for name, text in BUILTIN.items() if text == source), "") or match_builtin(source)
        plain = ChatTemplates(build(BUILTIN[name]) if name else self.default, None, self.explicit)
        plain.supported = bool(name)
        return plain

    def pick(self, has_tools: bool) -> ChatTemplate:
        return self.tool_use if has_tools and self.tool_use is not None else self.default


def load_templates(
    override: str,
    model_default: str = "",
    model_tool_use: str = "",
    *,
    bos_token: str = "",
    eos_token: str = "",
    add_bos: bool = False,
    add_eos: bool = False,
    jinja: bool = True,
) -> ChatTemplates:
    """Choose and compile: `override` (`--chat-template`: a built-in's name or a template's text), else the file's.

    A file without a template gets chatml, as in llama-server. Raises `ChatTemplateError` if it does not compile.
    """

    def build(source: str) -> ChatTemplate:
        return ChatTemplate(source, bos_token, eos_token, add_bos, add_eos)

    if override:
        given = ChatTemplates(build(BUILTIN.get(override, override)))
        return given if jinja else given.without_jinja(build)
    explicit = bool(model_default or model_tool_use)
    source = model_default or model_tool_use or BUILTIN["chatml"]
    tool_use = None
    if model_tool_use:
        try:
            tool_use = build(model_tool_use)
        except ChatTemplateError:
            tool_use = None  # llama-server ignores a broken second template too
    found = ChatTemplates(build(BUILTIN.get(source, source)), tool_use, explicit)
    return found if jinja else found.without_jinja(build)
