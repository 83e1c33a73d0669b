"""Pulls from the fake Hub, plain addresses, and which files are meant."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from compat.registry import FakeSource, Faults, Running
from compat.registry.app import COMMIT
from ftgguf.gguf import open_gguf
from ftgguf.pull.digest import Digest
from ftgguf.pull.errors import BadAnswer, NotFound, Refused, Unauthorized, Unreachable
from ftgguf.pull.hub import pull_hub
from ftgguf.pull.names import HubName, UrlName
from ftgguf.pull.quants import choose, choose_file
from ftgguf.pull.resolve import locate
from ftgguf.pull.session import Event, Session
from ftgguf.pull.web import pull_url

pytestmark = pytest.mark.usefixtures("home")
Make = Callable[..., Session]


def gguf_bytes(folder: Path, seed: int, split: tuple[int, int] | None = None) -> bytes:
    """A small valid GGUF of a made-up architecture; `split` is (number from 0, count)."""
    path = folder / f"{seed}.gguf"
    writer = GGUFWriter(path, "llama")
    if split is not None:
        writer.add_uint16("split.no", split[0])
        writer.add_uint16("split.count", split[1])
        writer.add_int32("split.tensors.count", split[1])
    writer.add_tensor(f"t{seed}.weight", np.random.default_rng(seed).random((64, 256), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture
def files(source: FakeSource, tmp_path: Path) -> dict[str, bytes]:
    """A repository as they are: quants, a split one, a projector, a draft, an imatrix."""
    files = {
        "README.md": b"# model",
        "imatrix.gguf": gguf_bytes(tmp_path, 1),
        "model-Q4_K_M.gguf": gguf_bytes(tmp_path, 2),
        "model-Q8_0-00001-of-00002.gguf": gguf_bytes(tmp_path, 3, (0, 2)),
        "model-Q8_0-00002-of-00002.gguf": gguf_bytes(tmp_path, 4, (1, 2)),
        "UD/model-UD-Q2_K_XL.gguf": gguf_bytes(tmp_path, 5),
        "mmproj-model-F16.gguf": gguf_bytes(tmp_path, 6),
        "mtp-model-Q4_0.gguf": gguf_bytes(tmp_path, 7),
    }
    source.add_repo("some.user/model-GGUF", files)
    return files


def repo(quant: str = "", file: str = "") -> HubName:
    return HubName("some.user/model-GGUF", quant, file)


def test_default_quant(files: dict[str, bytes], session: Make, source: FakeSource) -> None:
    """Without a quant Q4_K_M, and nothing beside it; the API's addresses are llama.cpp's."""
    events: list[Event] = []
    current = session(events.append)
    entry = pull_hub(current, repo())
    path = current.store.model_path(entry)
    assert path.read_bytes() == files["model-Q4_K_M.gguf"]
    assert path.name == "model-Q4_K_M.gguf"
    assert str(entry.name) == "hf.co/some.user/model-GGUF"
    asked = {seen.path for seen in source.seen}
    assert asked == {
        "/api/models/some.user/model-GGUF/refs",
        f"/api/models/some.user/model-GGUF/tree/{COMMIT}",
        f"/some.user/model-GGUF/resolve/{COMMIT}/model-Q4_K_M.gguf",
    }
    assert any(event.status.startswith("found model-Q4_K_M.gguf, ") for event in events)
    assert current.store.config(entry).model_family == "llama"


def test_a_split_quant_opens_as_one_model(files: dict[str, bytes], session: Make) -> None:
    """All shards come, under names by which they find each other (the reader checks them)."""
    current = session()
    path = current.store.model_path(pull_hub(current, repo("q8_0")))
    with open_gguf(path) as gguf:
        assert sorted(gguf.tensors) == ["t3.weight", "t4.weight"]


def test_one_file_by_path_or_name(files: dict[str, bytes], session: Make) -> None:
    """`-hff`, and hf.co/.../file.gguf; a shard brings its siblings; projectors may be asked for."""
    current = session()
    for file in ("UD/model-UD-Q2_K_XL.gguf", "model-UD-Q2_K_XL.gguf"):
        path = current.store.model_path(pull_hub(current, repo(file=file)))
        assert path.read_bytes() == files["UD/model-UD-Q2_K_XL.gguf"]
    entry = pull_hub(current, repo(file="model-Q8_0-00002-of-00002.gguf"))
    assert len(entry.manifest.model) == 2
    pull_hub(current, repo(file="mmproj-model-F16.gguf"))


def test_choice_is_llama_cpps(files: dict[str, bytes]) -> None:
    """common/download.cpp's rules: regex `tag[.-]` on the path, case ignored, first in order; side files left out."""
    paths = ["a-UD-Q4_K_M.gguf", "b-Q4_K_M.gguf", "Q6_K/c-00001-of-00001.gguf", "mmproj-Q4_K_M.gguf", "d-Q8_0.gguf"]
    assert choose(paths, "Q4_K_M", "x") == ["a-UD-Q4_K_M.gguf"]
    assert choose(paths, "q8_0", "x") == ["d-Q8_0.gguf"]
    assert choose(["x-F16.gguf", "x-Q8_0.gguf"], "", "x") == ["x-Q8_0.gguf"]
    assert choose(["x-F16.gguf", "x-BF16.gguf"], "", "x") == ["x-F16.gguf"]
    with pytest.raises(NotFound, match=r"has no file for 'Q3_K_X'.*it has Q4_K_M, Q8_0|it has"):
        choose(paths, "Q3_K_X", "x")
    with pytest.raises(NotFound, match="no GGUF model"):
        choose(["README.md", "mmproj-F16.gguf"], "", "x")
    with pytest.raises(NotFound, match=r"lacks 1 of the 3 parts.*a-00002-of-00003.gguf"):
        choose(["a-00001-of-00003.gguf", "a-00003-of-00003.gguf"], "", "x")
    with pytest.raises(NotFound, match="has several files"):
        choose_file(["a/m.gguf", "b/m.gguf"], "m.gguf", "x")


def test_unknown_quant_lists_what_there_is(files: dict[str, bytes], session: Make, source: FakeSource) -> None:
    """No silent other choice (TheTom#79): nothing is fetched."""
    with pytest.raises(NotFound, match=r"'Q5_K_M' \(near it: Q4_K_M.*it has Q4_K_M, Q8_0, UD-Q2_K_XL"):
        pull_hub(session(), repo("Q5_K_M"))
    assert not source.requests("/resolve/")


def test_pages_of_the_tree(files: dict[str, bytes], session: Make, source: FakeSource) -> None:
    """A long list comes in pages with a Link header."""
    source.page = 2
    current = session()
    assert current.store.model_path(pull_hub(current, repo())).read_bytes() == files["model-Q4_K_M.gguf"]
    assert len(source.requests("/tree/")) > 2


def test_files_outside_lfs_are_verified_by_git(files: dict[str, bytes], session: Make, source: FakeSource) -> None:
    """Known by git's hash only; a wrong byte is found."""
    source.git_files.add("model-Q4_K_M.gguf")
    current = session()
    assert current.store.model_path(pull_hub(current, repo())).read_bytes() == files["model-Q4_K_M.gguf"]
    current.store.delete(repo())
    source.faults.flip = -1
    with pytest.raises(BadAnswer.__mro__[1], match="digest mismatch"):
        pull_hub(current, repo())


def test_gated_repositories_and_the_token(
    files: dict[str, bytes], session: Make, source: FakeSource, server: Running
) -> None:
    """401 names licence page and HF_TOKEN; the token goes to the Hub and not to where it redirects."""
    source.faults = Faults(need_bearer="hf_secret", redirect="cross")
    with pytest.raises(Unauthorized, match=r"https://huggingface.co/some.user/model-GGUF.*HF_TOKEN"):
        pull_hub(session(), repo())
    pull_hub(session(hf_token="hf_secret"), repo())
    followed = source.requests("/cdn/")
    assert followed
    assert all("authorization" not in seen.headers for seen in followed)
    with pytest.raises(Unauthorized, match="no token was given"):
        pull_hub(session(), HubName("no/such"))


def test_token_and_endpoint_from_the_environment(
    files: dict[str, bytes], session: Make, source: FakeSource, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HF_TOKEN; MODEL_ENDPOINT before HF_ENDPOINT (llama.cpp)."""
    monkeypatch.setenv("HF_TOKEN", "hf_env")
    monkeypatch.setenv("HF_ENDPOINT", "http://192.0.2.1:9")
    monkeypatch.setenv("MODEL_ENDPOINT", server.url + "/")
    source.faults.need_bearer = "hf_env"
    pull_hub(session(), repo())


def test_tokens_are_not_sent_over_plain_http(
    files: dict[str, bytes], session: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine over http gets neither token nor request."""
    monkeypatch.setenv("HF_ENDPOINT", "http://192.0.2.1:9")
    with pytest.raises(Refused, match="plain http"):
        pull_hub(session(hf_token="x"), repo())


@pytest.mark.parametrize(
    "entry",
    [
        {"path": "../../evil.gguf"},
        {"path": "/etc/evil.gguf"},
        {"path": "a\\..\\evil.gguf"},
        {"path": "a/\u0000.gguf"},
        {"path": "x.gguf", "lfs": {"oid": "../../../etc/passwd", "size": 1}},
        {"path": "x.gguf", "lfs": {"oid": "A" * 64, "size": 1}},
        {"path": "x.gguf", "lfs": {"oid": "a" * 64, "size": -5}},
        {"path": "x.gguf", "oid": "zz"},
        {"path": 7},
    ],
)
def test_hostile_trees(
    files: dict[str, bytes], session: Make, source: FakeSource, home: Path, entry: dict[str, object]
) -> None:
    """Paths and hashes that would leave the store are refused before anything is fetched."""
    source.faults.tree = json.dumps([{"type": "file", "size": 1, "oid": "a" * 40} | entry]).encode()
    with pytest.raises(BadAnswer):
        pull_hub(session(), repo())
    assert not source.requests("/resolve/")
    assert {path.name for path in home.iterdir()} <= {"store"}


def test_an_endless_tree(files: dict[str, bytes], session: Make, source: FakeSource) -> None:
    """33 MiB of JSON, and JSON nested a million deep."""
    source.faults.tree = b"[" + b'{"type":"file","path":"a.txt","oid":"' + b"a" * (33 << 20) + b'"}]'
    with pytest.raises(BadAnswer, match="more than the"):
        pull_hub(session(), repo())
    source.faults.tree = b"[" * (1 << 20)
    with pytest.raises(BadAnswer, match="cannot be read"):
        pull_hub(session(), repo())


# ------------------------------------------------------------------------------------------------- Hugging Face cache


def fill_cache(home: Path, files: dict[str, bytes]) -> Path:
    """The layout of the Hugging Face cache: blobs, a ref, relative links in a snapshot."""
    folder = home / ".cache" / "huggingface" / "hub" / "models--some.user--model-GGUF"
    (folder / "blobs").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    for path, data in files.items():
        blob = folder / "blobs" / Digest.of(data).hex
        blob.write_bytes(data)
        link = folder / "snapshots" / COMMIT / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to("../" * (path.count("/") + 2) + f"blobs/{blob.name}")
    return folder


def test_the_cache_is_used_where_it_has_the_model(
    files: dict[str, bytes], session: Make, source: FakeSource, home: Path
) -> None:
    """A quant that is there, whole, needs no network; another does, but not for its shards that are there."""
    some = {path: files[path] for path in ("model-Q4_K_M.gguf", "model-Q8_0-00001-of-00002.gguf")}
    folder = fill_cache(home, some)
    before = sorted(folder.rglob("*"))
    current = session()
    found = locate(current, repo("Q4_K_M"))
    assert found.origin == "in the Hugging Face cache"
    assert found.path.read_bytes() == files["model-Q4_K_M.gguf"]
    assert locate(current, repo()).path == found.path
    assert source.seen == []
    path = locate(current, repo("Q8_0")).path
    with open_gguf(path) as gguf:
        assert sorted(gguf.tensors) == ["t3.weight", "t4.weight"]
    assert not source.requests("00001-of-00002")
    current.store.delete(repo("Q8_0"))
    assert sorted(folder.rglob("*")) == before


def test_offline_takes_what_there_is(files: dict[str, bytes], session: Make, source: FakeSource, home: Path) -> None:
    """Offline, or without a network, a name without quant takes any quant of the cache; else it is an error."""
    from dataclasses import replace

    from compat.registry import FAST

    fill_cache(home, {"UD/model-UD-Q2_K_XL.gguf": files["UD/model-UD-Q2_K_XL.gguf"]})
    offline = session(options=replace(FAST, offline=True))
    assert locate(offline, repo()).path.name == "model-UD-Q2_K_XL.gguf"
    with pytest.raises(NotFound.__mro__[1], match="not on this disk, and --offline"):
        locate(offline, repo("Q4_K_M"))
    assert source.seen == []
    source.faults.meta_statuses = [503] * 6
    assert locate(session(), repo()).path.name == "model-UD-Q2_K_XL.gguf"
    source.faults.meta_statuses = [503] * 6
    with pytest.raises(Unreachable, match="not on this disk, and"):
        locate(session(), repo("Q4_K_M"))


# ------------------------------------------------------------------------------------------------------- plain URLs


def test_an_address(source: FakeSource, server: Running, session: Make, tmp_path: Path) -> None:
    """`-mu`: fetched once, kept under the file's name, listed and removable."""
    source.files["m-Q4_0.gguf"] = gguf_bytes(tmp_path, 9)
    name = UrlName(f"{server.url}/files/m-Q4_0.gguf")
    current = session()
    found = locate(current, name)
    assert found.path.name == "m-Q4_0.gguf"
    assert found.path.read_bytes() == source.files["m-Q4_0.gguf"]
    source.seen.clear()
    assert locate(current, name).path == found.path
    assert source.seen == []
    assert [str(entry.name) for entry in current.store.entries()] == [str(name.stored)]
    current.store.delete(name.stored)
    assert not found.path.exists()


def test_a_split_model_by_address(source: FakeSource, server: Running, session: Make, tmp_path: Path) -> None:
    """Any part's address brings all parts."""
    for no in (1, 2):
        source.files[f"m-0000{no}-of-00002.gguf"] = gguf_bytes(tmp_path, 10 + no, (no - 1, 2))
    current = session()
    entry = pull_url(current, UrlName(f"{server.url}/files/m-00002-of-00002.gguf?sig=1"))
    with open_gguf(current.store.model_path(entry)) as gguf:
        assert len(gguf.tensors) == 2


def test_an_address_of_something_else(source: FakeSource, server: Running, session: Make) -> None:
    """A login page is not a model: nothing stays in the store."""
    source.files["m.gguf"] = b"<html>" * 1000
    current = session()
    with pytest.raises(BadAnswer, match="not a usable GGUF"):
        pull_url(current, UrlName(f"{server.url}/files/m.gguf"))
    assert list((current.store.root / "blobs").iterdir()) == []
    with pytest.raises(NotFound):
        pull_url(current, UrlName(f"{server.url}/files/none.gguf"))
