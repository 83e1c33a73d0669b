"""The scales of LoRA adapters: the server's, which `/lora-adapters` shows and sets, and those of a request."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ftgguf.flags.config import ModelConfig
from ftgguf.server.errors import InvalidRequest
from ftgguf.server.wire import as_float, f32, lenient


def parse_scales(items: Iterable[Any]) -> dict[int, float]:
    """`[{id, scale}]` as scales by id, in order of id; of equal ids the last one counts.

    As in llama-server, an item without a usable id has -1 and one without a scale 0. InvalidRequest for a scale that is
    no finite float32.
    """
    found: dict[int, float] = {}
    for item in items:
        fields = item if isinstance(item, dict) else {}
        value = fields.get("scale")
        scale = f32(as_float(value)) if isinstance(value, int | float) else 0.0
        if not math.isfinite(scale):
            raise InvalidRequest(f"the scale of a LoRA adapter must be a finite number, not {value}")
        found[lenient(fields, "id", -1)] = scale
    return dict(sorted(found.items()))


class Adapters:
    """The adapters of one server. Their weights are the engine's, which takes scales with each request: running
    requests keep theirs when the server's change (as in llama-server)."""

    def __init__(self, model: ModelConfig) -> None:
        self._scales = [0.0 if model.lora_init_without_apply else f32(adapter.scale) for adapter in model.lora]

    def document(self, info: dict[str, Any]) -> list[dict[str, Any]]:
        """The answer of GET /lora-adapters; `info` is what the engine said about itself."""
        found = []
        for id, (adapter, scale) in enumerate(zip(info.get("lora", ()), self._scales, strict=False)):
            found.append(
                {
                    "id": id,
                    "path": adapter["path"],
                    "scale": scale,
                    "task_name": adapter["task_name"],
                    "prompt_prefix": adapter["prompt_prefix"],
                }
            )
        return found

    def set(self, scales: dict[int, float]) -> None:
        """The scales of requests from now on; adapters that are not listed get 0, unknown ids are passed over."""
        self._scales = [scales.get(id, 0.0) for id in range(len(self._scales))]

    def of_request(self, scales: dict[int, float]) -> tuple[float, ...]:
        """The scale of each adapter for a request whose field `lora` is `scales`; the server's where it is empty."""
        if not scales:
            return tuple(self._scales)
        return tuple(scales.get(id, 0.0) for id in range(len(self._scales)))
