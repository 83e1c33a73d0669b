"""Random small models, each made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compat.synth import make


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`synthetic(arch, types)`: a random two-layer model, made once."""
    folder = tmp_path_factory.mktemp("synthetic")

    def get(arch: str, types: str = "Q8_0", **sizes: Any) -> Path:
        name = "-".join([arch, types, *(f"{k}{v}" for k, v in sizes.items())])
        path = folder / f"{name}.gguf"
        return path if path.exists() else make(arch, path, types=types, **sizes)

    return get
