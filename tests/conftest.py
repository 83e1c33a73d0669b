"""Models that several test areas share. All are made once a session, from the one dense model that is committed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

from compat import amx
from ftgguf.pull.upcycle import upcycle

if shutil.which("nvidia-smi") is None:
    # read when triton is first imported: kernels run on CPU tensors
    os.environ.setdefault("TRITON_INTERPRET", "1")

# a shell's background job ignores Ctrl-C, and so would the programs that tests interrupt
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

amx.avoid_if_broken()  # before any test loads libllama into this process

# `make test` says the same of a commit every time; `make test-all` and FTGGUF_HYPOTHESIS=random look for new cases
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("random", deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("FTGGUF_HYPOTHESIS", "same"))

DENSE = Path(__file__).parent / "data" / "stories260K.gguf"


@pytest.fixture(scope="session")
def stories_dense() -> Path:
    """stories260K: a trained dense `llama` model, F32, 512-token SPM vocabulary."""
    return DENSE


@pytest.fixture(scope="session")
def stories_moe(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`stories_moe(arch="llama", type=None)`: stories260K upcycled to 8 experts, top 2; same text as the dense model.

    `type` is the experts' GGUF type (`Q8_0`, `F16`, `MXFP4`, `Q4_0` ...), None keeps F32. Coarse types (MXFP4, Q4_0)
    tell another story than the dense model, since their weights are other ones.
    """
    folder = tmp_path_factory.mktemp("stories")

    def make(arch: str = "llama", type: str | None = None) -> Path:
        path = folder / f"stories260K-{arch}-8x-top2-{type or 'F32'}.gguf"
        if not path.exists():
            upcycle(DENSE, path, arch=arch, expert_type=type)
        return path

    return make
