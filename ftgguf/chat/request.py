"""From the body of a chat request to a plan: the prompt, the constraint, and the parser of the answer.

This is llama-server's `oaicompat_chat_params_parse` and `common_chat_templates_apply`: the same checks in the same
order with the same texts. What is ours: `tool_choice` by name works, and a tool whose schema cannot be compiled does
not fail the request (see `ftgguf.chat.constraint`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ftgguf.chat import dialects
from ftgguf.chat.constraint import schema_grammar, tool_grammar
from ftgguf.chat.dialects import Dialect
from ftgguf.chat.messages import Message, check_messages, fit_messages, parse_messages, parse_tools, text_of
from ftgguf.chat.parser import OutputParser, PlainParser
from ftgguf.chat.reasoning import ReasoningParser, thinking_is_open
from ftgguf.chat.template import ChatTemplate, ChatTemplateError, ChatTemplates
from ftgguf.chat.tools import tool_parser
from ftgguf.chat.tools.harmony import HarmonyParser
from ftgguf.engine.messages import Grammar
from ftgguf.flags.config import ChatConfig
from ftgguf.server.errors import InvalidRequest, server_error
from ftgguf.server.wire import WrongType, as_str, lenient

log = logging.getLogger("ftgguf.server")

STEPFUN = "You have access to the following functions in JSONSchema format"


@dataclass(slots=True)
class ChatPlan:
    """A chat request made ready: `body` holds the fields that remain for the schema, `prompt` included."""

    prompt: str
    generation_prompt: str
    dialect: Dialect
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Tools whose calls are parsed; empty when there are none or `tool_choice` is none."""
    extract_reasoning: bool = True
    thinking_open: bool = False
    """The prompt ends inside an open thinking block."""
    plain: bool = False
    prefilled: tuple[str, str] = ("", "")
    """The thinking and the text of the continued assistant message, which a whole answer repeats (llama-server)."""
    body: dict[str, Any] = field(default_factory=dict)

    def parser(self) -> OutputParser:
        """A fresh parser for one answer."""
        if self.plain:
            return PlainParser()
        inner = tool_parser(self.dialect.tools, self.tools, self.extract_reasoning)
        dialect = self.dialect
        if isinstance(inner, HarmonyParser):  # thinking is one of the channels there; the prompt may have opened one
            inner.begin(self.generation_prompt)
            return inner
        if not dialect.tags or not self.extract_reasoning:
            return inner
        lead, tail = trailing_space(dialect.think), trailing_space(dialect.unthink)
        return ReasoningParser(dialect.tags, self.thinking_open, inner, lead, tail, dialect.loose)


@dataclass(slots=True)
class _Inputs:
    """The request's fields that decide rendering (llama.cpp's `common_chat_templates_inputs`)."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    tool_choice: str
    forced_tool: str
    schema: Any
    parallel: bool
    add_generation_prompt: bool
    continue_final: str
    reasoning_format: str
    enable_thinking: bool
    variables: dict[str, Any]


class ChatPlanner:
    """Plans the chat requests of one model."""

    def __init__(
        self, templates: ChatTemplates, config: ChatConfig, control_tokens: Mapping[str, int] | None = None
    ) -> None:
        """`control_tokens`: text -> id of the vocabulary's control tokens, for grammars that must produce them."""
        self.templates = templates
        self.control_tokens = control_tokens or {}
        self.config = config
        self._dialects: dict[int, Dialect] = {}
        self._warned = False
        thinks = self.thinks(templates.default)
        self.enable_thinking = config.reasoning != "off" and thinks

    def thinks(self, template: ChatTemplate) -> bool:
        """Whether the template's family has thinking at all."""
        return bool(self.dialect(template).tags)

    def dialect(self, template: ChatTemplate) -> Dialect:
        """The template's dialect, found once."""
        found = self._dialects.get(id(template))
        if found is None:
            source = template.source

            def render(messages: list[Message], generation: bool) -> str:
                fitted = fit_messages(messages, template.caps, False)
                return template.render(fitted, add_generation_prompt=generation, enable_thinking=True)

            found = dialects.detect(source)
            if found is None:
                found = dialects.generic(source, dialects.probe_thinking(source, render))
            self._dialects[id(template)] = found
        return found

    def plan(self, body: Any) -> ChatPlan:
        """The plan of a request body; raises `ApiError` as llama-server answers."""
        if not isinstance(body, dict):
            raise InvalidRequest("'messages' is required")
        try:
            inputs = self._inputs(body)
        except WrongType as error:
            raise InvalidRequest(str(error)) from None
        if not self.templates.supported:
            raise server_error("this custom template is not supported, try using --jinja")
        template = self.templates.pick(bool(inputs.tools))
        dialect = self.dialect(template)
        if inputs.tools and not template.caps.supports_tools and not self._warned:
            self._warned = True
            log.warning("this model's chat template never mentions tools: the model will not know about them")
        try:
            prompt, generation, last = self._prompt(template, dialect, inputs)
        except ChatTemplateError as error:
            raise InvalidRequest(str(error)) from None
        plan = ChatPlan(
            prompt,
            generation,
            dialect,
            tools=inputs.tools if inputs.tool_choice != "none" else [],
            extract_reasoning=inputs.reasoning_format != "none",
            thinking_open=bool(dialect.tags) and thinking_is_open(generation, dialect.tags),
            plain=self.config.skip_parsing or not self.config.jinja,
        )
        if last is not None and plan.extract_reasoning and not plan.plain:
            thought = last.get("reasoning_content", "") if dialect.tags else ""
            plan.prefilled = (thought, text_of(last.get("content", "")))
        plan.body = self._rest(body, plan, inputs)
        return plan

    # ---------------------------------------------------------------------------------------------- inputs

    def _inputs(self, body: dict[str, Any]) -> _Inputs:
        tools = body.get("tools")
        has_tools = isinstance(tools, list) and bool(tools)
        tool_choice, forced = self._tool_choice(body)
        if not self.config.jinja:
            if has_tools:
                raise server_error("tools param requires --jinja flag")
            if tool_choice != "auto":
                raise server_error("tool_choice param requires --jinja flag")
        schema = self._schema(body)
        raw = check_messages(body)
        messages = parse_messages(raw)
        parsed_tools = parse_tools(tools)
        if tool_choice not in ("auto", "none", "required"):
            raise InvalidRequest(f"Invalid tool_choice: {tool_choice}")
        caps = self.templates.pick(has_tools).caps
        inputs = _Inputs(
            messages=messages,
            tools=parsed_tools,
            tool_choice=tool_choice,
            forced_tool=forced,
            schema=schema,
            parallel=lenient(body, "parallel_tool_calls", caps.supports_parallel_tool_calls),
            add_generation_prompt=lenient(body, "add_generation_prompt", True),
            continue_final="",
            reasoning_format=self.config.reasoning_format,
            enable_thinking=self.enable_thinking,
            variables=dict(self.config.template_kwargs),
        )
        self._continuation(body, inputs)
        if body.get("reasoning_format") is not None:
            inputs.reasoning_format = as_str(body["reasoning_format"])
        if parsed_tools and tool_choice != "none" and body.get("grammar"):
            raise InvalidRequest("Cannot use custom grammar constraints with tools.")
        self._thinking(body, inputs)
        return inputs

    @staticmethod
    def _tool_choice(body: dict[str, Any]) -> tuple[str, str]:
        """(choice, name of the one function it forces)."""
        choice = body.get("tool_choice")
        if isinstance(choice, dict):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, dict) else choice.get("name")
            if isinstance(name, str) and name:
                return "required", name
            return "auto", ""
        return (choice if isinstance(choice, str) else "auto"), ""

    @staticmethod
    def _schema(body: dict[str, Any]) -> Any:
        """The JSON schema the answer must follow, or None."""
        schema = body.get("json_schema")
        if schema is not None and lenient(body, "grammar", ""):
            raise server_error("Cannot use both json_schema and grammar")
        response = body.get("response_format")
        if isinstance(response, dict):
            kind = lenient(response, "type", "")
            if kind == "json_object":
                if "schema" in response or not schema:
                    schema = lenient(response, "schema", {})
            elif kind == "json_schema":
                wrapper = lenient(response, "json_schema", {})
                schema = lenient(wrapper, "schema", {}) if wrapper else lenient(response, "schema", {})
            elif kind not in ("", "text"):
                raise InvalidRequest(f'response_format type must be one of "text" or "json_object", but got: {kind}')
        return {"type": "object"} if schema == {} else schema

    def _continuation(self, body: dict[str, Any], inputs: _Inputs) -> None:
        value = body.get("continue_final_message")
        if value is True:
            inputs.continue_final = "auto"
        elif value in ("reasoning_content", "content"):
            inputs.continue_final = str(value)
        last = inputs.messages[-1] if inputs.messages else {"role": ""}
        if not inputs.continue_final and self.config.prefill_assistant and last["role"] == "assistant":
            if len(inputs.messages) >= 2 and inputs.messages[-2]["role"] == "assistant":
                raise InvalidRequest("Cannot have 2 or more assistant messages at the end of the list.")
            inputs.continue_final, inputs.add_generation_prompt = "auto", False
        if inputs.continue_final and inputs.add_generation_prompt:
            raise InvalidRequest("Cannot set both add_generation_prompt and continue_final_message to true.")
        if inputs.continue_final and last["role"] == "assistant" and last.get("tool_calls"):
            raise InvalidRequest("Cannot continue an assistant message that contains tool calls.")

    @staticmethod
    def _thinking(body: dict[str, Any], inputs: _Inputs) -> None:
        inputs.variables |= lenient(body, "chat_template_kwargs", {})
        switch = inputs.variables.get("enable_thinking")
        if isinstance(switch, bool):
            inputs.enable_thinking = switch
        elif isinstance(switch, str):
            raise InvalidRequest('invalid type for "enable_thinking" (expected boolean, got string)')
        effort = lenient(body, "reasoning_effort", "")
        if effort == "none":
            inputs.enable_thinking = False
            inputs.variables.pop("reasoning_effort", None)
        elif effort:
            inputs.variables["reasoning_effort"] = effort

    # -------------------------------------------------------------------------------------------- rendering

    def _prompt(self, template: ChatTemplate, dialect: Dialect, inputs: _Inputs) -> tuple[str, str, Message | None]:
        """(prompt, the part of it that opens the assistant's turn, the message that is continued)."""
        messages = inputs.messages
        last: Message = {"role": "assistant", "content": ""}
        continue_final = inputs.continue_final
        if continue_final and messages:
            messages, last = messages[:-1], messages[-1]
            if continue_final == "auto":
                only_thought = "reasoning_content" in last and not last["content"]
                continue_final = "reasoning_content" if only_thought else "content"
        if STEPFUN in template.source:
            messages = [_trimmed(message) for message in messages]
        fitted = fit_messages(messages, template.caps, dialect.keep_developer)
        if dialect.adjust is not None:
            fitted = dialect.adjust(fitted)
        variables = dict(inputs.variables)
        if dialect.name == "deepseek-v4" and isinstance(inputs.schema, dict):
            variables["response_format"] = inputs.schema

        def render(generation: bool) -> str:
            return template.render(
                fitted,
                tools=inputs.tools,
                add_generation_prompt=generation,
                enable_thinking=inputs.enable_thinking,
                variables=variables,
            )

        bare, opened = render(False), render(True)
        generation = opened[_common(bare, opened) :]
        add = inputs.add_generation_prompt and not continue_final
        prompt = opened if add else bare
        if dialect.name == "gpt-oss" and not add:
            head, found, tail = prompt.rpartition("<|return|>")
            prompt = head + "<|end|>" + tail if found else prompt
        if dialect.name == "gemma-4" and add and prompt.endswith("<turn|>\n"):
            generation = "<|turn>model\n"
            prompt += generation
        if continue_final:
            if dialect.name == "gemma-4" and not prompt.endswith("<turn|>\n"):
                generation = dialects.continuation(dialect, "", last, continue_final == "content")
                generation = generation.removeprefix(dialect.turn or "")
            else:
                generation = dialects.continuation(dialect, generation, last, continue_final == "content")
            prompt += generation
        return prompt, generation, last if continue_final else None

    # ------------------------------------------------------------------------------------------- the rest

    def _rest(self, body: dict[str, Any], plan: ChatPlan, inputs: _Inputs) -> dict[str, Any]:
        """The body with what the plan decided in place of the chat fields, for the request schema."""
        out = dict(body)
        for key in ("messages", "tools", "json_schema", "response_format"):
            out.pop(key, None)
        stop = body.get("stop")
        stops = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, list) else []
        out["stop"] = stops + list(plan.dialect.stops)
        out["prompt"] = plan.prompt
        out["generation_prompt"] = plan.generation_prompt
        out["preserved_tokens"] = list(plan.dialect.preserved)
        self._constrain(out, plan, inputs)
        self._logprobs(body, out, bool(inputs.tools))
        budget = lenient(body, "reasoning_budget_tokens", lenient(body, "thinking_budget_tokens", -1))
        out["reasoning_budget_tokens"] = self.config.reasoning_budget if budget == -1 else budget
        tags = plan.dialect.tags
        if tags:
            out["reasoning_budget_start_tag"], out["reasoning_budget_end_tags"] = tags[0], list(tags[1:])
            out.setdefault("reasoning_budget_message", self.config.reasoning_budget_message)
        return out

    def _constrain(self, out: dict[str, Any], plan: ChatPlan, inputs: _Inputs) -> None:
        """The grammar of the answer: of a schema, or of the calls of the offered tools."""
        dialect = plan.dialect
        thinks = len(dialect.tags) > 1 and dialect.tools not in ("harmony", "muse")
        after = dialect.tags[1] if thinks and plan.thinking_open else ""
        closed = dialect.tags[1] in plan.generation_prompt if thinks else True
        thought = dialect.tags if thinks and not after and not closed else ()
        grammar: Grammar | None = None
        if inputs.schema is not None:
            schema = inputs.schema if isinstance(inputs.schema, dict | bool) else {"type": "object"}
            grammar = schema_grammar(schema, after, thought, self.control_tokens)
        elif plan.tools:
            try:
                grammar = tool_grammar(
                    dialect.tools,
                    plan.tools,
                    inputs.tool_choice,
                    inputs.forced_tool,
                    inputs.parallel,
                    after=after,
                    thought=thought,
                    control=self.control_tokens,
                )
            except ValueError as error:
                raise InvalidRequest(str(error)) from None
        if grammar is not None:
            out["grammar"] = grammar
            out["grammar_lazy"] = grammar.lazy

    @staticmethod
    def _logprobs(body: dict[str, Any], out: dict[str, Any], has_tools: bool) -> None:
        if lenient(body, "logprobs", False):
            if has_tools and lenient(body, "stream", False):
                raise InvalidRequest("logprobs is not supported with tools + stream")
            out["n_probs"] = lenient(body, "top_logprobs", 20)
        elif body.get("top_logprobs") is not None:
            raise InvalidRequest("top_logprobs requires logprobs to be set to true")


def trailing_space(text: str) -> str:
    """The white space at the end of `text`."""
    return text[len(text.rstrip()) :]


def _common(left: str, right: str) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _trimmed(message: Message) -> Message:
    """StepFun's models fall into loops on white space around contents (llama.cpp trims it too)."""
    out = dict(message)
    content = out["content"]
    if isinstance(content, str):
        out["content"] = content.strip()
    else:
        out["content"] = [part | {"text": part["text"].strip()} for part in content]
    if "reasoning_content" in out:
        out["reasoning_content"] = out["reasoning_content"].strip()
    return out
