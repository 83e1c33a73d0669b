"""GGUF files: a bounds-checked reader, split files, and the table of tensor types."""

from .errors import GGUFError
from .header import TensorInfo
from .metadata import Metadata
from .reader import GGUFFile, open_gguf
from .split import Shard
from .types import FILE_TYPE_NAMES, TYPE_TABLE, TensorType, file_type_name, row_bytes, type_from_name
from .values import StringArray

__all__ = [
    "FILE_TYPE_NAMES",
    "TYPE_TABLE",
    "GGUFError",
    "GGUFFile",
    "Metadata",
    "Shard",
    "StringArray",
    "TensorInfo",
    "TensorType",
    "file_type_name",
    "open_gguf",
    "row_bytes",
    "type_from_name",
]
