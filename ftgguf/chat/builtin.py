"""Built-in chat templates for `--chat-template NAME`: our own Jinja texts for llama.cpp's common names.

llama.cpp implements these names in C++ (`llama_chat_apply_template`); the names and the resulting prompts are the
interface. A name that is not here is taken as a template's text, exactly as llama-server does with `--jinja`.
"""

from __future__ import annotations


def _turns(user: str, assistant: str, end: str, generation: str, system: str = "{content}") -> str:
    """A template of one string per role; `{content}` stands for the message's text."""

    def emit(text: str) -> str:
        before, _, after = text.partition("{content}")
        return f"{{{{- {before!r} + message['content'] + {after!r} -}}}}".replace("'' + ", "").replace(" + ''", "")

    return (
        "{%- for message in messages -%}"
        f"{{%- if message['role'] == 'system' -%}}{emit(system)}"
        f"{{%- elif message['role'] == 'assistant' -%}}{emit(assistant + '{content}' + end)}"
        f"{{%- else -%}}{emit(user)}{{%- endif -%}}"
        "{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{- {generation!r} -}}}}{{%- endif -%}}"
    )


CHATML = (
    "{%- for message in messages -%}\n"
    "  {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n"
    "  {{- '<|im_start|>assistant\\n' -}}\n"
    "{%- endif -%}"
)

BUILTIN: dict[str, str] = {
    "chatml": CHATML,
    "llama2": (
        "{%- for message in messages -%}"
        "{%- if message['role'] == 'system' -%}{{- '[INST] ' + message['content'] + '\\n' -}}"
        "{%- elif message['role'] == 'user' -%}"
        "{{- ('' if loop.index0 > 0 and messages[loop.index0 - 1]['role'] == 'system' else '[INST] ')"
        " + message['content'] + ' [/INST]' -}}"
        "{%- else -%}{{- message['content'] -}}{%- endif -%}{%- endfor -%}"
    ),
    "llama3": (
        "{%- for message in messages -%}"
        "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
        " + message['content'] | trim + '<|eot_id|>' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"
    ),
    "gemma": (
        "{%- set ns = namespace(system='') -%}"
        "{%- for message in messages -%}"
        "{%- if message['role'] == 'system' -%}{%- set ns.system = message['content'] | trim -%}"
        "{%- else -%}"
        "{{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' -}}"
        "{%- if ns.system and message['role'] != 'assistant' -%}"
        "{{- ns.system + '\\n\\n' -}}{%- set ns.system = '' -%}{%- endif -%}"
        "{{- message['content'] | trim + '<end_of_turn>\\n' -}}"
        "{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"
    ),
    "phi3": _turns(
        "<|user|>\n{content}<|end|>\n",
        "<|assistant|>\n",
        "<|end|>\n",
        "<|assistant|>\n",
        "<|system|>\n{content}<|end|>\n",
    ),
    "zephyr": _turns(
        "<|user|>\n{content}<|endoftext|>\n",
        "<|assistant|>\n",
        "<|endoftext|>\n",
        "<|assistant|>\n",
        "<|system|>\n{content}<|endoftext|>\n",
    ),
    "vicuna": _turns("USER: {content}\n", "ASSISTANT: ", "</s>\n", "ASSISTANT:", "{content}\n\n"),
    "deepseek": _turns(
        "### Instruction:\n{content}\n", "### Response:\n", "\n<|EOT|>\n", "### Response:\n", "{content}"
    ),
    "deepseek2": _turns("User: {content}\n\n", "Assistant: ", "<｜end▁of▁sentence｜>", "Assistant:", "{content}\n\n"),
    "deepseek3": _turns(
        "<｜User｜>{content}", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜Assistant｜>", "{content}\n\n"
    ),
    "command-r": _turns(
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{content}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{content}<|END_OF_TURN_TOKEN|>",
    ),
    "granite": _turns(
        "<|start_of_role|>user<|end_of_role|>{content}<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>",
        "<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>",
        "<|start_of_role|>system<|end_of_role|>{content}<|end_of_text|>\n",
    ),
    "gpt-oss": _turns(
        "<|start|>user<|message|>{content}<|end|>",
        "<|start|>assistant<|channel|>final<|message|>",
        "<|return|>",
        "<|start|>assistant",
        "<|start|>system<|message|>{content}<|end|>",
    ),
}

_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|im_start|>", "<|im_sep|>"), ""),
    (("<|im_start|>", "<end_of_utterance>"), ""),
    (("<|im_start|>",), "chatml"),
    (("[INST]", "[SYSTEM_PROMPT]"), ""),
    (("[INST]", "[AVAILABLE_TOOLS]"), ""),
    (("[INST]", "' [INST] ' + system_message"), ""),
    (("[INST]", "<<SYS>>"), ""),
    (("[INST]", "bos_token + '[INST]"), ""),
    (("[INST]", "content.strip()"), ""),
    (("[INST]",), "llama2"),
    (("<|assistant|>", "<|end|>"), "phi3"),
    (("[gMASK]<sop>",), ""),
    (("<|assistant|>", "<|user|>"), ""),
    (("<|user|>", "<|endoftext|>"), "zephyr"),
    (("bos_token + message['role']",), ""),
    (("<start_of_turn>",), "gemma"),
    (("GPT4 Correct ",), ""),
    (("USER: ", "ASSISTANT: ", "SYSTEM: "), ""),
    (("USER: ", "ASSISTANT: "), "vicuna"),
    (("### Instruction:", "<|EOT|>"), "deepseek"),
    (("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>"), "command-r"),
    (("<|start_header_id|>", "<|end_header_id|>"), "llama3"),
    (("'Assistant: ' + message['content'] + eos_token",), "deepseek2"),
    (("<｜Assistant｜>", "<｜User｜>", "<｜end▁of▁sentence｜>"), "deepseek3"),
    (("<|start_of_role|>",), "granite"),
    (("<|start|>", "<|channel|>"), "gpt-oss"),
)
"""What a template contains -> its built-in; empty: llama.cpp has one that is not here."""


def match_builtin(source: str) -> str:
    """The name of the built-in that stands for a template where Jinja is off, as llama.cpp finds it; "" if none."""
    return next((name for marks, name in _MARKS if all(mark in source for mark in marks)), "")
