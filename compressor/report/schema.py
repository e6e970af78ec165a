"""What report.json holds, version 1, written down as types; `validate` holds data to them.

Keys may be added; readers ignore what they do not know. What was not measured is null, with the
reason in `notes`. Times are in the unit their name ends in, sizes in bytes, SQNR in dB
(200: no difference at all).
"""

from __future__ import annotations

import math
import types
from typing import (
    Any,
    Literal,
    NotRequired,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

__all__ = ["VERSION", "ReportData", "validate"]

VERSION = 1


class Interval(TypedDict):
    """An estimate with its 95 % interval (null: no interval is known)."""

    value: float
    low: float | None
    high: float | None


class Drop(Interval):
    """How much worse than the float engine, in units of the metric (points for a metric in percent).

    Positive is worse, whether the metric is better high or low. `verdict` is null without a budget. `reason`
    says why there are no bounds, where it is not that samples are few.
    """

    verdict: Literal["kept", "broken", "undecided"] | None
    reason: NotRequired[str | None]


class Agreement(TypedDict):
    """Against the float engine's outputs. `top1` is a share from 0 to 1, null where there are no classes."""

    top1: float | None
    sqnr_db: float | None


class Speed(Interval):
    """A ratio of speeds, with what its measurer claims (left out: the interval against 1 ± 2 % decides)."""

    verdict: NotRequired[Literal["faster", "slower", "same", "undecided"]]
    reason: NotRequired[str | None]


class Latency(TypedDict):
    """Time per call of `batch` samples.

    A percentile is null where too few calls were timed to claim it. `ratio_to_baseline` is speed: above 1
    is faster than the float engine on the same runtime; null for the baseline itself. `aa_noise` is the
    same ratio for the float engine against itself: the noise floor.
    """

    batch: int
    threads: int
    p50_ms: float
    p90_ms: float | None
    p99_ms: float | None
    ratio_to_baseline: Speed | None
    aa_noise: Interval | None


class Island(TypedDict):
    """A part of the network that runs in float; `share` of the engine's compute, from 0 to 1."""

    name: str
    op: str
    share: float | None
    reason: str


class Precision(TypedDict):
    """What the runtime really executes: `share_int8` of the compute, from 0 to 1 (null: it has none)."""

    share_int8: float | None
    float_islands: list[Island]


class SimulationGap(TypedDict):
    """The engine against the float simulation of its own Q/DQ pairs: the error of the kernels alone.

    `lost_db`: by how much the simulation is nearer to the float engine than the engine is.
    """

    sqnr_db: float | None
    lost_db: NotRequired[float | None]


class Saturated(TypedDict):
    """The network with the sums of x86 kernels without VNNI, which saturate, over `samples` samples.

    SQNR of the outputs, and the share of samples with the float engine's class, without and with it;
    `outputs` is the share of the values of the layers in question that are wrong.
    """

    samples: int
    sqnr_db: float
    saturated_sqnr_db: float
    top1: float | None
    saturated_top1: float | None
    outputs: float


class Portable(TypedDict):
    """An int8 engine for x86 on the other kind of processor.

    `layers` of `of` integer layers could overflow without VNNI; `proven`: none can, whatever the input.
    `cost_db` and `worst_db`: by how much that raises the error of rounded weights, mean and largest of the
    layers.
    """

    scheme: str
    without: str
    layers: int
    of: int
    proven: bool
    measured: Saturated | None
    cost_db: NotRequired[float]
    worst_db: NotRequired[float]


class Engine(TypedDict):
    """One engine file and all that was measured on it.

    `made_for` names the runtime and processor that it is made for, if those are not the ones here.
    """

    target: str
    role: Literal["baseline", "candidate"]
    path: str
    sha256: str
    size_bytes: int
    metric: Interval | None
    drop: Drop | None
    agreement: Agreement | None
    latency: Latency | None
    cpu_ms: float | None
    peak_rss_bytes: int | None
    precision: Precision | None
    simulation_gap: SimulationGap | None
    portable: NotRequired[Portable | None]
    made_for: NotRequired[str | None]
    recommended: bool


class Rung(TypedDict):
    """One attempt to keep the budget; `kept` is the one that the engine was made from."""

    target: str
    name: str
    what: str
    metric: Interval | float | None
    drop: Interval | float | None
    sqnr_db: float | None
    seconds: float
    kept: bool


class Skipped(TypedDict):
    """A target that was not made."""

    target: str
    reason: str


class Layer(TypedDict):
    """Error of one layer's output, quantized against float; listed by depth.

    `own_sqnr_db` is that of the layer alone, with float inputs, and `split` the share of each cause in it.
    """

    name: str
    op: str
    sqnr_db: float | None
    own_sqnr_db: NotRequired[float | None]
    split: NotRequired[dict[str, float] | None]


class Step(TypedDict):
    """What one step of the run did (`what`) and cost; `reused` came from an earlier run."""

    name: str
    what: NotRequired[str]
    seconds: float
    cpu_seconds: float | None
    peak_rss_bytes: int | None
    reused: bool


class ModelFacts(TypedDict):
    """The file that came in."""

    path: str
    sha256: str
    parameters: int | None


class Samples(TypedDict):
    """A set of samples. `preprocess_from`: "--preprocess", "architecture" or "default"."""

    n: int
    sha256: str
    preprocess: NotRequired[dict[str, Any] | None]
    preprocess_from: NotRequired[str | None]


class DataFacts(TypedDict):
    """What calibrated and what judged; `disjoint`: no sample is in both."""

    calibration: Samples | None
    evaluation: Samples | None
    disjoint: NotRequired[bool]


class Metric(TypedDict):
    """What accuracy means here. `unit` is "%" or ""; it is known for top1, top5 and accuracy."""

    name: str
    higher_is_better: bool
    unit: NotRequired[str]


class Line(TypedDict):
    """The verdict on one candidate, as a sentence."""

    target: str
    text: str


class ReportData(TypedDict):
    """The whole of report.json; `options` are those that took effect."""

    version: int
    created: str
    seed: int
    command: list[str]
    machine: dict[str, Any]
    model: ModelFacts
    data: DataFacts
    metric: Metric | None
    max_drop: float | None
    options: NotRequired[dict[str, Any]]
    engines: list[Engine]
    rungs: list[Rung]
    skipped: list[Skipped]
    layers: dict[str, list[Layer]]
    steps: list[Step]
    headline: str
    verdict: list[Line]
    notes: list[str]


def validate(data: dict[str, Any]) -> None:
    """Check that `data` is a report of this version; raises `ValueError` with the path of what is wrong."""
    version = data.get("version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise ValueError(f"version: is {version}; this release reads up to {VERSION}")
    _check(data, ReportData, "")
    if version != VERSION:
        raise ValueError(f"version: is {version}, not {VERSION}")
    _check_engines(data["engines"])


def _check(value: Any, kind: Any, path: str) -> None:
    origin = get_origin(kind)
    if is_typeddict(kind):
        _check_mapping(value, kind, path)
    elif origin in (types.UnionType, Union):
        _check_union(value, get_args(kind), path)
    elif origin is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{path}: is {value!r}, not one of {', '.join(map(repr, get_args(kind)))}")
    elif origin is list:
        _expect(value, list, path)
        for index, item in enumerate(value):
            _check(item, get_args(kind)[0], f"{path}[{index}]")
    elif origin is dict:
        _expect(value, dict, path)
        for key, item in value.items():
            _expect(key, str, f"{path}[{key!r}]")
            _check(item, get_args(kind)[1], f"{path}.{key}")
    else:
        _check_plain(value, kind, path)


def _check_mapping(value: Any, kind: Any, path: str) -> None:
    _expect(value, dict, path or "report")
    for key, hint in get_type_hints(kind, include_extras=True).items():
        optional = get_origin(hint) is NotRequired
        if key in value:
            _check(value[key], get_args(hint)[0] if optional else hint, f"{path}.{key}".lstrip("."))
        elif not optional:
            raise ValueError(f"{path}.{key}: is missing".lstrip("."))
    low, high = value.get("low"), value.get("high")
    if issubclass(kind, dict) and low is not None and high is not None and low > high:
        raise ValueError(f"{path}: low {low} is above high {high}")


def _check_union(value: Any, kinds: tuple[Any, ...], path: str) -> None:
    """The alternative that fits the value's outer form is the one that speaks about what is wrong."""
    if value is None and type(None) in kinds:
        return
    plain = [kind for kind in kinds if kind is not type(None)]
    mappings = [kind for kind in plain if is_typeddict(kind)]
    _check(value, mappings[0] if mappings and isinstance(value, dict) else plain[-1], path)


def _check_plain(value: Any, kind: Any, path: str) -> None:
    if kind is Any:
        _check_json(value, path)
    elif kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{path}: is {_named(value)}, not a number")
        if not math.isfinite(value):
            raise ValueError(f"{path}: is {value}, not a finite number")
    else:
        _expect(value, kind, path)


def _check_json(value: Any, path: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _check_json(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json(item, f"{path}[{index}]")
    elif isinstance(value, float):
        _check_plain(value, float, path)
    elif not (value is None or isinstance(value, str | int)):
        raise ValueError(f"{path}: is {_named(value)}, which JSON has no form for")


def _expect(value: Any, kind: type, path: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = {
            dict: "an object",
            list: "a list",
            str: "a text",
            int: "a whole number",
            bool: "true or false",
        }
        raise ValueError(f"{path}: is {_named(value)}, not {names.get(kind, kind.__name__)}")


def _named(value: Any) -> str:
    return "null" if value is None else f"{value!r:.60} ({type(value).__name__})"


def _check_engines(engines: list[dict[str, Any]]) -> None:
    seen: set[str] = set()
    for index, engine in enumerate(engines):
        path = f"engines[{index}]"
        if engine["target"] in seen:
            raise ValueError(f"{path}.target: '{engine['target']}' is there twice")
        seen.add(engine["target"])
        _check_measurements(engine, path)
    if sum(engine["recommended"] for engine in engines) > 1:
        raise ValueError("engines: more than one is recommended")


def _check_measurements(engine: dict[str, Any], path: str) -> None:
    latency = engine["latency"]
    times = [latency[key] for key in ("p50_ms", "p90_ms", "p99_ms")] if latency else []
    known = [time for time in times if time is not None]
    if known != sorted(known) or min(known, default=1) <= 0:
        raise ValueError(f"{path}.latency: 0 < p50_ms <= p90_ms <= p99_ms does not hold")
    ratio = latency and latency["ratio_to_baseline"]
    if ratio and min(ratio["value"], ratio["low"] or ratio["value"]) <= 0:
        raise ValueError(f"{path}.latency.ratio_to_baseline: a ratio of speeds is above 0")
    shares = {"precision": "share_int8", "agreement": "top1"}
    for part, key in shares.items():
        share = engine[part] and engine[part][key]
        if share is not None and not 0 <= share <= 1:
            raise ValueError(f"{path}.{part}.{key}: is {share}, not a share from 0 to 1")
