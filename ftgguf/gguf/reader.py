"""A GGUF model, single or split, opened read-only: metadata, tensor table and mapped data.

`open_gguf` checks everything that can be checked without reading tensor data, and raises GGUFError, one line, for
whatever is wrong. Nothing is decoded before it is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from .errors import GGUFError, shown
from .header import Record, TensorInfo
from .metadata import Metadata, Override
from .split import Shard, open_shards
from .types import TensorType, file_type_name

T = TypeVar("T")
_REQUIRED: Any = object()


def _block_number(name: str) -> int:
    """The number in `blk.N.`, -1 for tensors outside the blocks."""
    parts = name.split(".", 2)
    return int(parts[1]) if parts[0] == "blk" and len(parts) == 3 and parts[1].isdecimal() else -1


class GGUFFile:
    """An open model. All sizes in bytes; a context manager, and closed with its last user otherwise."""

    def __init__(self, path: Path, shards: tuple[Shard, ...], overrides: Mapping[str, Override]) -> None:
        self.path = path
        """As it was asked for; `shards[0].path` holds the metadata."""
        self.shards = shards
        self.metadata = Metadata(shards[0].path, shards[0].map, shards[0].header.records, overrides)
        """Key -> value with overrides applied; arrays of numbers are NumPy arrays, of strings StringArrays."""
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {
                raw.name: TensorInfo(
                    raw.name, raw.type, raw.shape, raw.nbytes, number, shard.header.data + raw.relative
                )
                for number, shard in enumerate(shards)
                for raw in shard.header.tensors
            }
        )

    # ------------------------------------------------------------------------------------------------- the file

    @property
    def version(self) -> int:
        return self.shards[0].header.version

    @property
    def alignment(self) -> int:
        return self.shards[0].header.alignment

    @property
    def file_size(self) -> int:
        """All shards' files together."""
        return sum(shard.size for shard in self.shards)

    @property
    def size(self) -> int:
        """All tensors together, without padding: what llama.cpp reports as the model's size."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def n_params(self) -> int:
        """Elements of all tensors, as llama.cpp counts parameters."""
        return sum(tensor.n_elements for tensor in self.tensors.values())

    @property
    def architecture(self) -> str:
        """`general.architecture`. GGUFError if it is missing."""
        return self.require("general.architecture", str)

    @property
    def name(self) -> str:
        """`general.name`, empty if there is none."""
        return self.get("general.name", "", str)

    @property
    def file_type(self) -> str:
        """The quantisation as llama.cpp prints it: `Q4_K - Medium`, or `(guessed) ...` without general.file_type."""
        return file_type_name(self.get("general.file_type", None, int), self._most_common_type())

    def _most_common_type(self) -> TensorType | None:
        """The type most tensors have; of equals the one that gets there first in llama.cpp's order (block, name)."""
        counts: Counter[TensorType] = Counter()
        best: TensorType | None = None
        for tensor in sorted(self.tensors.values(), key=lambda tensor: (_block_number(tensor.name), tensor.name)):
            counts[tensor.type] += 1
            if best is None or counts[tensor.type] > counts[best]:
                best = tensor.type
        return best

    # -------------------------------------------------------------------------------------------------- metadata

    def fail(self, key: str, message: str) -> GGUFError:
        """An error about `key`, placed at its record; for checks that the caller makes."""
        return GGUFError(self.metadata.path, self.metadata.offset(key), message)

    @overload
    def get(self, key: str, default: Any = None, kind: None = None) -> Any: ...
    @overload
    def get(self, key: str, default: None, kind: type[T]) -> T | None: ...
    @overload
    def get(self, key: str, default: T, kind: type[T]) -> T: ...
    def get(self, key: str, default: Any = None, kind: type | None = None) -> Any:
        """The value of `key`, or `default` where the file has none.

        `kind`: int, float (takes integers too), bool, str, np.ndarray, StringArray or list; GGUFError if the value is
        of another kind.
        """
        return self.metadata.typed(key, kind) if key in self.metadata else default

    def require(self, key: str, kind: type[T]) -> T:
        """The value of `key`; GGUFError if it is missing or not a `kind`."""
        if key not in self.metadata:
            raise self.fail(key, f"metadata key {shown(key)} is missing: the conversion of the model is incomplete")
        value: T = self.metadata.typed(key, kind)
        return value

    @overload
    def arch(self, name: str) -> int: ...
    @overload
    def arch(self, name: str, *, kind: type[T]) -> T: ...
    @overload
    def arch(self, name: str, default: None, kind: type[T] = ...) -> T | None: ...
    @overload
    def arch(self, name: str, default: T, kind: type[T] = ...) -> T: ...
    def arch(self, name: str, default: Any = _REQUIRED, kind: Any = int) -> Any:
        """The value of `{architecture}.{name}` (an int unless `kind` says otherwise); GGUFError if it is missing and
        no default is given."""
        key = f"{self.architecture}.{name}"
        return self.require(key, kind) if default is _REQUIRED else self.get(key, default, kind)

    def per_layer(self, name: str, n: int, default: int | None = None) -> list[int]:
        """`{architecture}.{name}` as `n` integers: a scalar is repeated, an array must have n elements or more.

        GGUFError if it is missing without a default, or of another kind.
        """
        key = f"{self.architecture}.{name}"
        value = self.get(key, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iub":
            if len(value) < n:
                raise self.fail(key, f"metadata key {shown(key)} has {len(value)} values for {n} layers")
            return [int(v) for v in value[:n]]
        return [value if isinstance(value, int) else self.require(key, int)] * n

    def raw_kv(self, prefix: str) -> list[tuple[str, bytes]]:
        """The whole records (key length, key, type, value) of all keys that begin with `prefix`, in file order, byte
        for byte; overridden keys are encoded anew."""
        return self.metadata.raw(prefix)

    def record(self, key: str) -> Record | None:
        """Where the file has `key`, overrides aside."""
        return self.shards[0].header.records.get(key)

    # ------------------------------------------------------------------------------------------------------- data

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of tensor `name` as the file has them: uint8 [nbytes], a read-only view of the mapping.

        KeyError if there is no such tensor.
        """
        tensor = self.tensors[name]
        return np.frombuffer(self.shards[tensor.shard].map, np.uint8, tensor.nbytes, tensor.offset)

    def close(self) -> None:
        """Unmap. A shard with views from `data` still alive stays mapped until they are gone."""
        for shard in self.shards:
            try:
                shard.map.close()
            except BufferError:
                continue

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GGUFFile {self.path} of {len(self.shards)} shard(s), {len(self.tensors)} tensors>"


def open_gguf(path: str | Path, overrides: Mapping[str, Override] | None = None) -> GGUFFile:
    """Open a GGUF file; any shard of a split opens them all. The name needs no suffix (a blob will do).

    `overrides` replaces or adds scalar metadata as `--override-kv` does: int, float, bool or str, of the kind the
    file has. Raises GGUFError.
    """
    path = Path(path)
    shards = open_shards(path)
    try:
        return GGUFFile(path, shards, overrides or {})
    except BaseException:
        for shard in shards:
            shard.map.close()
        raise
