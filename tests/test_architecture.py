"""Who may import whom, and what each seam's plugins must have."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from compressor import plugins

ROOT = Path(__file__).parents[1]

SEAMS = {
    "loaders": {
        "DESCRIPTION": str,
        "recognise": ["path"],
        "load": ["path", "options", "folder"],
        "inspect": ["path"],
    },
    "sources": {"DESCRIPTION": str, "recognise": ["source"], "open_dataset": ["source", "options"]},
    "stages": {"VERSION": int, "FORM": str, "run": ["model", "folder"]},
    "exporters": {
        "VERSION": int,
        "FORM": str,
        "SUFFIX": str,
        "check": ["target"],
        "export": ["model", "target", "folder"],
    },
    "runtimes": {"available": [], "devices": [], "open_session": ["path"], "precision": ["path", "feeds"]},
}


def test_layers_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports"))]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in plugins.PACKAGES for name in plugins.names(kind)]
)
def test_every_plugin_keeps_its_seam(kind: str, name: str) -> None:
    module = plugins.module(kind, name)
    for attribute, wanted in SEAMS[kind].items():
        value = getattr(module, attribute)
        if isinstance(wanted, list):
            assert list(inspect.signature(value).parameters)[: len(wanted)] == wanted, attribute
        else:
            assert isinstance(value, wanted), attribute


def test_an_unknown_plugin_names_the_known_ones() -> None:
    from compressor.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match="onnx"):
        plugins.module("runtimes", "abacus")


def test_public_names_exist() -> None:
    import compressor

    assert all(getattr(compressor, name) is not None for name in compressor.__all__)
