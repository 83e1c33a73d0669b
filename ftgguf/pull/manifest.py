"""An Ollama manifest: which blobs a model is made of. Decoded strictly, because a stranger wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ftgguf.pull.digest import Digest
from ftgguf.pull.errors import BadAnswer, NameResolutionError, Unsupported
from ftgguf.pull.names import check_subpath
from ftgguf.pull.transfer import MAX_SIZE
from ftgguf.quoting import shown

MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
LAYER_TYPE = "application/vnd.ollama.image."
MAX_MANIFEST = 1 << 20
"""Bytes."""
MAX_LAYERS = 64
MAX_OWN_LAYERS = 1024
"""In manifests of our own: a layer for each shard of a split model."""
MAX_TEXT_LAYER = 8 << 20
"""Bytes of a layer that is read whole: template, system prompt, parameters, messages, licence, config."""

TEXTS = ("template", "prompt", "system", "params", "messages", "license")
WEIGHTS = ("model", "projector", "adapter", "draft")


class _Layer(msgspec.Struct):
    mediaType: str
    digest: str
    size: int
    name: str = ""


class _Manifest(msgspec.Struct):
    config: _Layer
    layers: list[_Layer]
    schemaVersion: int = 2
    source: dict[str, Any] = {}


class Config(msgspec.Struct, omit_defaults=True):
    """The config blob, as far as we read it."""

    model_format: str = ""
    model_family: str = ""
    model_families: list[str] | None = None
    model_type: str = ""
    """The parameter count as text: `30.5B`."""
    file_type: str = ""
    renderer: str = ""
    parser: str = ""
    requires: str = ""
    remote_host: str = ""
    remote_model: str = ""


@dataclass(frozen=True, slots=True)
class Layer:
    """One blob. `kind` is the last part of Ollama's media type; `name` the file's path in its repository, if any."""

    kind: str
    digest: Digest
    size: int
    name: str = ""
    media_type: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """`raw` are the bytes as received; their hash is the model's ID."""

    raw: bytes
    config: Layer
    layers: tuple[Layer, ...]
    source: dict[str, Any]

    @property
    def id(self) -> Digest:
        return Digest.of(self.raw)

    @property
    def size(self) -> int:
        """Bytes of all layers and the config, as `list` shows."""
        return self.config.size + sum(layer.size for layer in self.layers)

    @property
    def all_layers(self) -> tuple[Layer, ...]:
        """Layers and config, each digest once."""
        return tuple({layer.digest: layer for layer in (*self.layers, self.config)}.values())

    def of_kind(self, *kinds: str) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.kind in kinds)

    @property
    def model(self) -> tuple[Layer, ...]:
        """The GGUF's layers: one, or the shards in order."""
        return self.of_kind("model")


def parse_manifest(raw: bytes, max_layers: int = MAX_OWN_LAYERS) -> Manifest:
    """Decode and bound a manifest; `MAX_LAYERS` for one from the network. Raises BadAnswer."""
    if len(raw) > MAX_MANIFEST:
        raise BadAnswer(f"the manifest has {len(raw)} bytes, more than a manifest can have")
    try:
        body = msgspec.json.decode(raw, type=_Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadAnswer(f"the manifest is not one of a model ({error})") from None
    if len(body.layers) > max_layers:
        raise BadAnswer(f"the manifest has {len(body.layers)} layers, more than a model can have")
    layers = tuple(_layer(layer) for layer in body.layers)
    sizes: dict[Digest, int] = {}
    for layer in (*layers, config := _layer(body.config)):
        if sizes.setdefault(layer.digest, layer.size) != layer.size:
            raise BadAnswer(f"the manifest gives {layer.digest} two sizes")
    if sum(sizes.values()) > MAX_SIZE:
        raise BadAnswer("the manifest's sizes are absurd")
    return Manifest(raw, config, layers, body.source)


def _layer(layer: _Layer) -> Layer:
    if not 0 <= layer.size <= MAX_SIZE:
        raise BadAnswer(f"the manifest gives a layer the size {layer.size}")
    kind = layer.mediaType.removeprefix(LAYER_TYPE) if layer.mediaType.startswith(LAYER_TYPE) else ""
    if (kind in TEXTS or layer.mediaType == CONFIG_TYPE) and layer.size > MAX_TEXT_LAYER:
        raise BadAnswer(f"the manifest gives a {kind or 'config'} layer the size {layer.size}")
    if layer.name:
        try:
            check_subpath(layer.name)
        except NameResolutionError as error:
            raise BadAnswer(f"the manifest names a file badly: {error}") from None
    return Layer(kind, Digest.parse(layer.digest), layer.size, layer.name, layer.mediaType)


def encode_manifest(config: Layer, layers: list[Layer], source: dict[str, Any] | None = None) -> bytes:
    """A manifest of our own making, readable by Ollama; `source` says where its files come from."""
    return msgspec.json.encode(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": _encoded(config, CONFIG_TYPE),
            "layers": [_encoded(layer, layer.media_type or LAYER_TYPE + layer.kind) for layer in layers],
        }
        | ({"source": source} if source else {})
    )


def _encoded(layer: Layer, media_type: str) -> dict[str, Any]:
    encoded = {"mediaType": media_type, "digest": str(layer.digest), "size": layer.size}
    return encoded | ({"name": layer.name} if layer.name else {})


def parse_config(raw: bytes) -> Config:
    """The config blob. Raises BadAnswer."""
    try:
        return msgspec.json.decode(raw, type=Config)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadAnswer(f"the model's config blob cannot be read ({error})") from None


def check_runnable(name: str, manifest: Manifest, config: Config) -> None:
    """Raise Unsupported for what cannot be run here whatever is fetched: cloud stubs, safetensors, no model at all."""
    if config.remote_host or config.remote_model:
        raise Unsupported(
            f"{name} runs on {shown(config.remote_host or 'a remote host')}: remote models are not supported"
        )
    if manifest.of_kind("tensor", "json") or config.model_format not in ("", "gguf"):
        raise Unsupported(
            f"{name} is a safetensors (MLX) model, not GGUF: pull a GGUF, for example hf.co/user/repo:Q4_K_M"
        )
    if not manifest.model:
        raise Unsupported(f"{name} has no model layer: it cannot be run")
