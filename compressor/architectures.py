"""Networks by name: `--arch module:callable(literals)`, and the known ones that a set of weights fits."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor import user_code
from compressor.errors import UsageError
from compressor.state_dicts import fitted

if TYPE_CHECKING:
    import torch

__all__ = ["build", "call", "fitting", "importable", "preprocess"]

_VARIANTS = {
    "googlenet": ("init_weights=False, aux_logits=False, ", "init_weights=False, aux_logits=True, "),
    "inception": ("init_weights=False, aux_logits=True, ", "init_weights=False, aux_logits=False, "),
    "fcn": ("weights_backbone=None, aux_loss=True, ", "weights_backbone=None, aux_loss=False, "),
    "deeplabv3": ("weights_backbone=None, aux_loss=True, ", "weights_backbone=None, aux_loss=False, "),
    "lraspp": ("weights_backbone=None, ",),
}
"""Arguments that change which weights a torchvision network has, or keep it from downloading."""

_FILLING = {
    *("normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_", "xavier_uniform_"),
    *("constant_", "ones_", "zeros_", "fill_", "zero_", "clamp_", "mul_", "add_", "erfinv_"),
}
"""Functions that give a parameter its first values: there is no storage for them."""
_FORM = "module:callable, module:callable(literal arguments) or file.py:callable"


def build(text: str) -> torch.nn.Module:
    """The network of `--arch`; its arguments are read as literals, never evaluated.

    The module is looked up among the installed packages, then in the working directory. Raises
    `UsageError` for a form, module or name that does not exist, or a callable that fails.
    """
    import torch

    target, args, kwargs = call(text)
    module, _, names = target.partition(":")
    with importable():
        found: Any = _module(module, text)
        for name in names.split("."):
            if not hasattr(found, name):
                raise UsageError(f"--arch '{text}': there is no '{name}' in {module}")
            found = getattr(found, name)
        try:
            network = found(*args, **kwargs)
        except Exception as error:  # whatever the user's code raises
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise UsageError(f"--arch '{text}' failed: {reason}") from error
    if not isinstance(network, torch.nn.Module):
        raise UsageError(f"--arch '{text}' gave a {type(network).__name__}, not a torch.nn.Module")
    return network


def call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Split `module:callable(arguments)` into its target and its literal arguments."""
    module, colon, expression = text.strip().rpartition(":") if "(" not in text else _before_arguments(text)
    try:
        tree = ast.parse(expression, mode="eval").body
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        if isinstance(tree, ast.Call):
            args = [ast.literal_eval(each) for each in tree.args]
            kwargs = {str(each.arg): ast.literal_eval(each.value) for each in tree.keywords if each.arg}
            tree = tree.func
        name = ast.unparse(tree)
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"--arch '{text}' is not of the form {_FORM}") from error
    if not (colon and module and all(part.isidentifier() for part in name.split("."))):
        raise UsageError(f"--arch '{text}' is not of the form {_FORM}")
    return f"{module}:{name}", args, kwargs


@contextmanager
def importable() -> Iterator[None]:
    """Let modules of the working directory be imported, after the installed ones."""
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.append(here)
    try:
        yield
    finally:
        if added:
            sys.path.remove(here)


def fitting(weights: Mapping[str, torch.Tensor]) -> list[str]:
    """The known architectures (`torchvision.models:NAME(num_classes=N)`) whose keys and shapes all fit.

    Known are torchvision's networks for classification, segmentation and video, and timm's if it is
    installed. They are built without storage, and only those whose outermost names occur in the file.
    """
    for families in (
        _torchvision_families("models"),
        _torchvision_families("segmentation", "video"),
        _timm_families(),
    ):
        found = [text for text in _candidates(weights, families) if _fits(weights, text)]
        if found:
            return found
    return []


def preprocess(text: str, file_name: str = "") -> dict[str, Any] | None:
    """What a known architecture asks of an image: resize, crop (pixels), mean, std, interpolation.

    torchvision has several sets of weights for a network; the one that `file_name` names counts, else the
    first that was published.
    """
    target, _, _ = call(text)
    module, _, name = target.partition(":")
    if module.startswith("torchvision.models"):
        return _torchvision_preprocess(name, file_name)
    if module == "timm" and name == "create_model":
        return _timm_preprocess(text)
    return None


def _before_arguments(text: str) -> tuple[str, str, str]:
    head, _, arguments = text.strip().partition("(")
    module, colon, name = head.rpartition(":")
    return module, colon, f"{name}({arguments}"


def _module(name: str, text: str) -> Any:
    try:
        if user_code.is_file_name(name):
            return user_code.module_of_file(Path(name))
        return importlib.import_module(name)
    except UsageError as error:
        raise UsageError(f"--arch '{_short(text)}': {error}") from error
    except (ImportError, TypeError) as error:  # TypeError: a relative name
        raise UsageError(
            f"--arch '{_short(text)}': cannot import '{_short(name)}' from the installed packages or "
            f"{Path.cwd()} ({_short(str(error))})"
        ) from error
    except Exception as error:  # whatever the user's module raises
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UsageError(f"--arch '{_short(text)}': {name} fails to import: {reason}") from error


def _short(text: str) -> str:
    return " ".join(text.split())[:300]


def _fits(weights: Mapping[str, torch.Tensor], text: str) -> bool:
    network = _sketch(text)
    expected = {key: tuple(value.shape) for key, value in network.state_dict().items()} if network else {}
    return bool(expected) and not any(fitted(weights, expected)[1:])


def _torchvision_families(*kinds: str) -> dict[str, list[str]]:
    """Calls of `--arch` form, complete but for the number of classes, by the module of the networks."""
    import torchvision

    families: dict[str, list[str]] = {}
    for kind in (getattr(torchvision.models, name, torchvision.models) for name in kinds):
        for name in torchvision.models.list_models(module=kind):
            home = torchvision.models.get_model_builder(name).__module__
            extras = _VARIANTS.get(home.rpartition(".")[2], ("",))
            families.setdefault(home, []).extend(f"{kind.__name__}:{name}({extra}" for extra in extras)
    return families


def _timm_families() -> dict[str, list[str]]:
    if not importlib.util.find_spec("timm"):
        return {}
    import timm

    return {
        home: [f"timm:create_model('{name}', " for name in timm.list_models(module=home)]
        for home in timm.list_modules()
    }


def _candidates(weights: Mapping[str, torch.Tensor], families: Mapping[str, list[str]]) -> Iterator[str]:
    """Complete calls for the families whose outermost names mostly occur in the file."""
    parts = {part for key in weights for part in key.split(".")[:4]}
    for calls in families.values():
        network = _sketch(f"{calls[0]}num_classes=2)")
        shapes = {key: value.shape for key, value in network.state_dict().items()} if network else {}
        tops = {key.partition(".")[0] for key in shapes}
        if tops and 2 * len(tops & parts) >= len(tops):
            heads = tuple(key for key, shape in shapes.items() if shape[:1] == (2,))
            classes = [
                value.shape[0] for key, value in weights.items() if key.endswith(heads) and value.dim()
            ]
            yield from (f"{text}num_classes={classes[0]})" for text in calls if classes)


def _sketch(text: str) -> torch.nn.Module | None:
    """The network without storage for its weights; None if it cannot be built so."""
    import warnings

    import torch
    from torch.overrides import TorchFunctionMode

    class OnMeta(TorchFunctionMode):
        """Only the storage of parameters, and no initial values: some constructors calculate with others."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func in (torch.empty, torch.zeros, torch.ones):
                kwargs["device"] = "meta"
            filled = args[0] if args else kwargs.get("tensor")
            if getattr(func, "__name__", "") in _FILLING and getattr(filled, "is_meta", False):
                return filled
            return func(*args, **kwargs)

    target, args, kwargs = call(text)
    module, _, name = target.partition(":")
    try:
        with OnMeta(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            network: torch.nn.Module = getattr(importlib.import_module(module), name)(*args, **kwargs)
    except Exception:  # constructors refuse a number of classes or the meta device each in its own way
        return None
    return network


def _torchvision_preprocess(name: str, file_name: str) -> dict[str, Any] | None:
    import torchvision

    if name not in torchvision.models.list_models():
        return None
    sets = list(torchvision.models.get_model_weights(name))
    named = [each for each in sets if Path(file_name).stem and Path(file_name).stem in each.url]
    if not sets:
        return None
    asked = (named or sets)[0].transforms()
    if not hasattr(asked, "crop_size"):
        return None
    return {
        "resize": asked.resize_size[0],
        "crop": asked.crop_size[0],
        "mean": list(asked.mean),
        "std": list(asked.std),
        "interpolation": asked.interpolation.value,
    }


def _timm_preprocess(text: str) -> dict[str, Any] | None:
    network = _sketch(text)
    asked = getattr(network, "pretrained_cfg", None)
    if not asked:
        return None
    crop = asked["input_size"][-1]
    return {
        "resize": int(crop / asked.get("crop_pct", 1.0)),
        "crop": crop,
        "mean": list(asked["mean"]),
        "std": list(asked["std"]),
        "interpolation": asked.get("interpolation", "bilinear"),
    }
