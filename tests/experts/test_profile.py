"""The stored bandwidth profile: what is written is read, and whatever differs is ignored with a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftgguf.experts.profile import Profile, ProfileKey, TypeProfile, for_types, load, profile_path, store
from ftgguf.experts.samples import Bandwidths

KEY = ProfileKey("NVIDIA H200 GPU-1/2", "Xeon", 16, "0.9.4 sapphirerapids")
Q4 = TypeProfile(Bandwidths(50e9, 53.7e9, 49e9, 48e9), 8e-6, 12e-6, 2_850_000)
NAN = {"fill": float("nan"), "cpu": 1}
PROFILE = Profile(KEY, "2026-11-29T12:00:00Z", {"Q4_K": Q4})


def test_round_trip_and_merge(tmp_path: Path) -> None:
    """Stored and loaded equal; a second type joins the first under the same key."""
    assert store(tmp_path / "new", PROFILE) == profile_path(tmp_path / "new", KEY.gpu)
    assert load(tmp_path / "new", KEY).profile == PROFILE
    store(tmp_path / "new", replace(PROFILE, types={"MXFP4": replace(Q4, expert_bytes=13_000_000)}))
    got = load(tmp_path / "new", KEY).profile
    assert got is not None
    assert set(got.types) == {"Q4_K", "MXFP4"}
    assert for_types(got, {"Q4_K", "Q6_K"}) == ({"Q4_K": Q4.rates}, ["Q6_K"])
    assert [p.name for p in (tmp_path / "new").iterdir()] == [profile_path(tmp_path, KEY.gpu).name]


@pytest.mark.parametrize(("field", "value"), [("cpu", "EPYC"), ("threads", 8), ("ggml", "1.0"), ("kernels", 99)])
def test_other_machine_is_ignored(tmp_path: Path, field: str, value: Any) -> None:
    """Any difference in the key: no profile, and the reason names the field and both values."""
    store(tmp_path, PROFILE)
    got = load(tmp_path, replace(KEY, **{field: value}))
    assert got.profile is None
    assert f"{field} was {getattr(KEY, field)!r}, is {value!r}" in got.reason


def test_missing(tmp_path: Path) -> None:
    got = load(tmp_path, KEY)
    assert got.profile is None
    assert "no bandwidth profile" in got.reason


@pytest.mark.parametrize(
    "change",
    [
        {"format": 7},
        {"types": []},
        {"types": {"Q4_K": {"rates": {"fill": 1}}}},
        {"types": {"Q4_K": {"rates": NAN, "fill_fixed": 0, "cpu_fixed": 0, "expert_bytes": 1}}},
        {"key": {"gpu": "x"}},
    ],
)
def test_bad_files_are_ignored(tmp_path: Path, change: dict[str, object]) -> None:
    """Another format, missing fields, impossible numbers: ignored with a reason, never an exception."""
    path = store(tmp_path, PROFILE)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    got = load(tmp_path, KEY)
    assert got.profile is None
    assert "ignored" in got.reason
    path.write_text("{")
    assert "not readable" in load(tmp_path, KEY).reason


def test_impossible_figures_are_refused(tmp_path: Path) -> None:
    """A path faster in company than alone, no bandwidth at all: refused before anything is written."""
    with pytest.raises(ValueError, match="faster while contending"):
        store(tmp_path, replace(PROFILE, types={"Q4_K": replace(Q4, rates=Bandwidths(50e9, 50e9, 90e9, 10e9))}))
    with pytest.raises(ValueError, match="no bandwidth"):
        store(tmp_path, replace(PROFILE, types={"Q4_K": replace(Q4, rates=Bandwidths(0, 0))}))
    assert not list(tmp_path.iterdir())
