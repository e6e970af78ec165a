"""Fixtures that all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real models and data; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("MODELPRESS_SHARED", Path(__file__).parents[2] / "shared"))
    if not (folder / "assets").is_dir():
        pytest.skip(f"no real models in {folder} (set MODELPRESS_SHARED)")
    return folder
