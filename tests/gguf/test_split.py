"""Split models, written by the gguf package's splitter; libllama as oracle that our pieces are real shards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import gguf_craft as craft
import llama_cpp
import numpy as np
import pytest
from gguf_craft import ARCH, STR, U16, kv, model, tensor

from ftgguf.gguf import GGUFError, TensorType, open_gguf

BLOCKS = 3
ROLES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")


def write_split(folder: Path, kind: gguf.GGMLQuantizationType, file_type: int) -> list[Path]:
    """A model of three blocks as `m-0000k-of-00003.gguf`, one block a shard."""
    folder.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=len(ROLES))
    writer.add_name("toy")
    writer.add_file_type(file_type)
    random = np.random.default_rng(int(kind))
    for block in range(BLOCKS):
        for role in ROLES:
            data = random.integers(0, 255, (2, gguf.GGML_QUANT_SIZES[kind][1] * 2), np.uint8)
            writer.add_tensor(f"blk.{block}.{role}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("m-*.gguf"))


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    paths = write_split(tmp_path / "q4", gguf.GGMLQuantizationType.Q4_K, 15)
    assert [path.name for path in paths] == [f"m-0000{k}-of-00003.gguf" for k in (1, 2, 3)]
    return paths


@pytest.mark.parametrize("which", [0, 1, 2])
def test_any_shard_opens_all(shards: list[Path], which: int) -> None:
    """Oracle: GGUFReader of each shard alone; the metadata is the first one's whichever was opened."""
    found = open_gguf(shards[which])
    assert found.path == shards[which]
    assert [shard.path for shard in found.shards] == shards
    assert found.metadata["general.name"] == found.name == "toy"
    assert found.file_type == "Q4_K - Medium"
    assert len(found.tensors) == BLOCKS * len(ROLES)
    for number, path in enumerate(shards):
        for theirs in gguf.GGUFReader(path).tensors:
            ours = found.tensors[theirs.name]
            assert (ours.shard, ours.offset, ours.nbytes) == (number, theirs.data_offset, theirs.n_bytes)
            assert found.data(theirs.name).tobytes() == theirs.data.tobytes()
    assert found.file_size == sum(path.stat().st_size for path in shards)


def test_all_missing_shards_are_listed(shards: list[Path]) -> None:
    """Expectation: the list is exact, and says what to do."""
    shards[0].unlink()
    shards[2].unlink()
    with pytest.raises(GGUFError) as caught:
        open_gguf(shards[1])
    assert caught.value.path == shards[1]
    assert caught.value.message == (
        "2 of 3 shards are missing beside it, download them: m-00001-of-00003.gguf, m-00003-of-00003.gguf"
    )


def test_symlinks_are_followed(shards: list[Path], tmp_path: Path) -> None:
    """As in a hub cache: links with the right names to blobs with others; or one link to a shard among its siblings;
    or links in one folder to shards in several."""
    cache = tmp_path / "cache"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshot").mkdir()
    for number, path in enumerate(shards):
        shutil.copy(path, cache / "blobs" / f"digest{number}")
        (cache / "snapshot" / path.name).symlink_to(f"../blobs/digest{number}")
    assert len(open_gguf(cache / "snapshot" / shards[2].name).shards) == 3
    alone = tmp_path / "model.gguf"
    alone.symlink_to(shards[1])
    assert [shard.path.resolve() for shard in open_gguf(alone).shards] == [path.resolve() for path in shards]
    with pytest.raises(GGUFError, match="this is shard 2 of 3, but its name does not end in '-00002-of-00003"):
        open_gguf(cache / "blobs" / "digest1")


def test_a_shard_that_was_renamed(shards: list[Path]) -> None:
    """Shards 2 and 3 exchanged, a shard under a free name, a shard with another count in its name."""
    spare = shards[0].with_name("spare.gguf")
    os.rename(shards[1], spare)
    with pytest.raises(GGUFError, match=r"this is shard 2 of 3, but its name does not end in '-00002-of-00003\.gguf'"):
        open_gguf(spare)
    os.rename(shards[2], shards[1])
    with pytest.raises(GGUFError, match="this is shard 3 of 3 by its metadata, but its name says otherwise"):
        open_gguf(shards[1])
    os.rename(spare, shards[2])
    with pytest.raises(GGUFError, match=r"split\.no is 2 \(shard 3\), expected 1 by its name: it was renamed"):
        open_gguf(shards[0])
    other = shards[0].with_name("m-00001-of-00002.gguf")
    os.rename(shards[0], other)
    with pytest.raises(GGUFError, match="this is shard 1 of 3 by its metadata, but its name says otherwise"):
        open_gguf(other)


def test_a_shard_of_another_quantisation(shards: list[Path], tmp_path: Path) -> None:
    """Expectation: the odd shard is named, whichever it is and whichever was opened; mixed types alone are fine."""
    others = write_split(tmp_path / "q8", gguf.GGMLQuantizationType.Q8_0, 7)
    for odd in (2, 1, 0):
        mixed = tmp_path / f"mixed{odd}"
        mixed.mkdir()
        for number, path in enumerate(shards):
            shutil.copy(others[number] if number == odd else path, mixed / path.name)
        for opened in range(3):
            with pytest.raises(GGUFError, match="this shard comes from another quantisation: it holds") as caught:
                open_gguf(mixed / shards[opened].name)
            assert caught.value.path.name == shards[odd].name
            assert caught.value.message.endswith("it holds q8_0, the others q4_K")


def test_a_mix_of_types_is_one_quantisation(shards: list[Path]) -> None:
    """A Q4_K_M has Q6_K for some weights of the last blocks; a dynamic mix may change all but one kind of weight."""
    keys = [
        kv("split.no", U16, 2),
        kv("split.count", U16, 3),
        kv("split.tensors.count", craft.I32, BLOCKS * len(ROLES)),
    ]
    for changed in (ROLES[2:3], ROLES[1:]):
        records, data = [], b""
        for role in ROLES:
            kind = TensorType.Q6_K if role in changed else TensorType.Q4_K
            records.append(tensor(f"blk.2.{role}.weight", [512, 2], int(kind), len(data)))
            data += bytes(-(-4 * kind.block_bytes // 32) * 32)
        shards[2].write_bytes(model(keys, records, data))
        assert open_gguf(shards[0]).tensors[f"blk.2.{changed[0]}.weight"].type is TensorType.Q6_K


def test_shards_of_another_model(shards: list[Path], tmp_path: Path) -> None:
    """A tensor twice; a shard with fewer tensors than split.tensors.count promises."""
    keys = [kv("split.no", U16, 2), kv("split.count", U16, 3)]
    shards[2].write_bytes(model(keys, [tensor("blk.0.attn_q.weight", [1])], b"\0" * 32))
    with pytest.raises(
        GGUFError, match=r"tensor 'blk\.0\.attn_q\.weight' is also in 'm-00001-of-00003\.gguf'"
    ) as caught:
        open_gguf(shards[0])
    assert caught.value.path == shards[2]
    assert caught.value.offset == shards[2].read_bytes().index(b"blk.0") - 8
    shards[2].write_bytes(model(keys, [tensor("output.weight", [1])], b"\0" * 32))
    with pytest.raises(GGUFError, match=r"split\.tensors\.count is 18 but the 3 shards hold 13 tensors"):
        open_gguf(shards[0])
    shards[2].write_bytes(model([kv("split.no", U16, 2), kv("split.count", U16, 4)], []))
    with pytest.raises(GGUFError, match=r"split\.count is 4, but 3 in 'm-00001-of-00003\.gguf'"):
        open_gguf(shards[0])
    shards[2].write_bytes(model([*keys, kv("general.architecture", STR, "qwen2")], []))
    with pytest.raises(GGUFError, match=r"general\.architecture differs from 'm-00001-of-00003\.gguf'"):
        open_gguf(shards[0])
    shards[2].write_bytes(model([ARCH], []))
    with pytest.raises(GGUFError, match=r"split\.no is missing, expected 2 by its name"):
        open_gguf(shards[0])


def test_damage_in_a_later_shard_names_that_shard(shards: list[Path]) -> None:
    """Expectation: the path in the error is the broken file's."""
    os.truncate(shards[2], shards[2].stat().st_size - 100)
    with pytest.raises(GGUFError, match="are missing: get it again") as caught:
        open_gguf(shards[0])
    assert caught.value.path == shards[2]


def test_joined_with_cat(shards: list[Path], tmp_path: Path) -> None:
    """The mistake of many forum threads: cat m-*.gguf > whole.gguf."""
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(b"".join(path.read_bytes() for path in shards))
    with pytest.raises(GGUFError, match="shards were joined with cat") as caught:
        open_gguf(whole)
    assert caught.value.offset == shards[0].stat().st_size


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ([kv("split.count", STR, "3")], "split.count must be an integer"),
        ([kv("split.count", U16, 3)], r"split.no is None, it must be 0 to 2"),
        ([kv("split.count", U16, 3), kv("split.no", U16, 3)], "split.no is 3, it must be 0 to 2"),
        ([kv("split.count", craft.I64, 1 << 40), kv("split.no", U16, 0)], "split.count is 1099511627776: the file"),
        ([kv("split.count", U16, 3), kv("split.no", craft.I8, -1)], "split.no is -1"),
    ],
)
def test_damaged_split_keys(tmp_path: Path, keys: list[bytes], fault: str) -> None:
    """Expectation: split.no counts from 0 below split.count."""
    path = tmp_path / "m-00001-of-00003.gguf"
    path.write_bytes(model([ARCH, *keys]))
    with pytest.raises(GGUFError) as caught:
        open_gguf(path)
    assert fault in caught.value.message


def test_one_of_one_is_a_plain_file(tmp_path: Path) -> None:
    """Some hubs name every file so, with or without split keys."""
    for keys in ([], [kv("split.count", U16, 1), kv("split.no", U16, 0)], [kv("split.count", U16, 0)]):
        path = tmp_path / "m-00001-of-00001.gguf"
        path.write_bytes(model([ARCH, *keys]))
        assert open_gguf(path).architecture == "llama"


def test_libllama_opens_the_same_split(
    stories_dense: Path, tmp_path: Path, split_file: Callable[[Path, Path, int], list[Path]]
) -> None:
    """Oracle: libllama loads the split that we read; sizes and parameter counts agree."""
    paths = split_file(stories_dense, tmp_path, 20)
    assert len(paths) == 3
    ours = open_gguf(paths[2])
    whole = open_gguf(stories_dense)
    handle = llama_cpp.llama_model_load_from_file(os.fsencode(paths[0]), llama_cpp.llama_model_default_params())
    assert handle
    assert llama_cpp.llama_model_size(handle) == ours.size == whole.size
    assert llama_cpp.llama_model_n_params(handle) == ours.n_params == whole.n_params
    llama_cpp.llama_model_free(handle)
    for name in whole.tensors:
        assert ours.data(name).tobytes() == whole.data(name).tobytes()


@pytest.fixture
def split_file() -> Callable[[Path, Path, int], list[Path]]:
    """Split a real file by tensor count, as llama-gguf-split does."""

    def split(path: Path, folder: Path, per_shard: int) -> list[Path]:
        source = open_gguf(path)
        tensors = list(source.tensors.values())
        groups = [tensors[i : i + per_shard] for i in range(0, len(tensors), per_shard)]
        paths = []
        for number, group in enumerate(groups):
            keys = [
                kv("split.no", U16, number),
                kv("split.count", U16, len(groups)),
                kv("split.tensors.count", craft.I32, len(tensors)),
            ]
            if number == 0:
                keys = [record for _, record in source.raw_kv("")] + keys
            records, data = [], b""
            for info in group:
                records.append(tensor(info.name, info.shape, int(info.type), len(data)))
                data += source.data(info.name).tobytes()
                data += b"\0" * (-len(data) % 32)
            paths.append(folder / f"s-{number + 1:05d}-of-{len(groups):05d}.gguf")
            paths[-1].write_bytes(model(keys, records, data))
        return paths

    return split
