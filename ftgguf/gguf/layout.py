"""Where a file's tensor data lies: aligned, inside the file, without overlap, and nothing joined on behind it."""

from __future__ import annotations

from mmap import mmap
from pathlib import Path

from .errors import GGUFError, shown
from .header import Header, RawTensor
from .sniff import is_raw_part

_JOIN_WINDOW = 1 << 20
"""Bytes searched for another header: behind the data, and behind its padding where the alignment is larger."""


def check_layout(path: Path, buffer: mmap | bytes, header: Header) -> int:
    """Check every tensor's place in the data section; returns where the last one ends (absolute).

    Raises GGUFError at the tensor record in question, or at the end of the file where that is what is missing.
    """
    ordered = sorted(header.tensors, key=lambda tensor: tensor.relative)
    end, before, packed = 0, None, True
    for tensor in ordered:
        if tensor.relative % header.alignment:
            raise GGUFError(
                path,
                tensor.start,
                f"tensor {shown(tensor.name)}: data offset {tensor.relative} is not a multiple of the alignment "
                f"{header.alignment}",
            )
        if before is not None and tensor.relative < end:
            raise GGUFError(
                path,
                tensor.start,
                f"tensor {shown(tensor.name)} at data offset {tensor.relative} overlaps {shown(before.name)}, "
                f"which ends at {end}",
            )
        packed = packed and tensor.relative == -(-end // header.alignment) * header.alignment
        end, before = tensor.relative + tensor.nbytes, tensor
    last = header.data + end if ordered else header.end
    if last > len(buffer):
        _beyond(path, len(buffer), header, ordered, packed, last)
    _check_joined(path, buffer, header, last)
    return last


def _beyond(path: Path, size: int, header: Header, ordered: list[RawTensor], packed: bool, last: int) -> None:
    """Data beyond the end: a download cut short if the tensors are packed as every writer packs them, else damage."""
    if packed:
        cure = "it is byte-wise split: join all parts in order with cat" if is_raw_part(path.name) else "get it again"
        raise GGUFError(
            path, size, f"the file ends here but its tensors need {last} bytes, {last - size} are missing: {cure}"
        )
    for tensor in ordered:
        if header.data + tensor.relative + tensor.nbytes > size:
            raise GGUFError(
                path,
                tensor.start,
                f"tensor {shown(tensor.name)}: its {tensor.nbytes} bytes at data offset {tensor.relative} lie beyond "
                f"the end of the file ({size} bytes)",
            )


def _check_joined(path: Path, buffer: mmap | bytes, header: Header, last: int) -> None:
    """Shards joined with cat: the first one's data is followed by the next one's header."""
    padded = -(-last // header.alignment) * header.alignment
    found = [
        buffer.find(magic, start, min(len(buffer), start + _JOIN_WINDOW))
        for start in (last, padded)
        for magic in (b"GGUF\2\0\0\0", b"GGUF\3\0\0\0")
    ]
    at = min((place for place in found if place >= 0), default=None)
    if at is not None:
        raise GGUFError(
            path,
            at,
            "another GGUF file begins here: shards were joined with cat, which does not work; keep them as they are "
            "and open the first (-00001-of-...), or merge them with llama-gguf-split --merge",
        )
