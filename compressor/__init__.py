"""Trained models in, proven engines out.

from compressor import compress, load_engine

report = compress("model.onnx", target="int8:onnx", data="samples.npz", max_drop=0.5)
session = load_engine(report.engine("int8"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressor.api import compress as compress
    from compressor.errors import CompressError as CompressError
    from compressor.report import Report as Report
    from compressor.target import Target as Target
    from serving import load_engine as load_engine

__all__ = ["CompressError", "Report", "Target", "compress", "load_engine"]

_HOMES = {
    "CompressError": "compressor.errors",
    "Report": "compressor.report",
    "Target": "compressor.target",
    "compress": "compressor.api",
    "load_engine": "serving",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import compressor` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'compressor' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
