"""Accuracy on an engine's outputs, with 95 % intervals, and the paired comparison of two engines.

Proportions (top1, top5, binary, a user's boolean scores) are in percent, their drops in percent points.
Importing this package does not import numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compressor.errors import UsageError

if TYPE_CHECKING:
    from compressor.metrics._agreement import Agreement, agreement
    from compressor.metrics._compare import interval, measure, paired_drop
    from compressor.metrics._intervals import bootstrap, mcnemar, tango, wilson
    from compressor.metrics._scores import Scores, choose, evaluate

__all__ = [
    "METRICS",
    "Agreement",
    "Metric",
    "Scores",
    "agreement",
    "bootstrap",
    "check",
    "choose",
    "evaluate",
    "interval",
    "mcnemar",
    "measure",
    "paired_drop",
    "tango",
    "wilson",
]


@dataclass(frozen=True)
class Metric:
    """A metric by name. `unit` is "%" for proportions."""

    what: str
    higher_is_better: bool = True
    unit: str = ""


METRICS = {
    "top1": Metric("share of samples whose highest score is the label's", unit="%"),
    "top5": Metric("share of samples with the label among the five highest scores", unit="%"),
    "binary": Metric("share of samples on the label's side of probability 0.5", unit="%"),
    "binary-logit": Metric("share of samples on the label's side of logit 0", unit="%"),
    "mse": Metric("mean squared error", higher_is_better=False),
    "rmse": Metric("root of the mean squared error", higher_is_better=False),
    "mae": Metric("mean absolute error", higher_is_better=False),
}
_ALIASES = {"accuracy": "top1"}


def check(name: str) -> str:
    """The metric's own name for what `--metric` says; `module:callable` is taken as it is.

    Raises `UsageError` for a name that is not known.
    """
    name = _ALIASES.get(name, name)
    if name not in METRICS and ":" not in name:
        known = ", ".join([*METRICS, *_ALIASES])
        raise UsageError(f"--metric '{name}' is unknown; known are {known}, and module:callable")
    return name


_HOMES = {
    "_agreement": ("Agreement", "agreement"),
    "_compare": ("interval", "measure", "paired_drop"),
    "_intervals": ("bootstrap", "mcnemar", "tango", "wilson"),
    "_scores": ("Scores", "choose", "evaluate"),
}


def __getattr__(name: str) -> Any:
    """Import what needs numpy when it is first asked for."""
    import importlib

    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
