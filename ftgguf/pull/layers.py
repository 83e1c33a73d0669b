"""The small layers of a model from a registry: parameters, system prompt, messages, template, licence; and what they
mean in our configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ftgguf.chat.builtin import BUILTIN
from ftgguf.flags.config import LoraAdapter, ServerConfig
from ftgguf.pull.errors import BadAnswer, NotFound
from ftgguf.pull.manifest import MAX_TEXT_LAYER, Config
from ftgguf.pull.store import Entry, Store

_FLOATS = ("temperature", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
_INTS = ("top_k", "repeat_last_n", "seed", "mirostat")
PARAMETERS: dict[str, tuple[str, type]] = {
    **{name: (f"sampling.{name}", float) for name in (*_FLOATS, "mirostat_tau", "mirostat_eta")},
    **{name: (f"sampling.{name}", int) for name in _INTS},
    "num_ctx": ("context.size", int),
    "num_predict": ("context.n_predict", int),
    "num_keep": ("context.n_keep", int),
    "stop": ("chat.reverse_prompt", list),
}
"""Ollama's parameter -> our field and the kind of value."""
MACHINE_PARAMETERS = ("num_gpu", "num_thread", "num_batch", "main_gpu", "use_mmap", "use_mlock", "numa", "low_vram")
"""About the machine of whoever made the model: dropped."""

TEMPLATE_REASON = "chat template: "
"""How the line in a configuration's reasons begins that says which was chosen."""

_SHAPES: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "command-r": ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    "granite": ("<|start_of_role|>", "<|end_of_text|>"),
    "phi3": ("<|user|>", "<|assistant|>", "<|end|>"),
    "deepseek3": ("<｜User｜>", "<｜Assistant｜>"),
    "gpt-oss": ("<|start|>", "<|channel|>", "<|message|>"),
    "llama2": ("[INST]", "[/INST]"),
    "vicuna": ("USER:", "ASSISTANT:"),
}
"""Built-in template -> marks that a Go template of the same format has, all of them."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What came with the weights. Texts are empty where there is none."""

    params: dict[str, Any]
    template: str
    system: str
    messages: list[dict[str, str]]
    licenses: tuple[str, ...]
    config: Config
    adapters: tuple[Path, ...] = ()
    """LoRA files that belong to the model and are applied with scale 1."""


NO_EXTRAS = Extras({}, "", "", [], (), Config())
"""Those of a plain file."""


def read_extras(store: Store, entry: Entry) -> Extras:
    """Raises PullError if a layer is damaged or not on this disk."""
    texts: dict[str, list[str]] = {}
    for layer in entry.manifest.of_kind("template", "prompt", "system", "params", "messages", "license"):
        text = store.read_blob(layer, MAX_TEXT_LAYER).decode("utf-8", "replace")
        texts.setdefault("template" if layer.kind == "prompt" else layer.kind, []).append(text)
    try:
        params = msgspec.json.decode(texts.get("params", ["{}"])[-1], type=dict[str, Any])
        messages = msgspec.json.decode(texts.get("messages", ["[]"])[-1], type=list[dict[str, str]])
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadAnswer(f"a layer of {entry.name} cannot be read ({error}): pull it again") from None
    last = {kind: values[-1] for kind, values in texts.items()}
    licenses = tuple(texts.get("license", ()))
    told = store.config(entry)
    return Extras(
        params, last.get("template", ""), last.get("system", ""), messages, licenses, told, _adapters(store, entry)
    )


def _adapters(store: Store, entry: Entry) -> tuple[Path, ...]:
    """Where the model's adapters lie. Raises NotFound: without one it would be another model."""
    found = [store.find_blob(layer.digest, layer.size) for layer in entry.manifest.of_kind("adapter")]
    if None in found:
        raise NotFound(f"an adapter of {entry.name} is no longer on this disk: pull it again")
    return tuple(path for path in found if path is not None)


def apply_adapters(config: ServerConfig, adapters: tuple[Path, ...], name: str) -> ServerConfig:
    """`config` with the model's own adapters before those of `--lora`."""
    if not adapters:
        return config
    own = tuple(LoraAdapter(str(path)) for path in adapters)
    what = "a LoRA adapter" if len(own) == 1 else f"{len(own)} LoRA adapters"
    return replace(
        config,
        model=replace(config.model, lora=(*own, *config.model.lora)),
        reasons=(*config.reasons, f"model.lora: {what} of {name}"),
    )


def apply_params(config: ServerConfig, params: dict[str, Any], name: str) -> ServerConfig:
    """`config` with the model's parameters where the user left a field open; each is listed in `reasons`.

    They rank below the request's fields and the command line's, above our defaults.
    """
    sections: dict[str, dict[str, Any]] = {}
    reasons, warnings, given = list(config.reasons), list(config.warnings), set(config.given)
    for key, value in params.items():
        if key in MACHINE_PARAMETERS:
            continue
        if key not in PARAMETERS:
            warnings.append(f"{name} sets the parameter '{key}', which is not supported: ignored")
            continue
        path, kind = PARAMETERS[key]
        if path in config.given:
            continue
        typed = typed_parameter(kind, value)
        if typed is None:
            warnings.append(f"{name} sets '{key}' to a value that it cannot have: ignored")
            continue
        section, field = path.split(".")
        sections.setdefault(section, {})[field] = typed
        given.add(path)
        reasons.append(f"{path} = {typed!r}: a parameter of {name}")
    changes: dict[str, Any] = {}
    for section, fields in sections.items():
        part = getattr(config, section)
        change: Any = msgspec.structs.replace if isinstance(part, msgspec.Struct) else replace
        changes[section] = change(part, **fields)
    config = replace(config, **changes)
    return replace(config, given=frozenset(given), reasons=tuple(reasons), warnings=tuple(warnings))


def typed_parameter(kind: type, value: Any) -> Any:
    """`value` as a parameter's kind, None if it cannot be that."""
    if kind is list:
        values = value if isinstance(value, list) else [value]
        return tuple(values) if all(isinstance(item, str) for item in values) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if kind is int:
        return int(value) if value == int(value) and abs(value) < 2**53 else None
    return float(value)


def known_template(go_template: str) -> str | None:
    """The built-in template of the same format as a Go template, by its marks; None if none or several fit."""
    found = [name for name, marks in _SHAPES.items() if all(mark in go_template for mark in marks)]
    if found == ["llama2"] and "<<SYS>>" in go_template:
        return None  # the built-in one puts a system prompt elsewhere
    return found[0] if len(found) == 1 and found[0] in BUILTIN else None


def apply_template(config: ServerConfig, extras: Extras, has_jinja: bool, name: str) -> ServerConfig:
    """Which chat template: the user's, the GGUF's, a built-in one like the model's Go template; else chat is refused.

    The last is a template that raises, so that completion without a template goes on working.
    """
    if config.chat.template or "chat.template" in config.given:
        return config
    if has_jinja:
        return replace(config, reasons=(*config.reasons, f"{TEMPLATE_REASON}the file's own"))
    if not extras.template and not extras.config.renderer:
        return config
    builtin = known_template(extras.template)
    if builtin is not None:
        reason = f"{TEMPLATE_REASON}built-in '{builtin}', as the Go template of {name} has its marks"
        chat = replace(config.chat, template=builtin)
        return replace(config, chat=chat, reasons=(*config.reasons, reason))
    source = f"renderer '{extras.config.renderer}'" if extras.config.renderer else "a Go template of its own"
    message = (
        f"{name} has {source} and no Jinja chat template: give one with --chat-template or --chat-template-file, or "
        "pull the model from hf.co"
    )
    chat = replace(config.chat, template="{{- raise_exception(" + _jinja_text(message) + ") -}}")
    reason = f"{TEMPLATE_REASON}none that can be used ({source}): chat is refused"
    return replace(config, chat=chat, warnings=(*config.warnings, message), reasons=(*config.reasons, reason))


def _jinja_text(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
