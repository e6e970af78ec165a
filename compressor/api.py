"""The Python API: the machinery of the command line for models and data that are in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import CompressError, StoreError, UsageError, WorkerError
from compressor.options import Options
from compressor.report import Report
from compressor.store import claim

if TYPE_CHECKING:
    import numpy as np
    import torch

    Arrays = np.ndarray | Mapping[str, np.ndarray] | Sequence[np.ndarray]
    Data = str | Path | Arrays | Iterable[Any]

__all__ = ["compress"]


def compress(
    model: str | Path | torch.nn.Module,
    target: str | Sequence[str] = "int8",
    *,
    data: Data | None = None,
    calib_data: Data | None = None,
    eval_data: Data | None = None,
    example_inputs: Sequence[torch.Tensor] | Mapping[str, torch.Tensor] | torch.Tensor | None = None,
    out: str | Path = "compressed",
    **options: Any,
) -> Report:
    """Compress `model` for one or more targets and prove the engines.

    `model` is a file that the command line takes, or an `nn.Module` with `example_inputs` (a tensor, a
    tuple of tensors, or tensors by name; the first axis of each is the batch). `data` is a source that
    the command line takes, or arrays: `x`, `(x, labels)`, `{"input name": array, "y": labels}`, or an
    iterable of such batches (a `DataLoader`). Other `options` are those of `compressor.options.Options`,
    for example `max_drop=0.5` or `bench=0`.

    Everything is written below `out` (a folder, or `NAME.onnx` for one engine). Returns the report, whose
    `exit_status` is 3 where the accuracy budget is broken. Raises `CompressError`.
    """
    known = {field.name for field in fields(Options)}
    unknown = set(options) - known
    if unknown:
        raise UsageError(f"unknown option '{sorted(unknown)[0]}'; known are {', '.join(sorted(known))}")
    targets = (target,) if isinstance(target, str) else tuple(target)
    base = Options(model="", target=targets, out=str(out), **_texts(options))
    sources = {"data": data, "calib_data": calib_data, "eval_data": eval_data}
    undo = claim(base.folder)
    try:
        return _run(base, model, example_inputs, sources)
    except (WorkerError, StoreError):
        raise  # what is finished serves the next try
    except CompressError:
        undo()
        raise


def _run(base: Options, model: Any, example_inputs: Any, sources: dict[str, Any]) -> Report:
    """Write what is in memory to files, then run as the command line does."""
    from compressor import pipeline

    inputs = base.folder / "inputs"
    files = {name: _source(value, inputs / f"{name}.npz") for name, value in sources.items()}
    return pipeline.run(replace(base, model=_path(model, example_inputs, inputs), **files))  # type: ignore[arg-type]


def _texts(options: dict[str, Any]) -> dict[str, Any]:
    """Paths as texts, and one text where a tuple of texts is wanted."""
    values = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    if isinstance(values.get("input"), str):
        values["input"] = (values["input"],)
    return values


def _path(model: Any, example_inputs: Any, folder: Path) -> str:
    if isinstance(model, str | Path):
        return str(model)
    if not hasattr(model, "state_dict"):
        raise UsageError(f"model is a {type(model).__name__}; give a path or a torch.nn.Module")
    if example_inputs is None:
        raise UsageError(
            "an nn.Module needs example_inputs=: a tensor, a tuple of tensors, or tensors by name"
        )
    from compressor.torch_graph import export_module

    examples = (example_inputs,) if hasattr(example_inputs, "shape") else example_inputs
    folder.mkdir(parents=True, exist_ok=True)
    return str(export_module(model, examples, folder).path)


def _source(data: Any, file: Path) -> str | None:
    """A source in the command line's form; arrays are written to `file`."""
    if data is None or isinstance(data, str | Path):
        return None if data is None else str(data)
    import numpy as np

    arrays = _arrays(data)
    if arrays is None:
        batches = [_arrays(batch) for batch in data]
        if not batches or any(batch is None for batch in batches):
            raise UsageError(
                "data: no batches, or batches that are neither arrays nor (x, labels) nor a mapping"
            )
        try:
            arrays = {
                name: np.concatenate([batch[name] for batch in batches if batch]) for name in batches[0] or {}
            }
        except (ValueError, KeyError) as error:
            raise UsageError(
                f"data: the batches do not fit each other ({error}); use 'module:callable'"
            ) from error
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return str(file)


def _arrays(data: Any) -> dict[str, np.ndarray] | None:
    """Arrays by name, or None if `data` is something to iterate over."""
    import numpy as np

    if isinstance(data, Mapping):
        return {str(name): np.asarray(value) for name, value in data.items()}
    if hasattr(data, "__array__"):
        return {"x": np.asarray(data)}
    if isinstance(data, tuple) and 0 < len(data) <= 2 and all(hasattr(part, "__array__") for part in data):
        return dict(zip(("x", "y"), (np.asarray(part) for part in data), strict=False))
    return None
