"""Weights without code: find them in a checkpoint, fit their keys to a network, load them strictly."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compressor import events
from compressor.errors import ModelFileError

if TYPE_CHECKING:
    import torch

__all__ = ["find", "fitted", "load_into", "summary"]

_HOLDERS = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "net",
    "network",
    "weights",
    "params",
    "module",
    "ema_state_dict",
    "state_dict_ema",
    "model_ema",
    "ema",
)
_STATISTICS = re.compile(r"(?:^|\.)running_(?:mean|var)$")
_LISTED = 20
_WRAPPERS = re.compile(r"(?:^|(?<=\.))_orig_mod\.")


def find(checkpoint: Any) -> tuple[dict[str, torch.Tensor], str]:
    """The weights in a checkpoint and the key they lie under ("" at the top).

    Averaged weights (`ema`) are taken only where there are no others. Raises `ModelFileError`.
    """
    weights = _tensors(checkpoint)
    if weights:
        return weights, ""
    if isinstance(checkpoint, Mapping):
        found = {str(key): _tensors(value) for key, value in checkpoint.items()}
        found = {key: weights for key, weights in found.items() if weights and "optim" not in key}
        order = [key for key in _HOLDERS if key in found] or (list(found) if len(found) == 1 else [])
        if order:
            if len(order) > 1:
                events.warn(
                    f"the file holds several sets of weights ({', '.join(order)}); '{order[0]}' is taken"
                )
            return found[order[0]], order[0]
        if found:
            raise ModelFileError(
                f"the file holds several sets of weights ({', '.join(found)}); save the one to use by itself"
            )
    raise ModelFileError(f"there are no weights in the file: it holds {_shown(checkpoint)}")


def load_into(module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Load `weights` with nothing missing, left over in doubt, or of another shape; else `ModelFileError`."""
    expected = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    matched, missing, shapes, extra = fitted(weights, expected)
    if missing or shapes:
        raise ModelFileError(
            f"the weights do not fit the architecture: {_differences(missing, shapes, extra)}"
        )
    if extra:
        events.warn(f"{len(extra)} tensors of the file have no place in the architecture: {_few(extra)}")
    module.load_state_dict(matched, strict=False)


def fitted(
    weights: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, torch.Tensor], list[str], list[str], list[str]]:
    """The weights under the network's own keys, with whatever prefix a wrapper put before them removed.

    Gives the matched tensors, the keys that are missing, those of another shape, and those left over. A
    missing `num_batches_tracked` counts for nothing: files older than torch 0.4.1 have none.
    """
    plain = {_WRAPPERS.sub("", key): value for key, value in weights.items()}
    best = None
    for before, after in _prefixes(plain, expected):
        keys = {key: before + key.removeprefix(after) for key in expected}
        matched = {key: plain[name] for key, name in keys.items() if name in plain}
        missing = [key for key in expected if key not in matched and not key.endswith("num_batches_tracked")]
        shapes = [
            f"{key} is {list(value.shape)}, not {list(expected[key])}"
            for key, value in matched.items()
            if tuple(value.shape) != expected[key]
        ]
        extra = sorted(set(plain) - set(keys.values()))
        if best is None or len(missing) + len(shapes) < len(best[1]) + len(best[2]):
            best = matched, missing, shapes, extra
    assert best is not None
    return best


def summary(
    weights: Mapping[str, torch.Tensor],
    architectures: Sequence[str] = (),
    parameters: Collection[str] | None = None,
) -> dict[str, Any]:
    """What `inspect` says of weights: counts, elements by dtype, networks that fit, the first tensors.

    `parameters` names the tensors that are trained. Where it is not known, all are but integers and the
    running statistics of normalization.
    """
    trained = [
        value
        for key, value in weights.items()
        if (
            value.is_floating_point() and not _STATISTICS.search(key)
            if parameters is None
            else key in parameters
        )
    ]
    count = sum(value.numel() for value in trained)
    counts: dict[str, int] = {}
    for value in weights.values():
        kind = str(value.dtype).removeprefix("torch.")
        counts[kind] = counts.get(kind, 0) + value.numel()
    floats = {kind: count for kind, count in counts.items() if "float" in kind}
    ordered = dict(sorted(floats.items(), key=lambda item: -item[1]))
    return {
        "parameters": count,
        "buffers": sum(counts.values()) - count,
        "architectures": list(architectures),
        "precision": next(iter(ordered), next(iter(counts), None)),
        "weights": ordered,
        "tensors": _listed(weights),
    }


def _listed(weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Type and shape of the first tensors, and how many more there are."""
    listed: dict[str, Any] = {
        key: [str(value.dtype).removeprefix("torch."), list(value.shape) or "scalar"]
        for key, value in list(weights.items())[:_LISTED]
    }
    if len(weights) > _LISTED:
        listed["…"] = f"and {len(weights) - _LISTED} more"
    return listed


def _tensors(value: Any) -> dict[str, torch.Tensor]:
    """`value` as a mapping of tensors, or nothing if it is anything else."""
    import torch

    if not isinstance(value, Mapping) or not value:
        return {}
    tensors = {str(key): item for key, item in value.items() if isinstance(item, torch.Tensor)}
    return tensors if 2 * len(tensors) > len(value) else {}


def _prefixes(weights: Mapping[str, Any], expected: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What may stand before the file's keys, and before the network's: pairs to try."""
    first = next(iter(expected), "")
    common = f"{first.split('.')[0]}." if "." in first else ""
    if not all(key.startswith(common) for key in expected):
        common = ""
    pairs = [("", "")]
    for after in dict.fromkeys(("", common)):
        stem = first.removeprefix(after)
        found = (key.removesuffix(stem) for key in weights if key == stem or key.endswith(f".{stem}"))
        pairs += [(before, after) for before in found]
    shared = next(iter(weights), "").split(".")[0] + "."
    if all(key.startswith(shared) for key in weights):
        pairs.append((shared, ""))
    return list(dict.fromkeys(pairs))


def _differences(missing: list[str], shapes: list[str], extra: list[str]) -> str:
    parts = []
    if missing:
        parts.append(f"{len(missing)} tensors are missing from the file ({_few(missing)})")
    if shapes:
        parts.append(f"{len(shapes)} have another shape ({_few(shapes)})")
    if extra:
        parts.append(f"{len(extra)} of the file have no place ({_few(extra)})")
    return "; ".join(parts)


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {_few([str(key) for key in value])}"
    return f"a {type(value).__name__}"
