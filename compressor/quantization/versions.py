"""Opset and IR version of a model: old ones are converted, new ones are left, none is raised without need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from compressor.errors import UnsupportedError
from compressor.quantization.view import without_data

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["upgrade"]

_LEAST_OPSET = 13  # the first whose DequantizeLinear has one scale per channel
_NEWEST_IR = 13  # the newest that onnxruntime 1.31 loads; onnx 1.23 writes 14 by default
_LEAST_IR = 7


def upgrade(model: ModelProto, path: Path) -> None:
    """Bring the default opset to 13 or more by converting the nodes, and the IR version into 7..13."""
    from onnx import helper, inliner

    if model.functions:
        model.CopyFrom(inliner.inline_local_functions(model))
    model.ir_version = max(model.ir_version, _LEAST_IR)
    opset = next((item.version for item in model.opset_import if item.domain in ("", "ai.onnx")), None)
    if opset is not None and opset < _LEAST_OPSET:
        _convert(model, path, opset)
    needed = helper.find_min_ir_version_for(
        [item for item in model.opset_import if item.domain in ("", "ai.onnx")], ignore_unknown=True
    )
    model.ir_version = min(max(model.ir_version, needed), _NEWEST_IR)


def _convert(model: ModelProto, path: Path, opset: int) -> None:
    """Convert nodes in place; large data stays out of the converter, which copies and cannot exceed 2 GB."""
    from onnx import version_converter

    try:
        new = version_converter.convert_version(without_data(model), _LEAST_OPSET)
    except (version_converter.ConvertError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise UnsupportedError(
            f"{path} has opset {opset}, which cannot be converted to {_LEAST_OPSET} ({reason}); "
            "export the model again with a newer opset"
        ) from error
    data = {item.name: item for item in model.graph.initializer}
    for item in new.graph.initializer:
        if item.name in data:
            item.CopyFrom(data[item.name])
    domains = {item.domain for item in new.opset_import}
    new.opset_import.extend(item for item in model.opset_import if item.domain not in domains)
    model.graph.CopyFrom(new.graph)
    del model.opset_import[:]
    model.opset_import.extend(new.opset_import)
