"""Write a GGUF file of any supported architecture and tensor type with random weights.

`make` writes small ones for tests. The command line writes files with a real model's exact shapes for speed work
(their text is noise): `python -m compat.synth --shape qwen3-30b --layers 12 OUT.gguf`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter, LlamaFileType
from numpy.typing import NDArray

from compat import vocab as vocabularies
from compat.blocks import layout, nbytes, random_tensor
from compat.families import FAMILIES, Sizes, Weight, metadata, weights
from compat.shapes import SHAPES
from compat.vocab import Vocab

Types = str | Mapping[str, str] | Callable[[str], str]
"""Tensor types: one for all, patterns (`{"*_exps.weight": "Q4_K", "*": "Q8_0"}`, first match wins), or a function."""


def make(
    arch: str,
    path: str | os.PathLike[str],
    *,
    types: Types = "Q8_0",
    vocab: Vocab | None = None,
    seed: int = 1,
    scales: bool = False,
    name: str | None = None,
    values: Mapping[str, NDArray[np.float32]] | None = None,
    progress: Callable[[float], None] | None = None,
    **sizes: Any,
) -> Path:
    """Write a random model of architecture `arch` (a key of `FAMILIES`) to `path`.

    Args:
        types: of the weights. Norms, biases, routers and convolutions are always F32. A weight outside the experts
            whose rows are no multiple of the type's block becomes Q8_0, or F16 where that does not fit either, as
            llama-quantize does; an expert tensor raises instead.
        vocab: default: `vocab.tiny()`, 320 byte-level tokens.
        scales: add the second-level `.scale` tensors that NVFP4 files carry (float32 [1], or [experts]).
        values: float32 values of tensors, by name, instead of random ones; such a tensor is F32.
        sizes: fields of `families.Sizes` that differ from the family's defaults.

    Returns:
        `path`. The file is written under another name and renamed.

    Raises:
        ValueError: unknown architecture, size or type, or an expert width that the type cannot hold.
    """
    if arch not in FAMILIES:
        raise ValueError(f"unknown architecture '{arch}'; known: {', '.join(FAMILIES)}")
    unknown = sizes.keys() - {f.name for f in fields(Sizes)}
    if unknown:
        raise ValueError(
            f"unknown sizes {', '.join(sorted(unknown))}; known: {', '.join(f.name for f in fields(Sizes))}"
        )
    size = replace(FAMILIES[arch].defaults, **sizes)
    vocab = vocab or vocabularies.tiny()
    plan = _plan(arch, size, vocab.size, types, scales)
    given = dict(values or {})
    plan = [(weight, "F32") if weight.name in given else (weight, type_) for weight, type_ in plan]
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    writer = GGUFWriter(partial, arch)
    try:
        writer.add_name(name or f"synthetic-{arch}")
        _write_metadata(writer, arch, size, vocab, plan)
        _write_tensors(writer, plan, given, np.random.default_rng(seed), progress)
        writer.close()
        os.replace(partial, path)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)
    return path


def type_of(types: Types, weight: Weight) -> str:
    """The type that `weight` gets under `types`; see `make`."""
    if weight.fixed:
        return "F32"
    if isinstance(types, str):
        asked = types
    elif isinstance(types, Mapping):
        matched = next((t for pattern, t in types.items() if fnmatchcase(weight.name, pattern)), None)
        if matched is None:
            raise ValueError(f"no pattern of {list(types)} matches tensor {weight.name}: add '*'")
        asked = matched
    else:
        asked = types(weight.name)
    form = layout(asked)
    if weight.shape[-1] % form.block == 0:
        return asked.upper()
    if "_exps." in weight.name:
        raise ValueError(f"{weight.name}: rows of {weight.shape[-1]} are no multiple of {asked}'s block {form.block}")
    return "Q8_0" if weight.shape[-1] % 32 == 0 else "F16"


def _plan(arch: str, size: Sizes, n_vocab: int, types: Types, scales: bool) -> list[tuple[Weight, str]]:
    """All tensors with their types, each NVFP4 weight followed by its scale if `scales`."""
    plan: list[tuple[Weight, str]] = []
    for weight in weights(arch, size, n_vocab):
        type_ = type_of(types, weight)
        if not (scales and type_ == "NVFP4"):
            plan.append((weight, type_))
            continue
        second = weight.std  # the block's own scales are then about 1
        shape = (weight.shape[0],) if "_exps." in weight.name else (1,)
        plan.append((replace(weight, std=1.0), type_))
        if weight.name != "token_embd.weight":
            scale = weight.name.replace(".weight", ".scale")
            plan.append((Weight(scale, shape, second * 0.2, second, fixed=True), "F32"))
    return plan


def _write_metadata(writer: GGUFWriter, arch: str, size: Sizes, vocab: Vocab, plan: list[tuple[Weight, str]]) -> None:
    for key, value in metadata(arch, size).items():
        key = f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=GGUFValueType.INT32)
    file_type = _file_type(plan)
    if file_type is not None:
        writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    for key, value, type_, element in vocab.entries:
        writer.add_key_value(key, value, type_, sub_type=element)


def _file_type(plan: list[tuple[Weight, str]]) -> int | None:
    """`general.file_type` by the type with most bytes; None where llama.cpp has no number for it."""
    size: dict[str, int] = {}
    for weight, type_ in plan:
        size[type_] = size.get(type_, 0) + nbytes(type_, weight.shape)
    most = max(size, key=lambda t: size[t])
    number = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE", "Q1_0": "40", "Q2_0": "41", "NVFP4": "39"}.get(most)
    if number is not None and number.isdigit():
        return int(number)
    for candidate in (number, f"MOSTLY_{most}", f"MOSTLY_{most}_M"):
        if candidate is not None and candidate in LlamaFileType.__members__:
            return int(LlamaFileType[candidate])
    return None


def _write_tensors(
    writer: GGUFWriter,
    plan: list[tuple[Weight, str]],
    given: Mapping[str, NDArray[np.float32]],
    rng: np.random.Generator,
    progress: Callable[[float], None] | None,
) -> None:
    for weight, type_ in plan:
        size = nbytes(type_, weight.shape)
        # A dtype other than uint8 makes the writer take the logical shape; ids above the package's enum pass through.
        writer.add_tensor_info(weight.name, weight.shape, np.dtype(np.float32), size, raw_dtype=layout(type_).id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    total, done = sum(nbytes(t, w.shape) for w, t in plan), 0
    for weight, type_ in plan:
        data: NDArray[Any]
        if weight.name in given:
            data = np.ascontiguousarray(np.broadcast_to(given[weight.name], weight.shape), np.float32)
        elif weight.fixed:
            data = (weight.mean + weight.std * rng.standard_normal(weight.shape, np.float32)).astype(np.float32)
        else:
            data = random_tensor(type_, weight.shape, weight.std, rng)
        writer.write_tensor_data(data)
        done += nbytes(type_, weight.shape)
        if progress is not None:
            progress(done / total)


def main(arguments: list[str] | None = None) -> None:
    """Command line: a file with a real model's shapes."""
    parser = argparse.ArgumentParser(prog="python -m compat.synth", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b")
    parser.add_argument("--layers", type=int, help="layers to write (default: all)")
    parser.add_argument("--types", help="one tensor type for all weights instead of the shape's usual mix")
    parser.add_argument("--vocab", type=Path, metavar="GGUF", help="copy the vocabulary of this file")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    shape = SHAPES[options.shape]
    n_layer = options.layers or shape.sizes.n_layer
    vocab = vocabularies.from_gguf(options.vocab) if options.vocab else vocabularies.plausible(shape.n_vocab)
    start = time.monotonic()

    def progress(fraction: float) -> None:
        print(f"\r{fraction:6.1%}", end="", file=sys.stderr, flush=True)

    make(
        shape.arch,
        options.out,
        types=options.types or shape.types(n_layer),
        vocab=vocab,
        seed=options.seed,
        name=f"synthetic-{options.shape}",
        progress=progress if sys.stderr.isatty() else None,
        **{f.name: getattr(shape.sizes, f.name) for f in fields(Sizes)} | {"n_layer": n_layer},
    )
    size = options.out.stat().st_size
    print(f"{options.out}: {size / 1e9:.2f} GB in {time.monotonic() - start:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
