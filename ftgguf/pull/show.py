"""What is known about a model on this disk: for `show`, `show --json` and Ollama's /api/show and /api/tags."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from ftgguf.gguf import GGUFError, GGUFFile, StringArray
from ftgguf.pull.catalog import LocalModel, of_entry
from ftgguf.pull.errors import NameResolutionError
from ftgguf.pull.hub import parameters
from ftgguf.pull.layers import NO_EXTRAS, Extras, known_template, read_extras
from ftgguf.pull.manifest import Config
from ftgguf.pull.modelfile import parameter_lines, write_modelfile
from ftgguf.pull.ollama_gguf import open_model
from ftgguf.pull.sizes import human
from ftgguf.pull.store import Entry, Store

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.weight")
_LONG = 5
"""Arrays of more elements are emptied in model_info unless everything is asked for, as Ollama does."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a MoE model; sizes in bytes."""

    count: int
    used: int
    layers: int
    pool: int
    """All experts of all layers."""
    largest: int
    """The largest single expert: a slot of the cache."""
    types: tuple[tuple[str, str], ...]
    """(`0-11, 13`, `gate Q4_K, up Q4_K, down Q6_K`): layers with the same types together."""


@dataclass(frozen=True, slots=True)
class Description:
    """Everything `show` prints. `info` is the GGUF's metadata with long arrays emptied."""

    name: str
    modified: float
    extras: Extras
    architecture: str
    parameters: int
    context: int
    embedding: int
    quantization: str
    size: int
    capabilities: tuple[str, ...]
    jinja: str
    """The GGUF's chat template, empty without one."""
    info: dict[str, Any]
    experts: Experts | None


def describe_model(store: Store, entry: Entry, verbose: bool = False) -> Description:
    """Read a model's header and small layers. Raises PullError, GGUFError."""
    return describe_local(store, of_entry(entry), verbose)


def describe_local(store: Store, model: LocalModel, verbose: bool = False) -> Description:
    """`describe_model` for any model on this disk; a plain file has no small layers. Raises PullError, GGUFError."""
    extras = read_extras(store, model.entry) if model.entry is not None else NO_EXTRAS
    with open_model(model.path(store)) as gguf:
        template = gguf.get("tokenizer.chat_template", "")
        return Description(
            model.name,
            model.modified,
            extras,
            gguf.architecture,
            gguf.n_params,
            gguf.arch("context_length", 0),
            gguf.arch("embedding_length", 0),
            extras.config.file_type or gguf.file_type.split(" - ")[0].removeprefix("(guessed) "),
            gguf.file_size,
            _capabilities(template if isinstance(template, str) else "", extras),
            template if isinstance(template, str) else "",
            model_info(gguf, verbose),
            experts_of(gguf),
        )


def _capabilities(template: str, extras: Extras) -> tuple[str, ...]:
    """Ollama's words for what the template has places for."""
    text = template or extras.template
    found = ["completion"]
    if ".Tools" in text or "tools" in text:
        found.append("tools")
    if ".Suffix" in text:
        found.append("insert")
    if "enable_thinking" in text or "<think>" in text or ".Think" in text or "reasoning_effort" in text:
        found.append("thinking")
    return tuple(found)


def model_info(gguf: GGUFFile, verbose: bool = False) -> dict[str, Any]:
    """The metadata as JSON values; never None. Arrays of more than five elements are None unless `verbose`."""
    info: dict[str, Any] = {}
    for key, value in gguf.metadata.items():
        if isinstance(value, np.ndarray):
            info[key] = value.tolist() if verbose or len(value) <= _LONG else None
        elif isinstance(value, StringArray):
            keep = verbose or len(value) <= _LONG
            info[key] = [item.decode("utf-8", "replace") for item in value.to_bytes()] if keep else None
        elif isinstance(value, str):
            if key != "tokenizer.chat_template":
                info[key] = value.encode("utf-8", "replace").decode()
        elif not isinstance(value, list):
            info[key] = value
    info["general.parameter_count"] = gguf.n_params
    return info


def experts_of(gguf: GGUFFile) -> Experts | None:
    """The routed experts, or None for a dense model."""
    count = gguf.arch("expert_count", 0)
    layers: dict[int, dict[str, str]] = {}
    sizes: Counter[int] = Counter()
    for name, tensor in gguf.tensors.items():
        found = _EXPERTS.fullmatch(name)
        if found:
            layers.setdefault(int(found[1]), {})[found[2]] = tensor.type.ggml_name
            sizes[int(found[1])] += tensor.nbytes
    if not layers or count <= 0:
        return None
    groups: dict[str, list[int]] = {}
    for layer in sorted(layers):
        types = ", ".join(f"{role} {kind}" for role, kind in sorted(layers[layer].items()))
        groups.setdefault(types, []).append(layer)
    named = tuple((_ranges(numbers), types) for types, numbers in groups.items())
    pool = sum(sizes.values())
    used = gguf.arch("expert_used_count", 0)
    return Experts(count, used, len(layers), pool, max(sizes.values()) // count, named)


def _ranges(numbers: list[int]) -> str:
    """`0-3, 5`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


# ---------------------------------------------------------------------------------------------------------- as JSON


def timestamp(seconds: float) -> str:
    """RFC 3339, as Go's time marshals."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def details(extras_config: Any, family: str = "") -> dict[str, Any]:
    """`details` of /api/tags and /api/show."""
    family = extras_config.model_family or family
    return {
        "parent_model": "",
        "format": extras_config.model_format or "gguf",
        "family": family,
        "families": extras_config.model_families or ([family] if family else []),
        "parameter_size": extras_config.model_type,
        "quantization_level": extras_config.file_type,
    }


def tag_json(store: Store, model: Entry | LocalModel) -> dict[str, Any]:
    """One element of /api/tags' `models`; what the registry's config does not tell is read from the file's header."""
    model = of_entry(model) if isinstance(model, Entry) else model
    facts = _facts(store, model)
    told = details(store.config(model.entry) if model.entry is not None else Config(), facts.family)
    told["parameter_size"] = told["parameter_size"] or facts.size
    told["quantization_level"] = told["quantization_level"] or facts.quantization
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": timestamp(model.modified),
        "size": model.size,
        "digest": model.digest,
        "details": told,
        "capabilities": list(facts.capabilities),
    }


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a listing tells of a file's header."""

    family: str = ""
    size: str = ""
    quantization: str = ""
    capabilities: tuple[str, ...] = ("completion",)


_known_facts: dict[str, _Facts] = {}
"""By the model's digest; a listing is asked for again and again."""


def _facts(store: Store, model: LocalModel) -> _Facts:
    """Nothing is known of a file that cannot be read; the listing goes on."""
    found = _known_facts.get(model.digest)
    if found is None:
        try:
            told = describe_local(store, model)
            found = _Facts(told.architecture, parameters(told.parameters), told.quantization, told.capabilities)
        except (NameResolutionError, GGUFError, OSError):
            return _Facts()
        if len(_known_facts) >= 4096:
            _known_facts.clear()
        _known_facts[model.digest] = found
    return found


def show_json(description: Description) -> dict[str, Any]:
    """The answer of /api/show, with our own `experts` beside it."""
    extras, experts = description.extras, description.experts
    told = details(extras.config, description.architecture)
    told["parameter_size"] = told["parameter_size"] or parameters(description.parameters)
    told["quantization_level"] = told["quantization_level"] or description.quantization
    answer: dict[str, Any] = {
        "license": "\n".join(extras.licenses),
        "modelfile": modelfile_of(description),
        "parameters": "\n".join(parameter_lines(extras.params, 30)),
        "template": extras.template or description.jinja,
        "system": extras.system,
        "details": told,
        "messages": extras.messages,
        "model_info": description.info,
        "capabilities": list(description.capabilities),
        "modified_at": timestamp(description.modified),
    }
    if experts is not None:
        answer["experts"] = {
            "count": experts.count,
            "used": experts.used,
            "layers": experts.layers,
            "pool_bytes": experts.pool,
            "largest_bytes": experts.largest,
            "types": dict(experts.types),
        }
    return {key: value for key, value in answer.items() if value not in ("", [])}


def modelfile_of(description: Description) -> str:
    extras = description.extras
    return write_modelfile(
        description.name,
        extras.params,
        extras.template,
        extras.system,
        extras.messages,
        list(extras.licenses),
    )


# ---------------------------------------------------------------------------------------------------------- as text


def show_text(description: Description) -> str:
    """Sections as `ollama show` prints them, and one about the experts."""
    extras, experts = description.extras, description.experts
    size = extras.config.model_type or parameters(description.parameters)
    model = [("architecture", description.architecture), ("parameters", size)]
    model += [("context length", str(description.context)), ("embedding length", str(description.embedding))]
    model += [("quantization", description.quantization)]
    sections: list[tuple[str, list[tuple[str, ...]]]] = [("Model", list(model))]
    if experts is not None:
        share = experts.pool / max(1, description.size)
        rows: list[tuple[str, ...]] = [
            ("experts", f"{experts.used} of {experts.count} a token, {experts.layers} layers"),
            ("expert pool", f"{human(experts.pool)} ({share:.0%} of the file)"),
            ("largest expert", human(experts.largest)),
            *((f"layers {layers}", types) for layers, types in experts.types),
        ]
        sections.append(("Experts", rows))
    sections.append(("Capabilities", [(name,) for name in description.capabilities]))
    sections.append(("Template", [(_template_text(description),)]))
    if extras.adapters:
        sections.append(("Adapters", [("LoRA", human(path.stat().st_size)) for path in extras.adapters]))
    if extras.params:
        pairs = [tuple(line.split(" ", 1)) for line in parameter_lines(extras.params)]
        sections.append(("Parameters", pairs))
    if extras.system:
        sections.append(("System", [(line,) for line in extras.system.strip().splitlines()[:2]]))
    if extras.licenses:
        lines = [line.strip() for line in extras.licenses[0].splitlines() if line.strip()]
        sections.append(("License", [(line,) for line in lines[:2]]))
    return "".join(_section(title, rows) for title, rows in sections)


def _template_text(description: Description) -> str:
    """What chats are rendered with (see `layers.apply_template`)."""
    go = description.extras.template
    if description.jinja:
        return "the GGUF's Jinja"
    builtin = known_template(go)
    if builtin is not None:
        return f"a Go template, rendered by the built-in '{builtin}'"
    if go or description.extras.config.renderer:
        return "a Go template of its own: chat needs --chat-template"
    return "none: chatml is taken"


def _section(title: str, rows: list[tuple[str, ...]]) -> str:
    return f"  {title}\n" + "".join(f"    {line}\n" for line in columns(rows)) + "\n"


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Cells padded to their column's width and four blanks, as Ollama's tables are."""
    widths = [max(len(row[i]) for row in rows if len(row) > i) for i in range(max(map(len, rows)))] if rows else []
    return ["".join(f"{cell:<{width}}    " for cell, width in zip(row, widths, strict=False)) for row in rows]
