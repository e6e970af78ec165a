"""The page: one file, well-formed, safe, complete, and without labels that overlap."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import combinations
from typing import Any

import pytest

from compressor.report import text
from compressor.report.html import render

VOID = {"meta", "br", "wbr", "link", "img", "input", "hr"}
LONG_LAYER = (
    "/encoder/a_long_module_name_of_a_generated_network/blocks.{i}/attention/self/query_key_value/MatMul"
)


@dataclass
class Page(HTMLParser):
    """What a browser would see: elements, text, and what is not well-formed."""

    stack: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    labels: list[list[tuple[dict[str, str | None], str]]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if len(attributes) != len(attrs):
            self.faults.append(f"{tag}: an attribute twice")
        self.tags.append((tag, attributes))
        if tag == "svg":
            self.labels.append([])
        if tag not in VOID and not self.get_starttag_text().endswith("/>"):  # type: ignore[union-attr]
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.stack or self.stack.pop() != tag:
            self.faults.append(f"</{tag}> does not close what is open")

    def handle_data(self, data: str) -> None:
        where = self.stack[-1] if self.stack else ""
        if where in ("style", "script"):
            return
        self.words.append(data)
        if where == "text":
            self.labels[-1].append((self.tags[-1][1], data))
        if where == "h2":
            self.heads.append(data)


def read(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    return page


def twelve(engine: Any, layers: Any) -> dict[str, Any]:
    """Three baselines and nine candidates over three runtimes, each with 200 layers of long names."""
    floats = {"onnx": 17.3, "openvino": 13.6, "tflite": 21.0}
    rows = [engine(f"fp32:{name}:cpu", role="baseline", p50=p50) for name, p50 in floats.items()]
    kinds = [("int8", 1.41, 0.15), ("int8+prune50", 2.4, 2.1), ("int8-dynamic", 0.85, 0.05)]
    for name, p50 in floats.items():
        rows += [engine(f"{kind}:{name}:cpu", speed=speed, drop=drop, p50=p50) for kind, speed, drop in kinds]
    candidates = [row["target"] for row in rows if row["role"] == "candidate"]
    return {"engines": rows, "layers": {target: layers(200, LONG_LAYER) for target in candidates}}


def extreme(engine: Any, layers: Any) -> dict[str, Any]:
    """0.02 ms beside 900 ms, 40 points lost, names that are long and full of markup."""
    name = "int8+prune50:a_runtime_with_a_really_long_name_from_a_plugin:cuda_device_0"
    quick = engine(name, drop=40.2, budget="broken", p50=0.02 * 1.41)
    slow = engine("int8:<img src=x onerror=alert(1)>:cpu", speed=0.09, p50=900.0)
    model = {
        "path": "/d/<script>alert(1)</script>/\"q\" & 'a' \udcff" + "x" * 300,
        "sha256": "0" * 64,
        "parameters": 9,
    }
    return {
        "engines": [engine("fp32:onnx:cpu", role="baseline", p50=900.0), quick, slow],
        "layers": {name: layers(2, "</title><script>" + "n" * 200)},
        "model": model,
        "notes": ["</ul><script>alert(2)</script>", "https://example.org/page"],
        "command": ["compress", "a b.pt", "--data", "'\"<>&"],
    }


def one(engine: Any, layers: Any) -> dict[str, Any]:
    return {"engines": [engine("fp32:onnx:cpu", role="baseline")], "rungs": [], "layers": {}, "skipped": []}


def no_metric(engine: Any, layers: Any) -> dict[str, Any]:
    rows = [engine("fp32:onnx:cpu", role="baseline"), engine("int8:onnx:cpu")]
    return {
        "engines": [{**row, "metric": None, "drop": None} for row in rows],
        "metric": None,
        "max_drop": None,
    }


def no_classes(engine: Any, layers: Any) -> dict[str, Any]:
    data = no_metric(engine, layers)
    data["engines"][1]["agreement"] = {"top1": None, "sqnr_db": 31.5}
    return data


def no_latency(engine: Any, layers: Any) -> dict[str, Any]:
    rows = [engine("fp32:onnx:cpu", role="baseline"), engine("int8:onnx:cpu")]
    return {"engines": [{**row, "latency": None, "cpu_ms": None, "peak_rss_bytes": None} for row in rows]}


def alike(engine: Any, layers: Any) -> dict[str, Any]:
    rows = [engine("fp32:onnx:cpu", role="baseline")]
    rows += [engine(f"int8+prune{share}:onnx:cpu", speed=1.0, drop=0.0) for share in range(10, 21)]
    for row in rows:
        row["latency"] |= {"p99_ms": None, "aa_noise": None}
        row["metric"] |= {"low": None, "high": None}
    return {"engines": rows}


def nothing(engine: Any, layers: Any) -> dict[str, Any]:
    return {"engines": [], "rungs": [], "layers": {}, "skipped": [], "steps": [], "notes": [], "verdict": []}


def usual(engine: Any, layers: Any) -> dict[str, Any]:
    return {}


def lower_is_better(engine: Any, layers: Any) -> dict[str, Any]:
    return {"metric": {"name": "mse", "higher_is_better": False}}


CASES = (usual, twelve, extreme, one, no_metric, no_classes, no_latency, alike, nothing, lower_is_better)


@pytest.fixture(params=CASES, ids=lambda case: case.__name__)
def data(request: pytest.FixtureRequest, report: Any, engine: Any, layers: Any) -> dict[str, Any]:
    made: dict[str, Any] = report(**request.param(engine, layers))
    return made


def test_the_page_is_well_formed(data: dict[str, Any]) -> None:
    page = read(render(data))
    assert page.faults == []
    assert page.stack == []


def test_the_page_is_small_and_fetches_nothing(data: dict[str, Any]) -> None:
    html = render(data)
    assert len(html.encode("utf-8")) < 300_000
    page = read(html)
    for tag, attributes in page.tags:
        assert not {"src", "href", "srcset", "action", "background"} & attributes.keys(), tag
        assert not any(name.startswith("on") for name in attributes), tag
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
    style = html[html.index("<style>") : html.index("</style>")]
    assert not re.search(r"url\(|@import|https?:|//", style)


def test_nothing_from_outside_becomes_markup(data: dict[str, Any]) -> None:
    page = read(render(data))
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "img" not in [tag for tag, _ in page.tags]


def test_every_number_is_there(data: dict[str, Any]) -> None:
    words = "".join(read(render(data)).words)
    assert text.shorten(data["headline"], 10_000).replace("\udcff", "\ufffd") in words
    for engine in data["engines"]:
        assert text.shorten(engine["target"], 120) in words
        assert engine["sha256"] in words
        wanted = [text.size(engine["size_bytes"])]
        if engine["latency"]:
            latency = engine["latency"]
            times = (text.milliseconds(latency[key]) for key in ("p50_ms", "p90_ms", "p99_ms"))
            wanted += [" / ".join(times)]
            if latency["ratio_to_baseline"]:
                wanted += [
                    text.ratio(latency["ratio_to_baseline"]["value"]),
                    text.factors(latency["ratio_to_baseline"]),
                ]
        for part, forms in (("metric", text.quantities), ("drop", text.differences)):
            if engine[part]:
                form = forms(data["metric"])
                wanted += [
                    form(engine[part]["value"]),
                    text.between(engine[part]["low"], engine[part]["high"], form),
                ]
        if engine["agreement"]:
            wanted += [text.decibels(engine["agreement"]["sqnr_db"])]
        for value in wanted:
            assert value in words, (engine["target"], value)
    for rung in data["rungs"]:
        assert rung["what"] in words
        assert text.span(rung["seconds"]) in words
    for skipped in data["skipped"]:
        assert skipped["reason"] in words
    for step in data["steps"]:
        assert step["name"] in words
    for note in data["notes"]:
        assert note in words


def boxes(labels: list[tuple[dict[str, str | None], str]]) -> list[tuple[float, float, float, float, str]]:
    """Rectangles of a drawing's horizontal texts at 12 px; 0.6 em a character, 0.58 for the sans."""
    found = []
    for attributes, words in labels:
        if "transform" in attributes:
            continue
        x, y = float(attributes["x"] or 0), float(attributes["y"] or 0)
        cells = sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in words)
        width = cells * 12 * (0.6 if attributes["class"] == "lb" else 0.55)
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[attributes.get("text-anchor") or "start"]
        found.append((left, y - 9, left + width, y + 2.5, words))
    return found


def test_no_label_lies_on_another_or_outside(data: dict[str, Any]) -> None:
    page = read(render(data))
    sizes = [attributes["viewbox"] for tag, attributes in page.tags if tag == "svg"]
    assert len(sizes) == len(page.labels)
    for size, labels in zip(sizes, page.labels, strict=True):
        width, height = (float(part) for part in (size or "").split()[2:])
        rectangles = boxes(labels)
        for one_box, other in combinations(rectangles, 2):
            apart = (
                one_box[2] <= other[0]
                or other[2] <= one_box[0]
                or one_box[3] <= other[1]
                or other[3] <= one_box[1]
            )
            assert apart, (one_box, other)
        for left, top, right, bottom, words in rectangles:
            assert left >= -1, words
            assert right <= width + 1, words
            assert top >= 0, words
            assert bottom <= height, words


def test_drawings_have_words_for_those_who_do_not_see_them(data: dict[str, Any]) -> None:
    page = read(render(data))
    for tag, attributes in page.tags:
        if tag == "svg":
            assert attributes["role"] == "img"
            assert attributes["aria-label"]
        if attributes.get("role") == "region":
            assert attributes["aria-label"]
            assert attributes["tabindex"] == "0"


def test_every_drawn_point_has_a_name(report: Any, engine: Any, layers: Any) -> None:
    data = report(**twelve(engine, layers))
    page = read(render(data))
    wide, narrow = page.labels[:2]
    for labels in (wide, narrow):
        named = {words for attributes, words in labels if attributes["class"] == "lb"}
        words = "".join(page.words)
        for index, row in enumerate(data["engines"], 1):
            assert row["target"] in named or (str(index) in named and f"{index} {row['target']}" in words)


def test_sections_appear_when_there_is_something_to_show(report: Any, engine: Any, layers: Any) -> None:
    heads = read(render(report())).heads
    assert heads == [
        "Accuracy and latency",
        "Engines",
        "Speed against float",
        "What runs in float",
        "Error by layer",
        "What was tried",
        "Targets not made",
        "Files",
        "Reproduce",
        "Model, data, machine",
        "Cost of each step",
    ]
    heads = read(render(report(**no_latency(engine, layers)))).heads
    assert "Accuracy and latency" not in heads
    assert read(render(report(**no_metric(engine, layers)))).heads[0] == "Agreement and latency"
    assert "Speed against float" not in heads
    assert "What was tried" not in read(render(report(rungs=[]))).heads


def test_a_lower_metric_is_drawn_higher_where_lower_is_better(report: Any, engine: Any) -> None:
    rows = [
        engine("fp32:onnx:cpu", role="baseline"),
        engine("int8:onnx:cpu", drop=5.0),
    ]
    assert [row["metric"]["value"] for row in rows] == pytest.approx([81.85, 76.85])
    for higher_is_better in (True, False):
        html = render(
            report(rows, metric={"name": "score", "higher_is_better": higher_is_better}, max_drop=None)
        )
        base = re.search(r'class="mk base[^"]*" x="[\d.]+" y="([\d.]+)"', html)
        other = re.search(
            r'class="mk cand[^"]*" cx="[\d.]+" cy="([\d.]+)"|class="mk rec" cx="[\d.]+" cy="([\d.]+)"', html
        )
        assert base
        assert other
        below = float(other[1] or other[2]) > float(base[1])
        assert below is higher_is_better


def speed_of(html: str) -> str:
    """The cell of the second engine's speed."""
    return re.findall(r'<td data-name="Speed"[^>]*>.*?</td>', html)[1]


def test_a_speed_without_an_interval_says_why(report: Any, engine: Any) -> None:
    row = engine("int8:onnx:cpu")
    reason = "fewer than 5 sets of <fresh> sessions"
    row["latency"]["ratio_to_baseline"] |= {
        "low": None,
        "high": None,
        "verdict": "undecided",
        "reason": reason,
    }
    html = render(report([engine("fp32:onnx:cpu", role="baseline"), row]))
    assert 'title="fewer than 5 sets of &lt;fresh&gt; sessions"' in speed_of(html)
    assert "no interval" in speed_of(html)
    assert f"The speed of int8:onnx:cpu is undecided: {reason}." in read(html).words
    assert "is undecided" not in render(report())


def test_an_accuracy_in_percent_is_not_drawn_beyond_a_hundred(report: Any, engine: Any) -> None:
    rows = [engine("fp32:onnx:cpu", role="baseline"), engine("int8:onnx:cpu")]
    for row in rows:
        row["metric"] = {"value": 99.9, "low": 98.0, "high": 100.0}
    rows[1]["drop"] |= {"value": 0.0, "low": -2.0, "high": 2.0}
    page = read(render(report(rows)))
    ticks = [float(words) for attributes, words in page.labels[0] if attributes.get("text-anchor") == "end"]
    assert max(ticks) <= 100
    bar = re.search(r'class="eb rec" d="[^"]*M[\d.]+ ([\d.]+)h6m-3 0V([\d.]+)', render(report(rows)))
    assert bar
    assert min(float(bar[1]), float(bar[2])) >= 14  # the upper edge of the drawing's area


def test_small_numbers_of_a_metric_without_a_unit_are_told_apart(report: Any, engine: Any) -> None:
    rows = [engine("fp32:onnx:cpu", role="baseline"), engine("int8:onnx:cpu", drop=0.004)]
    rows[0]["metric"] = {"value": 0.998, "low": 0.996, "high": 0.9993}
    rows[1]["metric"] = {"value": 0.994, "low": 0.991, "high": 0.9971}
    data = report(rows, metric={"name": "f1", "higher_is_better": True}, max_drop=0.01, rungs=[])
    words = read(render(data)).words
    assert {"0.9980", "0.9940", "0.00400"} <= {word.strip() for word in words}
    assert "f1 drop 0.00400 (" in data["headline"]


def test_the_legend_names_what_is_drawn(report: Any, engine: Any) -> None:
    base, chosen = engine("fp32:onnx:cpu", role="baseline"), engine("int8:onnx:cpu", drop=-0.5)
    html = render(report([base, chosen]))
    legend = html[html.index('<ul class="legend">') :].split("</ul>")[0]
    assert "recommended" in legend
    assert "candidate" not in legend
    assert "Pareto" not in legend
    both = render(report([base, chosen, engine("fp16:onnx:cpu", speed=1.1)]))
    assert "candidate" in both[both.index('<ul class="legend">') :].split("</ul>")[0]


def test_red_is_spoken_of_where_there_is_some(report: Any, layers: Any) -> None:
    assert "in red" in render(report())
    assert "in red" not in render(report(layers={"int8:onnx:cpu": layers(4)}))


@pytest.mark.parametrize(("count", "words"), [(1, "1 attempt, 41 s."), (2, "2 attempts, 1 min 19 s in all")])
def test_attempts_are_counted(report: Any, count: int, words: str) -> None:
    data = report()
    data["rungs"] = data["rungs"][:count]
    assert words in render(data)


def test_steps_say_of_what(report: Any) -> None:
    data = report()
    data["steps"][0]["what"] = "samples in photos/ <b>"
    assert "samples in photos/ <b>" in read(render(data)).words


def test_the_page_states_the_preprocessing_and_that_samples_are_apart(report: Any) -> None:
    data = report()
    plan = {"resize": 256, "crop": [224, 192], "mean": [0.485, 0.456], "layout": None, "scale": 1 / 255}
    for part in ("calibration", "evaluation"):
        data["data"][part] |= {"preprocess": plan, "preprocess_from": "architecture"}
    said = "resize 256, crop 224x192, mean 0.485/0.456, scale 0.00392157 (from the architecture)"
    words = read(render(data)).words
    assert words[words.index("Preprocessing") + 1] == said
    assert "Overlap" not in words
    data["data"]["disjoint"] = True
    data["data"]["evaluation"]["preprocess"] = None
    words = read(render(data)).words
    assert words[words.index("Preprocessing, calibration") + 1] == said
    assert words[words.index("Preprocessing, evaluation") + 1] == "none"
    assert "none: no sample is in both calibration and evaluation" in words
    assert "Preprocessing" not in read(render(report())).words


def test_the_options_that_took_effect_are_shown(report: Any) -> None:
    words = read(render(report(options={"max_drop": 1.0, "data": "<x>", "targets": ["int8", "fp16"]}))).words
    for name, value in (("Max drop", "1"), ("Data", "<x>"), ("Targets", "int8 fp16")):
        assert words[words.index(name) + 1] == value
    assert "All options that took effect" not in render(report())


def test_figures_of_the_engines_table_are_explained(report: Any) -> None:
    html = render(report())
    for name in ("CPU, ms", "Memory", "In int8", "Speed", "Drop"):
        assert re.search(rf'<th scope="col" class=num title="[^"]{{20,}}">{name}</th>', html), name
        assert f'data-name="{name}"' in html  # the name of the figure on a card


def test_the_command_can_be_copied(report: Any) -> None:
    words = read(render(report())).words
    assert "compress --target int8 --data 'imagenet/val 650' --max-drop 1 lite0.onnx" in words


def test_the_tone_follows_the_verdict(report: Any, engine: Any) -> None:
    base = engine("fp32:onnx:cpu", role="baseline")
    tones = {
        "good": report(),
        "bad": report([base, engine("int8:onnx:cpu", budget="broken")]),
        "warn": report([base, engine("int8:onnx:cpu", budget="undecided")]),
    }
    for tone, data in tones.items():
        assert f'class="verdict {tone}"' in render(data)


def test_candidates_of_the_search_are_drawn_where_their_time_is_known(report: Any) -> None:
    data = report()
    tried, kept = data["rungs"]
    metric = {"value": 80.0, "low": 79.0, "high": 81.0}
    raced = {**tried, "name": "raced", "metric": metric, "speed": 1.25}
    expected = {**tried, "name": "expected", "metric": metric, "expected_ms": 6.0}
    partial = {**tried, "name": "partial", "metric": metric, "speed": 1.2, "partial": True}
    rungs = [tried, raced, expected, partial, {**kept, "expected_ms": 4.0}]
    html = render(report(rungs=rungs))
    drawn = re.findall(r'<circle class="mk tried" cx="([\d.]+)"[^>]*><title>([^<]*)</title>', html)
    wide = {name: float(x) for x, name in drawn[: len(drawn) // 2]}
    assert set(wide) == {"int8:onnx:cpu, tried: raced", "int8:onnx:cpu, tried: expected"}
    # The chosen engine takes its own time, half as much again is expected of the mix; floats are slowest.
    marks = [float(x) for x in re.findall(r'<circle class="mk rec" cx="([\d.]+)"', html)]
    assert marks[0] < wide["int8:onnx:cpu, tried: expected"]
    assert "2 candidates that were tried and not timed" in html
    assert "tried" in html[html.index('<ul class="legend">') :].split("</ul>")[0]
    assert "mk tried" not in render(report()).partition("</style>")[2]
