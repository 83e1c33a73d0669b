"""Good files: what the reader says against what the gguf package wrote and what its reader says."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import gguf
import gguf_craft as craft
import llama_cpp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftgguf.gguf import GGUFError, StringArray, TensorType, open_gguf

VALUE = {
    craft.U8: 200,
    craft.I8: -100,
    craft.U16: 60000,
    craft.I16: -30000,
    craft.U32: 4_000_000_000,
    craft.I32: -2_000_000_000,
    craft.F32: 1.5,
    craft.BOOL: True,
    craft.STR: "text",
    craft.U64: 1 << 63,
    craft.I64: -(1 << 62),
    craft.F64: 0.1,
}


def save(folder: Path, data: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_scalars_and_arrays_of_every_type(tmp_path: Path, version: int) -> None:
    """Expectation: the values that were packed; versions 2 and 3 share the layout."""
    kvs = [craft.ARCH]
    for kind, item in VALUE.items():
        kvs.append(craft.kv(f"scalar.{kind}", kind, item))
        kvs.append(craft.kv_array(f"array.{kind}", kind, [item, item, VALUE[kind]]))
    model = open_gguf(save(tmp_path, craft.model(kvs, version=version)))
    assert model.version == version
    assert model.architecture == "llama"
    for kind, item in VALUE.items():
        assert model.metadata[f"scalar.{kind}"] == item
        assert type(model.metadata[f"scalar.{kind}"]) is type(item)
        assert list(model.metadata[f"array.{kind}"]) == [item] * 3
    assert isinstance(model.metadata[f"array.{craft.STR}"], StringArray)
    assert model.metadata[f"array.{craft.BOOL}"].dtype == np.bool_
    assert len(model.metadata) == len(kvs) == len(list(model.metadata))


def test_nested_and_empty_arrays(tmp_path: Path) -> None:
    """Expectation: the specification allows arrays of arrays; empty ones are legal."""
    inner = craft.array(craft.STR, ["a", "b"])
    kvs = [
        craft.kv_array("nested", craft.ARR, [craft.array(craft.U8, [1, 2]), craft.array(craft.ARR, [inner])]),
        craft.kv_array("no.strings", craft.STR, []),
        craft.kv_array("no.numbers", craft.F32, []),
        craft.kv_array("no.arrays", craft.ARR, []),
        craft.kv("last", craft.U32, 7),
    ]
    model = open_gguf(save(tmp_path, craft.model(kvs)))
    numbers, deeper = model.metadata["nested"]
    assert numbers.tolist() == [1, 2]
    assert [list(strings) for strings in deeper] == [["a", "b"]]
    assert (
        len(model.metadata["no.strings"]) == len(model.metadata["no.numbers"]) == len(model.metadata["no.arrays"]) == 0
    )
    assert model.metadata["no.strings"].to_bytes() == []
    assert model.metadata["last"] == 7


def test_strings_that_are_not_utf8_keep_their_bytes(tmp_path: Path) -> None:
    """Expectation: byte-level vocabularies hold such tokens; surrogateescape round-trips them."""
    raw = [b"\xff\xfe", "é".encode(), b"", b"a\0b"]
    kvs = [craft.kv_array("s", craft.STR, raw), craft.kv("one", craft.STR, b"\xff")]
    model = open_gguf(save(tmp_path, craft.model(kvs)))
    strings = model.metadata["s"]
    assert strings.to_bytes() == raw
    assert [strings.raw(i) for i in range(4)] == raw
    assert [text.encode("utf-8", "surrogateescape") for text in strings] == raw
    assert strings[1] == strings[-3] == "é"
    assert strings[1:3] == ["é", ""]
    with pytest.raises(IndexError):
        strings[4]
    with pytest.raises(IndexError):
        strings[-5]
    assert model.metadata["one"].encode("utf-8", "surrogateescape") == b"\xff"


names = st.text("abcdefghijklmnopqrstuvwxyz._0123456789", min_size=1, max_size=20).map(lambda text: "x." + text)
scalars = st.one_of(
    st.booleans(), st.integers(-(1 << 31), (1 << 31) - 1), st.floats(width=32, allow_nan=False), st.text(max_size=40)
)
shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    keys=st.dictionaries(names, scalars, max_size=8),
    strings=st.lists(st.text(max_size=12), max_size=30),
    tensors=st.dictionaries(
        names, st.tuples(shapes, st.sampled_from(["Q8_0", "Q4_K", "F32", "F16", "I8"])), max_size=6
    ),
    alignment=st.sampled_from([8, 32, 64, 256]),
)
def test_agrees_with_the_gguf_package(
    tmp_path: Path,
    keys: dict[str, bool | int | float | str],
    strings: list[str],
    tensors: dict[str, tuple[list[int], str]],
    alignment: int,
) -> None:
    """Oracle: GGUFWriter wrote it, GGUFReader reads it: same metadata, shapes, types, offsets and bytes."""
    path = tmp_path / "property.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    if strings:
        writer.add_array("tokenizer.ggml.tokens", strings)
    for key, item in keys.items():
        add = {bool: writer.add_bool, int: writer.add_int32, float: writer.add_float32, str: writer.add_string}
        add[type(item)](key, item)
    random = np.random.default_rng(0)
    for name, (shape, kind) in tensors.items():
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        data = random.integers(0, 255, (*shape[:0:-1], shape[0] * (block * 4 if block == 1 else 1) * size), np.uint8)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    oracle = gguf.GGUFReader(path)
    with open_gguf(path) as model:
        assert model.alignment == oracle.alignment == alignment
        expected = {key: field.contents() for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
        found = {key: list(item) if isinstance(item, StringArray) else item for key, item in model.metadata.items()}
        assert found == expected
        assert list(model.tensors) == [tensor.name for tensor in oracle.tensors]
        assert model.n_params == sum(int(tensor.n_elements) for tensor in oracle.tensors)
        for theirs in oracle.tensors:
            ours = model.tensors[theirs.name]
            assert ours.shape == tuple(theirs.shape.tolist())
            assert (int(ours.type), ours.offset, ours.nbytes) == (
                int(theirs.tensor_type),
                theirs.data_offset,
                theirs.n_bytes,
            )
            assert model.data(theirs.name).tobytes() == theirs.data.tobytes()
    del oracle


def test_stories_against_libllama_and_the_gguf_package(stories_dense: Path) -> None:
    """Oracle: GGUFReader for the tensors, llama_model_size and llama_model_n_params of libllama for the totals."""
    model = open_gguf(stories_dense)
    oracle = gguf.GGUFReader(stories_dense)
    assert {t.name: (t.tensor_type.name, tuple(t.shape.tolist()), t.data_offset) for t in oracle.tensors} == {
        t.name: (t.type.name, t.shape, t.offset) for t in model.tensors.values()
    }
    handle = llama_cpp.llama_model_load_from_file(bytes(stories_dense), llama_cpp.llama_model_default_params())
    description = ctypes.create_string_buffer(256)
    llama_cpp.llama_model_desc(handle, description, 256)
    assert llama_cpp.llama_model_size(handle) == model.size
    assert llama_cpp.llama_model_n_params(handle) == model.n_params
    assert description.value.decode().endswith(" " + model.file_type.removeprefix("(guessed) "))
    llama_cpp.llama_model_free(handle)
    assert model.file_size == stories_dense.stat().st_size
    assert model.arch("block_count") == len({name.split(".")[1] for name in model.tensors if name.startswith("blk.")})


def test_typed_access(tmp_path: Path) -> None:
    """Expectation: the reader's contract; bool is not an integer, an integer may stand for a float."""
    kvs = [
        craft.ARCH,
        craft.kv("llama.block_count", craft.U32, 3),
        craft.kv("llama.rope.freq_base", craft.F32, 500.0),
        craft.kv("llama.flag", craft.BOOL, 1),
        craft.kv_array("llama.heads", craft.I32, [4, 8, 4]),
    ]
    path = save(tmp_path, craft.model(kvs))
    model = open_gguf(path)
    assert model.arch("block_count") == 3
    assert model.arch("block_count", kind=float) == 3.0
    assert model.arch("missing", 5) == 5
    assert model.arch("missing", None) is None
    assert model.arch("flag", kind=bool) is True
    assert model.get("missing") is None
    assert model.per_layer("heads", 3) == [4, 8, 4]
    assert model.per_layer("block_count", 2) == [3, 3]
    assert model.per_layer("missing", 2, 9) == [9, 9]
    start = path.read_bytes().index(b"llama.flag") - 8
    with pytest.raises(GGUFError, match=f"at byte {start}: metadata key 'llama.flag' is a bool, expected an integer"):
        model.arch("flag")
    with pytest.raises(GGUFError, match=r"metadata key 'llama\.missing' is missing"):
        model.arch("missing")
    with pytest.raises(GGUFError, match="has 3 values for 4 layers"):
        model.per_layer("heads", 4)
    with pytest.raises(GGUFError, match=r"'llama\.rope\.freq_base' is a float, expected an integer"):
        model.per_layer("rope.freq_base", 4)


def test_overrides(tmp_path: Path) -> None:
    """Expectation: --override-kv replaces or adds scalars of the kind that the file has."""
    kvs = [craft.ARCH, craft.kv("llama.expert_used_count", craft.U32, 8), craft.kv("llama.eps", craft.F32, 1.0)]
    path = save(tmp_path, craft.model(kvs))
    model = open_gguf(
        path,
        {
            "llama.expert_used_count": 4,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.ggml.pre": "qwen2",
            "llama.eps": 0.5,
        },
    )
    assert model.arch("expert_used_count") == 4
    assert model.arch("eps", kind=float) == 0.5
    assert len(model.metadata) == 5
    assert model.raw_kv("tokenizer.") == [
        ("tokenizer.ggml.add_bos_token", craft.kv("tokenizer.ggml.add_bos_token", craft.BOOL, 0)),
        ("tokenizer.ggml.pre", craft.kv("tokenizer.ggml.pre", craft.STR, "qwen2")),
    ]
    for key, item, fault in [
        ("llama.expert_used_count", "x", "is an integer, it cannot be overridden with a string"),
        ("llama.eps", 1, "is a float, it cannot be overridden with an integer"),
        ("general.alignment", 64, "'general.alignment' cannot be overridden"),
        ("split.count", 1, "'split.count' cannot be overridden"),
        ("llama.eps", 1e39, "does not fit in a 32-bit float"),
        ("llama.expert_used_count", 1 << 63, "does not fit in 64 bits"),
    ]:
        with pytest.raises(GGUFError, match=fault):
            open_gguf(path, {key: item})


def test_raw_records_are_the_files_bytes(tmp_path: Path) -> None:
    """Expectation: the packed records, in file order."""
    kvs = [
        craft.kv_array("tokenizer.ggml.tokens", craft.STR, ["a", "b"]),
        craft.ARCH,
        craft.kv("tokenizer.chat_template", craft.STR, "{{ x }}"),
        craft.kv_array("tokenizer.ggml.scores", craft.F32, [0.0, -1.0]),
    ]
    model = open_gguf(save(tmp_path, craft.model(kvs)))
    assert [record for _, record in model.raw_kv("tokenizer.")] == [kvs[0], kvs[2], kvs[3]]
    assert b"".join(record for _, record in model.raw_kv("")) == b"".join(kvs)


def test_tensor_info_and_views(tmp_path: Path) -> None:
    """Expectation: ggml's layout: ne fastest first, rows of whole blocks; views stay valid after close."""
    data = bytes(range(144)) * 4 + b"\0" * 32
    tensors = [craft.tensor("w", [256, 2, 2], 12), craft.tensor("scalar", [], 0, 4 * 144)]
    path = save(tmp_path, craft.model([craft.ARCH], tensors, data))
    model = open_gguf(path)
    w = model.tensors["w"]
    assert (w.type, w.shape, w.ne, w.nbytes, w.row_bytes, w.n_elements) == (
        TensorType.Q4_K,
        (256, 2, 2),
        (256, 2, 2, 1),
        576,
        144,
        1024,
    )
    assert model.tensors["scalar"].ne == (1, 1, 1, 1)
    view = model.data("w")
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    model.close()
    del model
    gc.collect()
    assert view.tobytes() == data[:576]


def test_gaps_order_and_trailing_bytes_are_accepted(tmp_path: Path) -> None:
    """Expectation: the specification asks for aligned, disjoint data only; other tools append or reorder."""
    tensors = [craft.tensor("b", [2], 0, 128), craft.tensor("a", [2], 0, 0)]
    data = np.arange(2, dtype="<f4").tobytes() + b"\0" * 120 + np.arange(5, 7, dtype="<f4").tobytes()
    model = open_gguf(save(tmp_path, craft.model([], tensors, data + b"trailing GGUF words")))
    assert model.data("a").view("<f4").tolist() == [0.0, 1.0]
    assert model.data("b").view("<f4").tolist() == [5.0, 6.0]


def test_a_path_needs_no_suffix(tmp_path: Path) -> None:
    """Expectation: blobs of a model store are named by their digest."""
    path = save(tmp_path, craft.model([craft.ARCH]), "sha256-0123")
    assert open_gguf(str(path)).architecture == "llama"
