"""The stored bandwidth profile: what `ftgguf bench bw` measured, and whether it still speaks about this machine.

One JSON file per GPU. It holds for one GPU, CPU, set of threads and kernel version; where any of these differs it is
ignored, and the reason says what differed. Without a profile the engine probes for two seconds at start.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from ftgguf.experts.samples import Bandwidths

FORMAT = 1
KERNEL_VERSION = 2
"""Raise when a CPU or gather kernel changes speed: stored profiles then no longer count."""


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile is true for. `gpu`: name and UUID; `cpu`: model name; `threads`: CPU workers; `ggml`: its version
    and variant; `kernels`: `KERNEL_VERSION`."""

    gpu: str
    cpu: str
    threads: int
    ggml: str
    kernels: int = KERNEL_VERSION


@dataclass(frozen=True, slots=True)
class TypeProfile:
    """Figures for experts of one tensor type, bytes/s of expert data, and each path's fixed seconds per use (`a` of
    a + b * bytes). `expert_bytes` is what was measured with. `cpu_entry`: seconds of a further row at an expert on the
    CPU; `gpu`: of a prompt's piece on the GPU, fixed, per byte, per row at an expert (zeros: not measured)."""

    rates: Bandwidths
    fill_fixed: float
    cpu_fixed: float
    expert_bytes: int
    cpu_entry: float = 0.0
    gpu: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Profile:
    """`types` by name (`Q4_K`, `MXFP4`; a mix as `Q4_K+Q6_K`, gate and up first); `created` ISO 8601, UTC."""

    key: ProfileKey
    created: str
    types: dict[str, TypeProfile]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A profile, or none with the reason in words for the log."""

    profile: Profile | None
    reason: str


def profile_path(folder: Path, gpu: str) -> Path:
    """The file of `gpu` in `folder`; the name is a digest, since a GPU's name may hold any character."""
    return folder / f"bandwidth-{hashlib.sha256(gpu.encode()).hexdigest()[:16]}.json"


def _check(name: str, t: TypeProfile) -> None:
    values = {**asdict(t.rates), "fill_fixed": t.fill_fixed, "cpu_fixed": t.cpu_fixed, "cpu_entry": t.cpu_entry}
    values |= dict(zip(("gpu_fixed", "gpu_byte", "gpu_entry"), t.gpu, strict=True))
    for field, value in values.items():
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise ValueError(f"type {name}: {field} is {value!r}, not a finite number from 0 on")
    if t.rates.fill + t.rates.cpu <= 0 or t.expert_bytes <= 0:
        raise ValueError(f"type {name}: no bandwidth or no expert size")
    for path in ("fill", "cpu"):
        # A path is not faster with company; 1.25 allows for noise.
        if values[f"{path}_contended"] > 1.25 * values[path]:
            raise ValueError(f"type {name}: {path} is faster while contending than alone")


def store(folder: Path, profile: Profile) -> Path:
    """Write `profile` to its file, joining types already stored under the same key; returns the path.

    The file is replaced in one step. Raises ValueError for impossible figures.
    """
    for name, t in profile.types.items():
        _check(name, t)
    path = profile_path(folder, profile.key.gpu)
    old = load(folder, profile.key).profile
    types = ({} if old is None else old.types) | profile.types
    record = {"format": FORMAT, **asdict(Profile(profile.key, profile.created, types))}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as f:
        json.dump(record, f, indent=1)
    os.replace(f.name, path)
    return path


def _parse(record: dict[str, object]) -> Profile:
    key, types = record["key"], record["types"]
    if not isinstance(key, dict) or not isinstance(types, dict):
        raise TypeError("key and types must be objects")
    parsed = {}
    for name, t in types.items():
        parsed[name] = TypeProfile(
            Bandwidths(**t["rates"]),
            float(t["fill_fixed"]),
            float(t["cpu_fixed"]),
            int(t["expert_bytes"]),
            float(t["cpu_entry"]),
            tuple(t["gpu"]),
        )
        _check(name, parsed[name])
    return Profile(ProfileKey(**key), str(record["created"]), parsed)


def load(folder: Path, key: ProfileKey) -> Loaded:
    """The stored profile for `key`, or the reason why there is none. Never raises for a bad file."""
    path = profile_path(folder, key.gpu)
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        return Loaded(None, f"no bandwidth profile for {key.gpu} ({path}): run `ftgguf bench bw`, or let it be probed")
    except (OSError, ValueError) as e:
        return Loaded(None, f"bandwidth profile {path} ignored: not readable ({e})")
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        return Loaded(None, f"bandwidth profile {path} ignored: another format than {FORMAT}")
    try:
        profile = _parse(record)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        return Loaded(None, f"bandwidth profile {path} ignored: {type(e).__name__} {e}")
    have, want = asdict(profile.key), asdict(key)
    differing = [f"{name} was {have[name]!r}, is {want[name]!r}" for name in want if have[name] != want[name]]
    if differing:
        return Loaded(None, f"bandwidth profile {path} ignored: {'; '.join(differing)}")
    return Loaded(profile, f"bandwidth profile of {profile.created} ({path})")


def for_types(profile: Profile, wanted: set[str]) -> tuple[dict[str, Bandwidths], list[str]]:
    """The bandwidths of the `wanted` types, and those the profile does not have: they must be probed."""
    known = {name: profile.types[name].rates for name in wanted if name in profile.types}
    return known, sorted(wanted - known.keys())
