"""Fronts on a scripted engine, as fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_front import Front, front


@pytest.fixture(scope="session")
def server() -> Iterator[Front]:
    with front() as running:
        yield running


@pytest.fixture
def make_front() -> Callable[..., Any]:
    return front
