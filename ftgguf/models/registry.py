"""Which family a file belongs to: `general.architecture` -> the function that builds its decoder."""

from __future__ import annotations

from collections.abc import Callable

from ftgguf.flags.config import ContextConfig
from ftgguf.gguf.errors import shown
from ftgguf.layers.params import Decoder
from ftgguf.models import glm4moe, granite, llama, qwen3
from ftgguf.models.config import ModelError, Numbers
from ftgguf.models.source import Source

Build = Callable[[Source, Numbers, ContextConfig], Decoder]

FAMILIES: dict[str, Build] = {
    "glm4moe": glm4moe.build,
    "granitemoe": granite.build,
    "llama": llama.build,
    "qwen3": qwen3.build,
    "qwen3moe": qwen3.build_moe,
}


def family(architecture: str, path: str = "") -> Build:
    """The builder of `architecture`; raises ModelError with its name and the list of those we know."""
    if architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        architecture = shown(architecture)
        raise ModelError(f"{path}: unknown model architecture {architecture}; ftgguf runs: {known}")
    return FAMILIES[architecture]
