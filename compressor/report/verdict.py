"""The rules that turn measurements into a verdict per candidate and a recommendation.

1. An engine may be recommended if its accuracy is not known to be lost. With a budget that means: its
   drop is not "broken". Without a budget: the drop's interval reaches down to 1 % of the float metric
   (the line that MLPerf Inference draws at 99 % of FP32). Without labels: at least 90 % of the
   predictions, or 10 dB of the outputs where there are no classes, agree with the float engine.
2. A candidate must also be faster than the float engine on its runtime: the interval of the speed
   ratio lies above 1.02, or the measurer of the ratio says so. A float baseline needs no such proof.
3. The fastest of these is recommended. Within a runtime the paired ratio orders them; runtimes are
   compared through the latency of their baselines. Within 2 % of the fastest, the smallest drop wins.
4. An engine that is made for another runtime or processor is not recommended: its speed here says
   nothing of its speed there.
5. A float engine is not recommended while a candidate that is accurate enough may still be faster: a
   speed that is undecided is no evidence for float.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from compressor.report.text import (
    between,
    budget,
    decibels,
    differences,
    factors,
    metric_name,
    percent,
    points,
    ratio,
)

__all__ = ["Verdicts", "judge", "speed_class", "unknown", "verdicts"]

FASTER, SLOWER = 1.02, 0.98
SHARE_INT8 = 0.9
_NONE = 0.0005  # a share that would be written as 0.0 %
TOLERATED = 0.01
_LOSS = 1.0  # dB of SQNR that kernels may lose before it is said
AGREEMENT, AGREEMENT_DB = 0.9, 10.0
# Class scores within so much of float agree on far more than 90 % (docs/benchmarks.md: 96 % at 14 dB, 90 %
# at 8 dB); outputs that do not are vectors of another kind, of which no element has to be the highest.
_VECTORS_DB = 15.0
_LONGER, _LEAST_BENCH = 3, 60  # times as long as it was, and seconds

Data = Mapping[str, Any]


class Verdicts(NamedTuple):
    """`headline` for the top of the page, `lines` per candidate, `recommended` target or None."""

    headline: str
    lines: list[dict[str, str]]
    recommended: str | None


def judge(data: dict[str, Any]) -> None:
    """Fill in `headline`, `verdict` and every engine's `recommended`, in place, from the measurements.

    The metric's `unit` is taken from the engines where `metric` itself does not name it.
    """
    units = [engine["metric"]["unit"] for engine in data["engines"] if (engine["metric"] or {}).get("unit")]
    if data["metric"] and units:
        data["metric"].setdefault("unit", units[0])
    found = verdicts(data)
    data.update(headline=found.headline, verdict=found.lines)
    for engine in data["engines"]:
        engine["recommended"] = engine["target"] == found.recommended


def verdicts(data: Data) -> Verdicts:
    """Apply the rules to report data (its `engines`, `metric`, `max_drop` and `data` are read)."""
    engines: Sequence[Data] = data["engines"]
    chosen = _recommended(data)
    lines = [
        {"target": engine["target"], "text": _line(data, engine, chosen)}
        for engine in engines
        if engine["role"] == "candidate"
    ]
    return Verdicts(_headline(data, chosen), lines, chosen["target"] if chosen else None)


def speed_class(engine: Data) -> str | None:
    """Against the float engine of its runtime: faster, slower, same, undecided; None: not compared."""
    speed = engine["latency"] and engine["latency"]["ratio_to_baseline"]
    if not speed:
        return None
    if speed.get("verdict"):
        return str(speed["verdict"])
    if speed["low"] is None or speed["high"] is None:
        return "undecided"
    if speed["low"] > FASTER:
        return "faster"
    if speed["high"] < SLOWER:
        return "slower"
    return "same" if speed["low"] >= SLOWER and speed["high"] <= FASTER else "undecided"


def _recommended(data: Data) -> Data | None:
    eligible: list[tuple[float, Data]] = [
        (time, engine)
        for engine in data["engines"]
        if (time := _sample_ms(data, engine)) is not None
        and not engine.get("made_for")
        and _accurate(data, engine)
        and (engine["role"] == "baseline" or speed_class(engine) == "faster")
    ]
    if not eligible:
        return None
    fastest = min(time for time, _ in eligible)
    near = [(_drop_value(engine), time, engine) for time, engine in eligible if time <= fastest * FASTER]
    chosen = min(near, key=lambda item: item[:2])[2]
    return None if chosen["role"] == "baseline" and _open(data, fastest) else chosen


def _open(data: Data, fastest: float) -> list[Data]:
    """Candidates of undecided speed that are accurate enough and may beat `fastest` (ms per sample)."""
    found = []
    for engine in data["engines"]:
        if engine["role"] != "candidate" or engine.get("made_for"):
            continue
        if speed_class(engine) == "undecided" and _accurate(data, engine):
            time, speed = _sample_ms(data, engine), engine["latency"]["ratio_to_baseline"]
            best = None if speed["high"] is None or time is None else time * speed["value"] / speed["high"]
            if best is None or best * FASTER < fastest:
                found.append(engine)
    return found


def _fastest_float(data: Data) -> float:
    """Milliseconds per sample of the fastest float engine; infinite where none was timed."""
    times = [_sample_ms(data, engine) for engine in data["engines"] if engine["role"] == "baseline"]
    return min((time for time in times if time is not None), default=float("inf"))


def _baseline(data: Data, engine: Data) -> dict[str, Any] | None:
    """The float engine on the same runtime and device."""
    place = engine["target"].split(":")[1:]
    for other in data["engines"]:
        if other["role"] == "baseline" and other["target"].split(":")[1:] == place:
            return dict(other)
    return None


def _sample_ms(data: Data, engine: Data) -> float | None:
    """Milliseconds per sample; a candidate's come from its baseline's and the paired ratio."""
    if not engine["latency"]:
        return None
    anchor = _baseline(data, engine)
    speed = engine["latency"]["ratio_to_baseline"]
    if speed and anchor and anchor["latency"]:
        return float(anchor["latency"]["p50_ms"] / anchor["latency"]["batch"] / speed["value"])
    return float(engine["latency"]["p50_ms"] / engine["latency"]["batch"])


def _drop_value(engine: Data) -> float:
    return float(engine["drop"]["value"]) if engine["drop"] else 0.0


def _accurate(data: Data, engine: Data) -> bool:
    return (engine["role"] == "baseline" and not engine["drop"]) or _doubt(data, engine) is None


def _doubt(data: Data, engine: Data) -> str | None:
    """Why the accuracy of an engine forbids to recommend it; None: it does not."""
    drop = engine["drop"]
    if drop and drop["verdict"]:
        return "the accuracy budget is broken" if drop["verdict"] == "broken" else None
    if drop:
        return _loss_without_budget(data, engine)
    agreement = engine["agreement"] or {"top1": None, "sqnr_db": None}
    if agreement["top1"] is not None:
        near = agreement["sqnr_db"] is not None and agreement["sqnr_db"] >= _VECTORS_DB
        if agreement["top1"] >= AGREEMENT or near:
            return None
        return f"its predictions agree with float on less than {percent(AGREEMENT)}"
    if agreement["sqnr_db"] is None:
        return "its accuracy was not measured"
    if agreement["sqnr_db"] >= AGREEMENT_DB:
        return None
    return f"its outputs are within less than {decibels(AGREEMENT_DB)} of float"


def _loss_without_budget(data: Data, engine: Data) -> str | None:
    anchor, drop = _baseline(data, engine), engine["drop"]
    reference = (anchor and anchor["metric"]) or engine["metric"]
    surely = drop["value"] if drop["low"] is None else drop["low"]
    if reference is None or surely <= TOLERATED * abs(reference["value"]):
        return None
    return "it surely loses more than 1 % of the float accuracy (no --max-drop was given)"


def _line(data: Data, engine: Data, chosen: Data | None) -> str:
    return f"{_conclusion(data, engine, chosen)} {_sentence(_facts(data, engine))}"


def _facts(data: Data, engine: Data) -> list[str]:
    """What was found of a candidate; of one made for elsewhere only what holds there, too."""
    if engine.get("made_for"):
        return [_size(data, engine), _accuracy(data, engine)]
    return [_speed(data, engine), _size(data, engine), _accuracy(data, engine), *_caveats(data, engine)]


def _sentence(facts: Sequence[str]) -> str:
    """Facts in one sentence that begins with a capital."""
    text = "; ".join(fact for fact in facts if fact)
    return f"{text[:1].upper()}{text[1:]}."


def _speed(data: Data, engine: Data) -> str:
    """Speed against the float engine of the same runtime, which is named where there are several."""
    if not engine["latency"]:
        return "latency not measured"
    speed = engine["latency"]["ratio_to_baseline"]
    if not speed:
        return "latency not compared with float"
    bounds = f" ({factors(speed)})" if factors(speed) else ""
    open_for = "; ".join(filter(None, (factors(speed), speed.get("reason"))))
    several = sum(each["role"] == "baseline" for each in data["engines"]) > 1
    anchor = _baseline(data, engine)
    other = anchor["target"] if several and anchor else "float"
    words = {
        "faster": f"{ratio(speed['value'])} the speed of {other}{bounds}",
        "slower": f"slower than {other}: {ratio(speed['value'])} its speed{bounds}",
        "same": f"as fast as {other}: {ratio(speed['value'])}{bounds}",
        "undecided": f"speed against {other} undecided: {ratio(speed['value'])}"
        + (f" ({open_for})" if open_for else ""),
    }
    return words[speed_class(engine) or "undecided"] + _noise(engine)


def _noise(engine: Data) -> str:
    """Say where the A/A control of the measurement is as wide as the effect that is claimed."""
    noise, speed = engine["latency"]["aa_noise"], engine["latency"]["ratio_to_baseline"]
    if not noise or noise["low"] is None or noise["high"] is None or speed_class(engine) == "same":
        return ""
    if noise["low"] <= speed["value"] <= noise["high"]:
        return f", within the noise of this machine (float against itself: {factors(noise)})"
    return ""


def _size(data: Data, engine: Data) -> str:
    anchor = _baseline(data, engine)
    if not anchor or not engine["size_bytes"] or not anchor["size_bytes"]:
        return ""
    times = anchor["size_bytes"] / engine["size_bytes"]
    if times >= FASTER:
        return f"{ratio(times)} smaller"
    return "no smaller" if times >= SLOWER else f"{ratio(1 / times)} larger"


def _accuracy(data: Data, engine: Data) -> str:
    drop = engine["drop"]
    if not drop:
        return f"accuracy unknown ({unknown(data, engine)}){_agreement(engine)}"
    form = differences(data["metric"])
    bounds = between(drop["low"], drop["high"], form)
    name = metric_name(data["metric"], "accuracy")
    moved = "drop" if not data["metric"] or data["metric"]["higher_is_better"] else "rise"
    text = f"{name} {moved} {form(drop['value'])}{points(drop['value'], data['metric'])}" + (
        f" ({bounds})" if bounds else ""
    )
    allowed = budget(data["max_drop"], data["metric"]) if data["max_drop"] is not None else ""
    samples = data["data"]["evaluation"]["n"] if data["data"]["evaluation"] else 0
    open_for = drop.get("reason") or f"{samples} samples are too few to tell"
    words = {
        "kept": f", budget of {allowed} kept",
        "broken": f", budget of {allowed} broken",
        "undecided": f", budget of {allowed} undecided: {open_for}",
    }
    return text + (words[drop["verdict"]] if drop["verdict"] and allowed else "")


def unknown(data: Data, engine: Data) -> str:
    """Why the accuracy of an engine is not known."""
    if not data["data"]["evaluation"]:
        return "no evaluation data"
    return str(engine.get("metric_reason") or "no labels")


def _agreement(engine: Data) -> str:
    agreement = engine["agreement"]
    if not agreement:
        return ""
    parts = []
    if agreement["top1"] is not None:
        parts.append(f"{percent(agreement['top1'])} of predictions agree with float")
    if agreement["sqnr_db"] is not None:
        parts.append(f"SQNR {decibels(agreement['sqnr_db'])}")
    return f": {', '.join(parts)}" if parts else ""


def _caveats(data: Data, engine: Data) -> list[str]:
    caveats = []
    share = engine["precision"] and engine["precision"]["share_int8"]
    asked = engine["target"].partition(":")[0].partition("+")[0]
    if asked in ("int8", "int8-dynamic") and share is not None and share < SHARE_INT8:
        caveats.append(f"only {percent(share)} of the compute runs in int8{_left_float(data, engine)}")
    caveats += _unfused(engine, asked) + _weight_caveats(engine, asked)
    if _kernels_lose_more(engine):
        gap = decibels(engine["simulation_gap"]["sqnr_db"])
        caveats.append(
            f"the kernels lose more than quantization itself ({gap} against the simulation of the same "
            "file), as when int8 sums saturate on a CPU without VNNI"
        )
    return caveats


def _left_float(data: Data, engine: Data) -> str:
    """How many layers were left in float on purpose, and on whose: without a recipe it was the search's."""
    by = "the recipe" if (data.get("options") or {}).get("recipe") else "the search"
    layers = (engine.get("quantization") or {}).get("float") or []
    count = sum(layer["reason"].startswith("left in float on request") for layer in layers)
    return f" ({count} layer{'s' * (count > 1)} left in float by {by})" if count else ""


def _unfused(engine: Data, asked: str) -> list[str]:
    """Layers that the file holds in int8 and the runtime runs in float all the same, and why."""
    layers, precision = (engine.get("quantization") or {}).get("float"), engine["precision"]
    if asked != "int8" or layers is None or not precision:
        return []
    islands = precision["float_islands"]
    count = len(islands) - len(layers)
    if count <= 0:
        return []
    words = "1 layer of the int8 file runs" if count == 1 else f"{count} layers of the int8 file run"
    return [f"{words} in float ({islands[0]['reason']})"]


def _weight_caveats(engine: Data, asked: str) -> list[str]:
    """Where an engine is in the asked type by its weights alone, or not even by all of them."""
    precision = engine["precision"] or {}
    wanted = {"fp16": "float16", "bf16": "bfloat16", "int8-weight": "int8", "int4": "int4"}.get(asked)
    if wanted is None or not precision.get("weights_by_type"):
        return []
    stored = precision["weights_by_type"].get(wanted, 0.0)
    if stored < _NONE:
        reason = (engine.get("quantization") or {}).get("reason")
        return [f"none of the weights are {wanted}" + (f" ({reason})" if reason else "")]
    caveats = [] if stored >= SHARE_INT8 else [f"only {percent(stored)} of the weights are {wanted}"]
    in_float = (precision.get("share_by_type") or {}).get("float32", 0.0)
    if wanted.endswith("float16") and in_float > 1 - SHARE_INT8:
        how = "" if caveats else f"{wanted} is how weights are stored: "
        caveats.append(f"{how}{percent(in_float)} of the compute runs in float32")
    return caveats


def _kernels_lose_more(engine: Data) -> bool:
    """Of the engine's error power, more than half (3 dB) stands between it and its own simulation.

    If the simulation is no nearer to the float engine than the engine is, that is rounding and no loss.
    """
    gap, agreement = engine["simulation_gap"], engine["agreement"]
    if not gap or not agreement or gap["sqnr_db"] is None or agreement["sqnr_db"] is None:
        return False
    lost = gap.get("lost_db")
    return bool(gap["sqnr_db"] < agreement["sqnr_db"] + 3) and (lost is None or lost > _LOSS)


def _conclusion(data: Data, engine: Data, chosen: Data | None) -> str:
    if chosen is engine:
        return "Recommended." if engine["drop"] else "Recommended as far as agreement tells."
    if engine.get("made_for"):
        return (
            f"Not for this machine: it is made for {engine['made_for']}, and its speed here proves nothing."
        )
    doubt = _doubt(data, engine)
    reasons = [doubt] if doubt else []
    kind = speed_class(engine)
    words = {
        "slower": "it is slower than float",
        "same": "it is no faster than float",
        "undecided": "its speed-up is not proven",
        None: "its speed was not compared with float",
    }
    if kind != "faster":
        reasons.append(words[kind])
    if not reasons and chosen:
        reasons = [f"{chosen['target']} is {_better(data, chosen, engine)}"]
    still = (
        " yet" if chosen is None and any(engine is item for item in _open(data, _fastest_float(data))) else ""
    )
    return f"Not recommended{still}: {' and '.join(reasons)}."


def _better(data: Data, chosen: Data, engine: Data) -> str:
    faster = (_sample_ms(data, chosen) or 0) < (_sample_ms(data, engine) or 0)
    words = ["faster"] if faster else ["as fast"]
    comparable = (chosen["drop"] or chosen["role"] == "baseline") and engine["drop"]
    words += ["more accurate"] if comparable and _drop_value(chosen) < _drop_value(engine) else []
    return " and ".join(words)


def _headline(data: Data, chosen: Data | None) -> str:
    candidates = [engine for engine in data["engines"] if engine["role"] == "candidate"]
    if not candidates:
        return "No compressed engine was made."
    if all(engine.get("made_for") for engine in candidates):
        return " ".join(f"{engine['target']}: {_line(data, engine, chosen)}" for engine in candidates)
    broken = all(engine["drop"] and engine["drop"]["verdict"] == "broken" for engine in candidates)
    opening = "The accuracy budget is broken. " if broken and data["max_drop"] is not None else ""
    if chosen is None:
        return opening + _no_choice(data, candidates)
    if chosen["role"] == "candidate":
        facts = _facts(data, chosen)
        return f"{opening}Use {chosen['target']}: {'; '.join(fact for fact in facts if fact)}."
    return opening + _keep_float(data, chosen, candidates)


def _no_choice(data: Data, candidates: Sequence[Data]) -> str:
    if not any(engine["latency"] for engine in data["engines"]):
        if len(candidates) == 1:
            only = candidates[0]
            facts = "; ".join([_accuracy(data, only), *_caveats(data, only)])
            return f"No recommendation without latency. {only['target']}: {facts}."
        return "No recommendation: latency was not measured."
    if unproven := _open(data, _fastest_float(data)):
        return _not_yet(data, unproven, alone=len(candidates) == 1)
    return "No engine is recommended: none is proven both faster and accurate enough."


def _not_yet(data: Data, unproven: Sequence[Data], *, alone: bool) -> str:
    """Candidates may be faster than float, but the measurement was too short or too noisy to tell."""
    engine = unproven[0]
    asked = (data.get("options") or {}).get("bench") or 0
    seconds = max(_LEAST_BENCH, _LONGER * asked)
    longer = f"measure longer, for example with --bench {seconds:g}"
    names = ", ".join(item["target"] for item in unproven)
    opening = f"No recommendation yet: that {names} is faster than float is not proven, {longer}."
    if not alone:
        return opening
    return f"{opening} {_sentence(_facts(data, engine))}"


def _keep_float(data: Data, chosen: Data, candidates: Sequence[Data]) -> str:
    if len(candidates) == 1:
        only = candidates[0]
        facts = _facts(data, only)
        return f"Use the float engine {chosen['target']}. {only['target']}: {'; '.join(filter(None, facts))}."
    rivals = [
        engine["target"]
        for engine in candidates
        if _accurate(data, engine) and speed_class(engine) == "faster"
    ]
    use = f"Use the float engine {chosen['target']}"
    if rivals:
        return f"{use}: it is faster than {', '.join(rivals)}, and uncompressed."
    return f"{use}: no compressed engine is proven both faster and accurate enough."
