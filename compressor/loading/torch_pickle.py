"""What torch.save writes: a state_dict, a checkpoint that holds one, or a whole pickled module."""

from __future__ import annotations

import importlib
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import ModelFileError
from compressor.model import Model
from compressor.pickles import LEGACY_MAGIC, globals_of_file

if TYPE_CHECKING:
    from compressor.loading import LoadOptions

DESCRIPTION = "PyTorch checkpoint (torch.save)"
USES: tuple[str, ...] = ("architecture", "inputs")

_MODULES = ("torch.nn.modules.", "torchvision.models.", "torchvision.ops.")
_SAFE = {
    "argparse.Namespace",
    "functools.partial",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
    "pathlib.PosixPath",
    "torch.nn.functional.relu",
    "torch.nn.functional.relu6",
    "torch.nn.functional.silu",
    "torch.nn.functional.hardswish",
    "torch._C._nn.gelu",
}
"""Besides module classes: data, and functions of tensors. None of them opens, imports or runs anything."""


def recognise(path: Path) -> bool:
    """A zip archive with a `data.pkl` and no code, or the older format's magic number."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        parts = {name.partition("/")[2] for name in names}
        return "data.pkl" in parts and not any(part.startswith("code/") for part in parts)
    with path.open("rb") as file:
        return file.read(len(LEGACY_MAGIC)) == LEGACY_MAGIC


def load(path: Path, options: LoadOptions, folder: Path) -> Model:
    """The weights in the network of `--arch` or the one that fits, or the pickled module itself.

    Nothing that the file names is imported but classes of torch and torchvision, unless
    `options.trust` is set.
    """
    import torch

    from compressor.state_dicts import find
    from compressor.torch_inputs import refuse_cycle
    from compressor.torch_weights import export_loaded, load_weights

    content = _read(path, trust=options.trust)
    module = _module_in(content)
    if module is not None:
        refuse_cycle(module)
    if module is not None and not options.architecture:
        return export_loaded(module, path, options, folder, "pickled module", type(module).__qualname__)
    try:
        weights, _ = find(module.state_dict() if isinstance(module, torch.nn.Module) else content)
    except ModelFileError as error:
        raise ModelFileError(f"{path}: {error}") from error
    return load_weights(weights, path, options, folder, "state_dict")


def inspect(path: Path) -> dict[str, Any]:
    """Tensors and fitting architectures of weights; the classes that a pickled module names."""
    from compressor.architectures import fitting
    from compressor.state_dicts import find, summary

    foreign = _foreign(globals_of_file(path))
    if foreign:
        modules = any(name.startswith("torch.nn.modules.") for name in foreign)
        return {"content": "pickled module" if modules else "pickled objects", "classes": sorted(foreign)}
    content = _read(path, trust=False, device="meta")
    weights, key = find(content)
    held = f"weights under '{key}'" if key else "weights"
    return {"content": held, **summary(weights, fitting(weights))}


def _read(path: Path, *, trust: bool, device: str = "cpu") -> Any:
    foreign = _foreign(globals_of_file(path))
    allowed = {name: found for name in foreign if (found := _harmless(name)) is not None}
    if len(allowed) < len(foreign):
        if not trust:
            raise ModelFileError(_needs_trust(path, foreign))
        return _unpickle(path, foreign)
    try:
        return _read_safely(path, allowed, device)
    except pickle.UnpicklingError as error:
        if trust:
            return _unpickle(path, foreign)
        raise ModelFileError(
            f"{path} cannot be read without running code of it ({_reason(error)}): pass --trust if you trust "
            "the file, or save its state_dict by torch.save"
        ) from error
    except (EOFError, RuntimeError, KeyError, ValueError, AttributeError, TypeError) as error:
        raise ModelFileError(f"{path} is truncated or damaged ({_reason(error)}); get it again") from error


def _read_safely(path: Path, allowed: dict[str, Any], device: str) -> Any:
    import numpy as np
    import torch

    listed: list[Any] = [(found, name) for name, found in allowed.items()]
    if any(name.startswith("numpy.") for name in allowed):
        listed += [kind for kind in vars(np.dtypes).values() if isinstance(kind, type)]
    with torch.serialization.safe_globals(listed):
        return torch.load(path, map_location=device, weights_only=True)


def _reason(error: Exception) -> str:
    """The line that tells, in what torch's safe unpickler says."""
    text = str(error).rpartition("WeightsUnpickler error:")[2]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


def _unpickle(path: Path, foreign: Iterable[str]) -> Any:
    """Full unpickling, which runs code of the file's choice: only with --trust."""
    import torch

    from compressor.architectures import importable

    script = [name for name in foreign if name.startswith("__main__.")]
    if script:
        raise ModelFileError(_from_script(path, script))
    try:
        with importable():
            return torch.load(path, map_location="cpu", weights_only=False)
    except (ImportError, AttributeError) as error:
        raise ModelFileError(
            f"{path} was pickled with classes ({', '.join(foreign)}) that cannot be imported here: {error}; "
            "run in the folder that holds the module, or install it"
        ) from error


def _foreign(names: Iterable[str]) -> list[str]:
    """The globals that torch's own safe unpickler does not know."""
    from torch._weights_only_unpickler import _get_allowed_globals

    known = _get_allowed_globals()
    return [
        name for name in names if name not in known and name.replace("__builtin__", "builtins") not in known
    ]


def _harmless(name: str) -> Any:
    """The global itself if it is a module class of torch or torchvision, or on the short list; else None."""
    import torch

    home, _, attribute = name.rpartition(".")
    if not (name in _SAFE or f"{home}.".startswith(_MODULES)):
        return None
    try:
        found = getattr(importlib.import_module(home), attribute, None)
    except ImportError:
        return None
    if name in _SAFE:
        return found
    is_module = isinstance(found, type) and issubclass(found, torch.nn.Module) and found.__module__ == home
    return found if is_module else None


def _module_in(content: Any) -> Any:
    import torch

    if isinstance(content, torch.nn.Module):
        return content
    if isinstance(content, dict):
        for key in ("model", "module", "net", "network", "ema"):
            if isinstance(content.get(key), torch.nn.Module):
                return content[key]
    return None


def _needs_trust(path: Path, foreign: list[str]) -> str:
    script = [name for name in foreign if name.startswith("__main__.")]
    if script:
        return _from_script(path, script)
    unknown = [name for name in foreign if _harmless(name) is None]
    return (
        f"{path} is a pickle that needs the code of {', '.join(unknown[:4])}: reading it runs that code, "
        "so pass --trust if you trust the file (the class must be importable here); or save its state_dict "
        "and pass --arch module:callable"
    )


def _from_script(path: Path, names: list[str]) -> str:
    name = names[0]
    return (
        f"{path} was pickled in a script as {name}: the class {name.removeprefix('__main__.')} cannot be "
        "found again; save its state_dict, and pass --arch module:callable with the class in a module"
    )
