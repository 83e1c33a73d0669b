"""Split models: from any shard to all of them, checked against each other.

A shard is named `PREFIX-00001-of-00003.gguf` and carries `split.no` (from 0), `split.count` and
`split.tensors.count`; only the first carries the model's metadata (llama.cpp's `llama-gguf-split`).
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path

from .errors import GGUFError, shown
from .header import Header, RawTensor, parse_header
from .layout import check_layout
from .sniff import describe
from .types import TensorType, base_type
from .values import FORMATS, ValueType

_SHARD = re.compile(r"^(?P<prefix>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)
_BLOCK = re.compile(r"^blk\.\d+\.")
_ENOUGH_ROLES = 3
"""Kinds of weights two shards must share before their types say anything about the quantisation."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One open file: `map` is a read-only mmap of its `size` bytes. `data_end`: where its last tensor ends."""

    path: Path
    size: int
    map: mmap
    header: Header
    data_end: int


def open_shard(path: Path) -> Shard:
    """Map one file, parse its header and check its data layout. Raises GGUFError."""
    try:
        # O_NONBLOCK: opening a FIFO must fail below instead of waiting for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise GGUFError(path, None, f"cannot be opened: {reason}") from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise GGUFError(path, None, f"is {kind}; give the path of a .gguf file")
        if status.st_size == 0:
            raise GGUFError(path, 0, describe(b"", 0, path.name))
        try:
            mapped = mmap(handle, status.st_size, access=ACCESS_READ)
        except (OSError, ValueError) as error:
            raise GGUFError(path, None, f"cannot be mapped: {error}") from None
    finally:
        os.close(handle)
    try:
        header = parse_header(path, mapped)
        return Shard(path, status.st_size, mapped, header, check_layout(path, mapped, header))
    except BaseException:
        mapped.close()
        raise


def integer(shard: Shard, key: str) -> int | None:
    """An integer key of one shard's header, None if absent. Raises GGUFError if it is not an integer."""
    record = shard.header.records.get(key)
    if record is None:
        return None
    if record.kind not in FORMATS or record.kind in (ValueType.F32, ValueType.F64, ValueType.BOOL):
        raise GGUFError(shard.path, record.start, f"{key} must be an integer")
    return int(FORMATS[record.kind].unpack_from(shard.map, record.value)[0])


def open_shards(path: Path) -> tuple[Shard, ...]:
    """Open `path` and, if it is a shard, all its siblings; in order, cross-checked. Raises GGUFError."""
    opened = [open_shard(path)]
    try:
        count = integer(opened[0], "split.count") or 1
        if count <= 1:
            return (opened[0],)
        paths = _sibling_paths(opened[0], count)
        number = integer(opened[0], "split.no") or 0
        for place, sibling in enumerate(paths):
            if place != number:
                opened.append(open_shard(sibling))
        first = opened.pop(0)
        opened.insert(number, first)
        _check_numbers(opened, count)
        _check_tensors(opened)
        _check_quantisation(opened)
        return tuple(opened)
    except BaseException:
        for shard in opened:
            shard.map.close()
        raise


def _sibling_paths(shard: Shard, count: int) -> list[Path]:
    """The paths of all shards, in order. A symlink's own folder is tried first, then its target's."""
    number = integer(shard, "split.no")
    if number is None or not 0 <= number < count:
        raise GGUFError(shard.path, None, f"split.no is {number}, it must be 0 to {count - 1} (split.count {count})")
    if count > 99999:
        raise GGUFError(shard.path, None, f"split.count is {count}: the file is damaged")
    places: list[tuple[Path, str]] = []
    wrong = ""
    for candidate in dict.fromkeys((shard.path, Path(os.path.realpath(shard.path)))):
        name = _SHARD.match(candidate.name)
        if name is None:
            continue
        if int(name["count"]) != count or int(name["no"]) != number + 1:
            wrong = wrong or candidate.name
            continue
        places.append((candidate.parent, name["prefix"]))
    if not places:
        this = f"this is shard {number + 1} of {count}"
        if wrong:
            raise GGUFError(shard.path, None, f"{this} by its metadata, but its name says otherwise: it was renamed")
        ending = f"-{number + 1:05d}-of-{count:05d}.gguf"
        raise GGUFError(
            shard.path, None, f"{this}, but its name does not end in '{ending}', so the others cannot be found: rename"
        )
    paths, missing = [], []
    for no in range(1, count + 1):
        options = [folder / f"{prefix}-{no:05d}-of-{count:05d}.gguf" for folder, prefix in places]
        found = next((option for option in options if option.exists()), None)
        if found is None and no == number + 1:
            found = shard.path
        if found is None:
            missing.append(options[0].name)
        else:
            paths.append(found)
    if missing:
        listed = ", ".join(missing[:50]) + (f" and {len(missing) - 50} more" if len(missing) > 50 else "")
        raise GGUFError(
            shard.path, None, f"{len(missing)} of {count} shards are missing beside it, download them: {listed}"
        )
    return paths


def _check_numbers(shards: list[Shard], count: int) -> None:
    for place, shard in enumerate(shards):
        their_count, number = integer(shard, "split.count"), integer(shard, "split.no")
        if their_count not in (count, None):  # llama.cpp reads it in the first shard only
            raise GGUFError(
                shard.path, None, f"split.count is {their_count}, but {count} in {shown(shards[0].path.name)}: "
                "it belongs to another split"
            )  # fmt: skip
        if number != place:
            has = "missing" if number is None else f"{number} (shard {number + 1})"
            raise GGUFError(shard.path, None, f"split.no is {has}, expected {place} by its name: it was renamed")
        for key in ("general.architecture", "general.file_type"):
            ours, theirs = _raw_value(shards[0], key), _raw_value(shard, key)
            if theirs is not None and theirs != ours:
                raise GGUFError(
                    shard.path, shard.header.records[key].start, f"{key} differs from {shown(shards[0].path.name)}: "
                    "it belongs to another model or quantisation"
                )  # fmt: skip


def _raw_value(shard: Shard, key: str) -> bytes | None:
    record = shard.header.records.get(key)
    return None if record is None else shard.map[record.value : record.end]


def _check_tensors(shards: list[Shard]) -> None:
    owner: dict[str, Shard] = {}
    for shard in shards:
        for tensor in shard.header.tensors:
            if tensor.name in owner:
                raise GGUFError(
                    shard.path,
                    tensor.start,
                    f"tensor {shown(tensor.name)} is also in {shown(owner[tensor.name].path.name)}: "
                    "the shards belong to different files",
                )
            owner[tensor.name] = shard
    for shard in shards:
        expected = integer(shard, "split.tensors.count")
        if expected is not None and expected != len(owner):
            record = shard.header.records["split.tensors.count"]
            raise GGUFError(
                shard.path,
                record.start,
                f"split.tensors.count is {expected} but the {len(shards)} shards hold {len(owner)} tensors: "
                "a shard belongs to another file",
            )


def _roles(tensors: list[RawTensor]) -> dict[str, set[TensorType]]:
    """The types of each kind of weight matrix, all blocks together: `ffn_up_exps.weight` -> {q4_K, q6_K}."""
    roles: dict[str, set[TensorType]] = {}
    for tensor in tensors:
        role = _BLOCK.sub("", tensor.name)
        if role != tensor.name and len(tensor.shape) > 1:
            roles.setdefault(role, set()).add(tensor.type)
    return roles


def _check_quantisation(shards: list[Shard]) -> None:
    """Refuse a shard that comes from another quantisation of the same model.

    Nothing in a later shard names its quantisation, so this is judged by types: no kind of weight has a type in
    common with the other shards, and the file type's own tensor type occurs on one side only. Both, because the last
    layers of a real mix may well have other types.
    """
    file_type = integer(shards[0], "general.file_type")
    base = None if file_type is None else base_type(file_type)
    odd: list[Shard] = []
    for shard in shards:
        mine = _roles(shard.header.tensors)
        others = _roles([tensor for other in shards if other is not shard for tensor in other.header.tensors])
        common = mine.keys() & others.keys()
        if len(common) < _ENOUGH_ROLES or any(mine[role] & others[role] for role in common):
            continue
        here = {kind for role in common for kind in mine[role]}
        there = {kind for role in common for kind in others[role]}
        if base is None or (base in here) != (base in there):
            odd.append(shard)
    if not odd:
        return
    wrong = next((shard for shard in odd if shard is not shards[0]), odd[0])
    types = ", ".join(sorted({tensor.type.ggml_name for tensor in wrong.header.tensors}))
    rest = {tensor.type.ggml_name for shard in shards if shard is not wrong for tensor in shard.header.tensors}
    raise GGUFError(
        wrong.path,
        None,
        f"this shard comes from another quantisation: it holds {types}, the others {', '.join(sorted(rest))}",
    )
