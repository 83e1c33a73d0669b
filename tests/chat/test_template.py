"""Template rendering: what llama.cpp's engine does, BOS, refusals, limits, the choice of a template.

Checked against a real llama-server's /apply-template: the 70 templates of llama-cpp-python 0.3.36's source package with
17 message sets each gave 1186 of 1190 equal prompts. The four: an empty conversation (two templates of Gemma 4, where
llama-server answers 500) and prefill in RWKV's template (a line break before `</think>`).
"""

from __future__ import annotations

from typing import Any

import pytest

from ftgguf.chat import sandbox
from ftgguf.chat.builtin import BUILTIN
from ftgguf.chat.dialects import detect, generic
from ftgguf.chat.request import ChatPlanner
from ftgguf.chat.template import ChatTemplate, ChatTemplateError, load_templates
from ftgguf.flags.config import ChatConfig
from ftgguf.server.errors import ApiError

USER = {"role": "user", "content": "Hi"}


def plan(template: str, body: dict[str, Any], **tokens: Any) -> Any:
    return ChatPlanner(load_templates(template, **tokens), ChatConfig()).plan(body)


def test_bos_is_never_doubled() -> None:
    """Bug log R25: the template's BOS goes where the tokenizer adds one, and stays where it does not."""
    source = "{{ bos_token }}{{ messages[0]['content'] }}"
    for add_bos, expected in ((True, "Hi"), (False, "<s>Hi")):
        template = ChatTemplate(source, "<s>", "</s>", add_bos)
        assert template.render([USER]) == expected
    assert ChatTemplate("{{ messages[0].content }}{{ eos_token }}", "<s>", "</s>", False, True).render([USER]) == "Hi"


def test_a_template_that_refuses_is_a_400_with_its_text() -> None:
    """Bug log R23. llama-server answers 400 or 500 by template family; SDKs retry a 500 for ever, so always 400."""
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}x"
    with pytest.raises(ApiError) as caught:
        plan(source, {"messages": [{"role": "assistant", "content": "a"}, USER]})
    assert (caught.value.code, caught.value.message) == (400, "Jinja Exception: user first")


STRICT = (
    "{% for m in messages %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.content }}]{% endfor %}"
)


@pytest.mark.parametrize("roles", ["uu", "us", "usu", "au", "uaau"])
def test_a_strict_template_answers_400_whatever_the_order(roles: str) -> None:
    """Bug log R23: user twice, a late system text, the assistant first. The template's words reach the client."""
    names = {"u": "user", "a": "assistant", "s": "system"}
    messages = [{"role": names[role], "content": role} for role in roles]
    with pytest.raises(ApiError) as caught:
        plan(STRICT, {"messages": messages})
    assert (caught.value.code, caught.value.type) == (400, "invalid_request_error")
    assert "roles must alternate" in caught.value.message
    assert plan(STRICT, {"messages": [USER, {"role": "assistant", "content": "b"}, USER]}).prompt == "[Hi][b][Hi]"


def test_system_text_goes_into_the_first_turn_where_there_is_no_system_role() -> None:
    """Bug log R24: a Gemma-like template."""
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "[{{ m.role }}:{{ m.content }}]{% endfor %}"
    )
    body = {"messages": [{"role": "system", "content": "S"}, USER]}
    assert plan(source, body).prompt == "[user:S\nHi]"
    assert plan(source, {"messages": [{"role": "system", "content": "S"}]}).prompt == ""
    two = [{"role": "system", "content": "S"}, {"role": "system", "content": "T"}, USER]
    with pytest.raises(ApiError, match="no system") as caught:
        plan(source, {"messages": two})
    assert caught.value.code == 400


def test_content_parts_fit_the_template() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert plan("{% for m in messages %}{{ m.content }}{% endfor %}", {"messages": [parts]}).prompt == "a\nb"
    typed = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
    assert plan(typed, {"messages": [parts]}).prompt == "<a><b>"
    assert plan(typed, {"messages": [USER]}).prompt == "<Hi>"


def test_tool_arguments_are_objects_where_the_template_reads_them() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}("
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}){% endfor %}{% endfor %}"
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    )
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "r"}]
    assert plan(source, {"messages": messages}).prompt == "f(a=1)"


def test_variables_and_switches() -> None:
    source = (
        "{{ enable_thinking }}|{{ reasoning_effort }}|{{ custom }}|{{ add_generation_prompt }}|"
        "{{ strftime_now('%Y') | length }}|{{ date_string | length }}<think></think>"
    )
    body = {"messages": [USER], "chat_template_kwargs": {"custom": 3}, "reasoning_effort": "high"}
    assert plan(source, body).prompt.startswith("True|high|3|True|4|11")
    body = {"messages": [USER], "reasoning_effort": "none", "add_generation_prompt": False}
    assert plan(source, body).prompt.startswith("False||||4|11")


def test_the_developer_role_is_the_system_role() -> None:
    body = {"messages": [{"role": "developer", "content": "D"}, USER]}
    assert "<|im_start|>system\nD<|im_end|>" in plan("chatml", body).prompt


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]},
         "Cannot have 2 or more assistant messages at the end of the list."),
        ({"messages": [USER, {"role": "assistant", "content": "a"}], "continue_final_message": True,
          "add_generation_prompt": True},
         "Cannot set both add_generation_prompt and continue_final_message to true."),
    ],
)  # fmt: skip
def test_impossible_continuations(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as caught:
        plan("chatml", body)
    assert (caught.value.code, caught.value.message) == (400, message)


def test_a_last_assistant_message_is_continued() -> None:
    body = {"messages": [USER, {"role": "assistant", "content": "Sure, "}]}
    assert plan("chatml", body).prompt.endswith("<|im_start|>assistant\nSure, ")


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_builtin_names(name: str) -> None:
    """Every built-in renders a system text, two turns and the opening of the next, each once."""
    messages = [{"role": "system", "content": "zzz"}, USER, {"role": "assistant", "content": "ANS"}, USER]
    text = load_templates(name).default.render(messages)
    assert (text.count("zzz"), text.count("Hi"), text.count("ANS")) == (1, 2, 1)
    assert (
        len(text) > len(load_templates(name).default.render(messages, add_generation_prompt=False)) or name == "llama2"
    )


def test_choice_of_the_template() -> None:
    assert load_templates("", "model's", "tools'").pick(True).source == "tools'"
    assert load_templates("", "model's").pick(True).source == "model's"
    assert load_templates("mine", "model's").default.source == "mine"
    fallback = load_templates("", "")
    assert (fallback.default.source, fallback.explicit) == (BUILTIN["chatml"], False)
    with pytest.raises(ChatTemplateError, match="does not compile"):
        load_templates("{% if %}")


HOSTILE = [
    "{% for i in range(100000) %}{% for j in range(100000) %}{% set x = i %}{% endfor %}{% endfor %}",
    "{% for a in 'abcdefghij' %}" * 12 + "{% endfor %}" * 12,
    "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 'a'.ljust(10 ** 10) }}",
    "{{ 'a' | center(10 ** 9) }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ 'a'.replace('', 'b' * 1000000).replace('', 'b' * 1000000) }}",
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% include '/etc/passwd' %}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_templates_end_in_an_error(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 100_000)
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render([USER])


def test_undefined_values_are_as_in_llama_cpp() -> None:
    """An attribute of something undefined is undefined, and none counts as missing for `default`."""
    source = (
        "{{ a.b.c }}{{ 'x' + nope }}{{ none | default('d') }}{{ (none | items) | length }}{{ [1, 2] | map('string') }}"
    )
    assert ChatTemplate(source).render([]) == "xd0['1', '2']"


def test_dialects_are_found_by_their_markers() -> None:
    assert detect("<tool_call> <function= <parameter= <think>").name == "qwen3.5"  # type: ignore[union-attr]
    assert detect("<|channel|>").name == "gpt-oss"  # type: ignore[union-attr]
    assert detect("plain") is None
    assert generic("<tool_call><arg_key>", ("<think>", "</think>\n")).tools == "glm"
    assert generic("<tool_call>", None).tools == "hermes"
    assert generic("plain", None).tools == "generic"
