"""What the tests of servers with an expert cache share: budgets for one, its status, and who has the device alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serve_helpers import CONTEXT, REAL, SIZES, Server, budget_for, locked, moe

MIB = 1 << 20
CACHE = 100 if REAL else 4
"""MiB of experts that fit, of 432 (or 9.7)."""
TOTAL = SIZES["n_layer"] * SIZES["n_expert"]
alone = pytest.mark.xdist_group("alone")
"""The test has the device to itself, among the tests of these files."""


@pytest.fixture
def not_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that needs the device for itself waits for this one, and this one for it."""
    if any(m.args == ("alone",) for m in request.node.iter_markers("xdist_group")):
        yield  # it takes the lock where it needs it
        return
    with locked("memory", alone=False):
        yield


def limits(*flags: str) -> tuple[str, ...]:
    """Flags for a server of CONTEXT cells whose budget leaves CACHE MiB for experts."""
    flags = ("-c", str(CONTEXT), "-np", "2", *flags)
    return (*flags, "--vram-budget", str(budget_for(moe(), CACHE, *flags)))


def experts(running: Server) -> dict[str, Any]:
    found: dict[str, Any] = running.get("/v1/cache/status")["experts"]
    return found
