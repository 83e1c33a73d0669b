"""`make` without a package index: what failed and what to do, in place of pip's page of retries."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("make") is None, reason="needs make"),
]


def test_a_dead_index_is_named_with_the_cure(tmp_path: Path) -> None:
    """Nothing listens on the index's port; nothing of the checkout is touched, the environment is in tmp_path."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PIP_") and "proxy" not in key.lower()}
    env |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_NO_CACHE_DIR": "1", "PIP_CONFIG_FILE": os.devnull}
    command = ["make", "install", f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("make: ")]
    assert said[0].startswith("make: the build tools could not be fetched: pip does not reach its package index.")
    assert "PIP_INDEX_URL" in said[1]
    assert "pip.log" in said[2]
    assert "Retry(" not in done.stderr
    assert "Retry(" in (tmp_path / "venv" / "pip.log").read_text()


def test_another_failure_shows_pips_last_words(tmp_path: Path) -> None:
    """An index that answers and does not have it: an empty folder of links."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    command = ["make", "install", f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode != 0
    assert "No matching distribution found" in done.stderr
    assert "make: the build tools could not be installed; the reason is above." in done.stderr
