"""From weights to a model: the network comes from `--arch`, or is the one known network that they fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from compressor import architectures, events
from compressor.errors import ModelFileError
from compressor.model import Model, TensorSpec
from compressor.state_dicts import load_into
from compressor.store import file_digest
from compressor.torch_graph import Origin, export

if TYPE_CHECKING:
    import torch

__all__ = ["Options", "export_loaded", "load_weights"]


class Options(Protocol):
    """The part of `LoadOptions` that is needed here."""

    @property
    def architecture(self) -> str | None: ...
    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def samples(self) -> tuple[TensorSpec, ...]: ...


def load_weights(
    weights: Mapping[str, torch.Tensor], path: Path, options: Options, folder: Path, kind: str
) -> Model:
    """Build the network, load `weights` strictly and write it as `folder/model.pt2`.

    Raises `ModelFileError` if no network is named and not exactly one known network fits, or if the
    weights do not fit the network.
    """
    name = options.architecture or _only_fitting(weights, path)
    network = architectures.build(name)
    try:
        load_into(network, weights)
    except ModelFileError as error:
        raise ModelFileError(f"{path} with --arch {name}: {error}") from error
    return export_loaded(network, path, options, folder, kind, name)


def export_loaded(
    network: torch.nn.Module, path: Path, options: Options, folder: Path, kind: str, architecture: str
) -> Model:
    """Write a network that has its weights as `folder/model.pt2`."""
    preprocess = architectures.preprocess(architecture, path.name) if ":" in architecture else None
    origin = Origin(kind, file_digest(path), architecture, preprocess)
    return export(network, options.inputs, options.samples, folder / "model.pt2", origin)


def _only_fitting(weights: Mapping[str, torch.Tensor], path: Path) -> str:
    found = architectures.fitting(weights)
    if len(found) == 1:
        events.warn(f"no --arch was given; the weights fit exactly one known network: {found[0]}")
        return found[0]
    known = f"several known networks fit ({', '.join(found)})" if found else "no known network fits them"
    raise ModelFileError(
        f"{path} holds weights only ({len(weights)} tensors), not the network's code, and {known}: "
        "pass --arch module:callable that builds the architecture"
    )
