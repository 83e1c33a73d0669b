"""`--check-tensors` finds what was planted; the planted values are those that ggml's own check refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from compat.synth import make
from ftgguf.engine import check_tensors as subject
from ftgguf.gguf import GGUFError, GGUFFile, open_gguf
from ftgguf.gguf.types import TensorType

KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"]
NAN: dict[str, tuple[int, bytes]] = {
    "F32": (0, b"\x00\x00\xc0\x7f"),
    "F16": (0, b"\x00\x7c"),  # infinity
    "BF16": (0, b"\xc0\x7f"),
    "Q4_1": (2, b"\x00\x7e"),  # the minimum
    "Q2_K": (80, b"\x00\x7e"),
    "Q6_K": (208, b"\x00\xfc"),
    "MXFP4": (0, b"\xff"),
}
"""Type -> (offset in a block, bytes) where it is not the half-precision scale at the front."""


def model(folder: Path, kind: str) -> Path:
    path = folder / f"{kind}.gguf"
    make("llama", path, types=kind, n_layer=1, n_embd=256, n_ff=256, n_ff_expert=256, n_expert=4, n_expert_used=2)
    return path


def damage(path: Path, tensor: str, block: int) -> None:
    with open_gguf(path) as gguf:
        info = gguf.tensors[tensor]
        offset, value = NAN.get(info.type.name, (0, b"\x00\x7e"))
        at = info.offset + block * info.type.block_bytes + offset
    with path.open("r+b") as file:
        file.seek(at)
        file.write(value)


def check(path: Path) -> list[float]:
    seen: list[float] = []
    with open_gguf(path) as gguf:
        assert isinstance(gguf, GGUFFile)
        subject.check_tensors(gguf, lambda _, fraction: seen.append(fraction))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_value_is_found_by_the_tensors_name(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "PIECE", 4096)  # several pieces in these small tensors
    path = model(tmp_path, kind)
    seen = check(path)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    name = "blk.0.ffn_down_exps.weight"
    with open_gguf(path) as gguf:
        assert gguf.tensors[name].type is TensorType[kind]
        last = gguf.tensors[name].nbytes // gguf.tensors[name].type.block_bytes - 1
    damage(path, name, last)
    with pytest.raises(GGUFError, match=rf"invalid data: '{name}'; ") as error:
        check(path)
    assert "\n" not in str(error.value)


def test_pieces_cover_every_byte_in_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "PIECE", 1000)
    with open_gguf(model(tmp_path, "Q4_K")) as gguf:
        sizes: dict[str, int] = {}
        for tensor, start, end in subject.pieces(gguf):
            assert start == sizes.get(tensor.name, 0)
            assert (end - start) % tensor.type.block_bytes == 0
            sizes[tensor.name] = end
        assert sizes == {name: info.nbytes for name, info in gguf.tensors.items()}


def test_the_server_says_it_and_does_not_start(tmp_path: Path) -> None:
    path = model(tmp_path, "F32")
    damage(path, "output_norm.weight", 3)
    command = [sys.executable, "-m", "ftgguf", "serve", "-m", str(path), "--port", "0", "-t", "1", "-c", "64"]
    done = subprocess.run([*command, "--check-tensors"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "found tensors with invalid data: 'output_norm.weight'" in done.stderr
