"""Describe, split and stream: what the pipeline asks of data."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from compressor import events, worker
from compressor.data import DataOptions, describe, describe_task, open_dataset, split, stream
from compressor.errors import DataError
from compressor.model import TensorSpec

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3, 4, 4)).astype(np.float32)
INPUT = TensorSpec("image", "float32", ("batch", 3, 4, 4))


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `events.warn` was told."""
    heard: list[str] = []
    monkeypatch.setattr(events, "_sink", lambda event: heard.append(event.get("warning", "")))
    return heard


def saved(folder: Path, **arrays: Any) -> str:
    np.savez(folder / "data.npz", **arrays)
    return str(folder / "data.npz")


def reference(source: str, *inputs: TensorSpec, batch: int = 8, **more: Any) -> dict[str, Any]:
    given = [asdict(spec) for spec in inputs or (INPUT,)]
    facts = describe(source, None, given)
    return {
        "source": source,
        "preprocess": None,
        "binding": facts["binding"],
        "indices": None,
        "batch": batch,
        "inputs": given,
        "sha256": facts["sha256"],
        **more,
    }


def parts(
    source: str, folder: Path, spec: TensorSpec = INPUT, **given: Any
) -> tuple[dict[str, Any], list[int], list[int]]:
    folder.mkdir(exist_ok=True)
    defaults = {"calibration": 10, "seed": 0, "held_out": True}
    found = split(source, None, [asdict(spec)], **{**defaults, **given}, folder=str(folder))
    one, two = (np.load(folder / found[name]["file"]).tolist() for name in ("calibration", "evaluation"))
    assert (found["calibration"]["n"], found["evaluation"]["n"]) == (len(one), len(two))
    assert one == sorted(one)
    assert two == sorted(two)
    return found, one, two


def test_describe(tmp_path: Path) -> None:
    facts = describe(saved(tmp_path, image=X, y=np.arange(40) % 4), None, [asdict(INPUT)])
    assert facts["kind"] == "npz"
    assert facts["n"] == 40
    assert facts["arrays"] == [{"name": "image", "dtype": "float32", "shape": (3, 4, 4)}]
    assert facts["binding"] == {"image": "image"}
    assert facts["labels"] == {"classes": 4, "counts": {"0": 10, "1": 10, "2": 10, "3": 10}}
    assert facts["warnings"] == []
    json.dumps(facts, allow_nan=False)


def test_describe_without_inputs_binds_nothing(tmp_path: Path) -> None:
    facts = describe(saved(tmp_path, image=X, target=RNG.normal(size=(40, 2))))
    assert "binding" not in facts
    assert facts["labels"] == {"classes": None, "counts": None}
    Image.new("RGB", (5, 4)).save(tmp_path / "a.png")
    Image.new("RGB", (4, 5)).save(tmp_path / "b.png")
    assert describe(str(tmp_path))["arrays"][0]["shape"] == (3, "height", "width")


def test_doubtful_data_are_warned_about(tmp_path: Path, warnings: list[str]) -> None:
    source = saved(tmp_path, image=np.zeros((40, 3, 4, 4), np.uint8), label=np.full(40, 4))
    describe_task(source, None, [asdict(INPUT)], str(tmp_path))
    assert len(warnings) == 3
    assert any("all 40 labels are class 4" in warning for warning in warnings)
    assert any("all samples of 'image' are identical" in warning for warning in warnings)
    assert any("array 'image' is uint8 and goes into input image" in warning for warning in warnings)


def test_a_difference_in_the_last_sample_is_enough_to_vary(tmp_path: Path) -> None:
    values = np.zeros((200, 3, 4, 4), np.float32)
    values[-1, 0, 0, 0] = 1
    assert describe(saved(tmp_path, image=values), None, [asdict(INPUT)])["warnings"] == []


def test_describe_refuses_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="wrong shape"):
        describe(saved(tmp_path, image=X[..., :3]), None, [asdict(INPUT)])


def test_held_out_samples_are_balanced_disjoint_and_at_most_half(tmp_path: Path) -> None:
    labels = np.array([0] * 25 + [1] * 10 + [2] * 5)
    source = saved(tmp_path, image=X, y=labels)
    _, calibration, evaluation = parts(source, tmp_path / "a", calibration=12)
    assert len(calibration) == 12
    assert sorted(calibration + evaluation) == list(range(40))
    assert np.bincount(labels[calibration]).tolist() == [4, 4, 4]
    _, calibration, evaluation = parts(source, tmp_path / "b", calibration=500)
    assert (len(calibration), len(evaluation)) == (20, 20)
    assert np.bincount(labels[calibration]).tolist() == [8, 7, 5]


def test_without_holding_out_all_are_evaluated(tmp_path: Path) -> None:
    _, calibration, evaluation = parts(saved(tmp_path, image=X), tmp_path / "a", held_out=False)
    assert len(calibration) == 10
    assert evaluation == list(range(40))


def test_the_choice_is_the_seeds_and_the_same_everywhere(tmp_path: Path) -> None:
    source = saved(tmp_path, image=X)
    first, calibration, _ = parts(source, tmp_path / "a", calibration=5)
    again, _, _ = parts(source, tmp_path / "b", calibration=5)
    other, different, _ = parts(source, tmp_path / "c", calibration=5, seed=1)
    assert first == again
    assert calibration != different
    assert first["calibration"]["sha256"] != other["calibration"]["sha256"]
    assert calibration == [15, 18, 20, 25, 36]  # whatever the version of numpy


def test_the_digest_of_a_part_covers_the_content(tmp_path: Path) -> None:
    first, one, _ = parts(saved(tmp_path, image=X), tmp_path / "a")
    other, two, _ = parts(saved(tmp_path, image=X + 1), tmp_path / "a")
    assert one == two
    assert first["calibration"]["sha256"] != other["calibration"]["sha256"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_samples_that_are_not_finite_are_left_out_and_named(
    tmp_path: Path, warnings: list[str], bad: float
) -> None:
    values = X.astype(np.float64)
    values[7, 0, 1, 1] = values[33, 2, 0, 0] = bad
    found, calibration, evaluation = parts(saved(tmp_path, image=values), tmp_path / "a")
    assert found["left_out"] == [7, 33]
    assert not {7, 33} & {*calibration, *evaluation}
    assert len(calibration) + len(evaluation) == 38
    assert [w for w in warnings if w] == [
        "2 sample(s) with NaN or infinite values are left out: number 7, 33 (counted from 0)"
    ]


def test_only_inputs_of_the_model_must_be_finite(tmp_path: Path) -> None:
    found, _, _ = parts(saved(tmp_path, image=X, other=np.full(40, np.nan)), tmp_path / "a")
    assert found["left_out"] == []


def test_nothing_but_nan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="every sample holds NaN or infinite values"):
        parts(saved(tmp_path, image=np.full_like(X, np.nan)), tmp_path / "a")


def test_few_samples(tmp_path: Path) -> None:
    _, calibration, evaluation = parts(saved(tmp_path, image=X[:3]), tmp_path / "a")
    assert (len(calibration), len(evaluation)) == (1, 2)
    one = saved(tmp_path, image=X[:1])
    assert parts(one, tmp_path / "b", held_out=False)[1:] == ([0], [0])
    with pytest.raises(DataError, match="one sample cannot be both"):
        parts(one, tmp_path / "c")


def test_a_fixed_batch_gets_whole_groups(tmp_path: Path, warnings: list[str]) -> None:
    spec = TensorSpec("image", "float32", (8, 3, 4, 4))
    source = saved(tmp_path, image=X[:39])
    _, calibration, evaluation = parts(source, tmp_path / "a", spec, calibration=10)
    assert (len(calibration), len(evaluation)) == (16, 16)
    assert any("8 samples at a time: 7 left over" in warning for warning in warnings)
    data = reference(source, spec, batch=3, indices=str(tmp_path / "a" / "evaluation.npy"))
    assert [len(batch.indices) for batch in stream(data)] == [8, 8]
    with pytest.raises(DataError, match=r"8 samples at a time to calibrate .* there are only 15"):
        parts(saved(tmp_path, image=X[:15]), tmp_path / "b", spec)
    with pytest.raises(DataError, match="8 samples at a time, but no batch of the data has as many"):
        list(stream(reference(saved(tmp_path, image=X[:5]), spec)))


def test_a_batch_fixed_at_one_gives_single_samples(tmp_path: Path) -> None:
    spec = TensorSpec("image", "float32", (1, 3, 4, 4))
    source = saved(tmp_path, image=X[:5])
    batches = list(stream(reference(source, spec)))
    assert [batch.inputs["image"].shape for batch in batches] == [(1, 3, 4, 4)] * 5
    assert len(parts(source, tmp_path / "a", spec)[1]) == 2


def test_stream_names_types_and_picks(tmp_path: Path) -> None:
    source = saved(tmp_path, pixels=X.astype(np.float64), y=np.arange(40))
    np.save(tmp_path / "some.npy", np.arange(3, 40, 2))
    data = reference(source, batch=7, indices=str(tmp_path / "some.npy"))
    batches = list(stream(data))
    assert [len(batch.indices) for batch in batches] == [7, 7, 5]
    assert {name for batch in batches for name in batch.inputs} == {"image"}
    values = np.concatenate([batch.inputs["image"] for batch in batches])
    assert values.dtype == np.float32
    assert values.flags.c_contiguous
    assert np.array_equal(values, X[3::2])
    assert np.concatenate([b.labels for b in batches if b.labels is not None]).tolist() == list(
        range(3, 40, 2)
    )


def test_stream_goes_on_from_a_sample(tmp_path: Path) -> None:
    data = reference(saved(tmp_path, image=X), batch=16)
    rest = list(stream(data, start=16))
    assert [batch.indices[0] for batch in rest] == [16, 32]
    assert list(stream(data, start=40)) == []


def test_integers_are_cast_if_they_fit(tmp_path: Path) -> None:
    spec = TensorSpec("ids", "int32", ("n", 3))
    source = saved(tmp_path, ids=np.array([[1, 2, 3], [4, 5, 60000]], np.uint16))
    (batch,) = stream(reference(source, spec))
    assert batch.inputs["ids"].dtype == np.int32
    assert batch.inputs["ids"].tolist() == [[1, 2, 3], [4, 5, 60000]]
    large = saved(tmp_path, ids=np.array([[2**40, 0, 0]]))
    with pytest.raises(DataError, match="go from 0 to 1099511627776, which does not fit into int32"):
        list(stream(reference(large, spec)))


def test_a_missing_channel_axis_is_added_and_said(tmp_path: Path) -> None:
    spec = TensorSpec("x", "float32", ("n", 1, 4, 4))
    source = saved(tmp_path, x=X[:, 0])
    facts = describe(source, None, [asdict(spec)])
    assert "samples of x=4x4:float32 are reshaped for input x=nx1x4x4:float32" in facts["notes"]
    values = np.concatenate([batch.inputs["x"] for batch in stream(reference(source, spec))])
    assert np.array_equal(values, X[:, :1])


def test_states_and_scalars_are_given_whole(tmp_path: Path) -> None:
    inputs = (
        TensorSpec("audio", "float32", ("batch", 16)),
        TensorSpec("state", "float32", (2, "batch", 4)),
        TensorSpec("rate", "int64", ()),
    )
    source = saved(
        tmp_path, audio=np.ones((3, 16)), state=np.ones((3, 2, 1, 4)), rate=np.array(16000, np.int32)
    )
    batches = list(stream(reference(source, *inputs)))
    shapes = [{name: array.shape for name, array in batch.inputs.items()} for batch in batches]
    assert shapes == [{"audio": (1, 16), "state": (2, 1, 4), "rate": ()}] * 3
    assert batches[0].inputs["rate"] == 16000


def test_ragged_batches_flow_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ragged_data.py").write_text(
        "import numpy as np\n\n"
        "def batches():\n    for n in (3, 5):\n        yield {'ids': np.full((4, n), n)}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = TensorSpec("ids", "int64", ("batch", "tokens"))
    _, calibration, evaluation = parts("ragged_data:batches", tmp_path / "a", spec, calibration=3)
    assert len(calibration) + len(evaluation) == 8
    data = reference("ragged_data:batches", spec, indices=str(tmp_path / "a" / "evaluation.npy"))
    batches = list(stream(data))
    assert [batch.inputs["ids"].shape[1] for batch in batches] == [3, 5]
    assert np.concatenate([batch.indices for batch in batches]).tolist() == evaluation


def test_the_tasks_run_in_a_child(tmp_path: Path) -> None:
    source = saved(tmp_path, image=X, y=np.arange(40) % 2)
    given = {"source": source, "preprocess": None, "inputs": [asdict(INPUT)], "folder": str(tmp_path)}
    facts = worker.call("compressor.data:describe_task", given).value
    assert facts["n"] == 40
    more = {"calibration": 8, "seed": 0, "held_out": True}
    found = worker.call("compressor.data:split", {**given, **more}).value
    assert found["calibration"]["n"] == 8
    with pytest.raises(DataError, match="no such file"):
        worker.call("compressor.data:describe_task", {**given, "source": "nowhere"})


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    """64 MiB of samples are streamed within a few."""
    np.savez(tmp_path / "data.npz", image=np.zeros((4096, 64, 64), np.float32))
    spec = TensorSpec("image", "float32", ("n", 64, 64))
    code = (
        "import json, sys, resource; import numpy as np; from compressor.data import stream\n"
        "data = json.load(sys.stdin); import compressor.data.npz\n"
        "def private():\n"
        "    fields = dict(line.split(':') for line in open('/proc/self/status') if ':' in line)\n"
        "    return int(fields['RssAnon'].split()[0])\n"
        "before = private(); most = 0\n"
        "for batch in stream(data):\n    most = max(most, private())\n"
        "sys.exit(most - before > 16 * 1024)\n"
    )
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc here")
    data = reference(str(tmp_path / "data.npz"), spec)
    assert (
        subprocess.run(
            [sys.executable, "-c", code], input=json.dumps(data), text=True, check=False
        ).returncode
        == 0
    )


def test_real_pictures_of_imagenet(shared: Path) -> None:
    folder = shared / "assets" / "_data" / "imagenet_val_a"
    if not folder.is_dir():
        pytest.skip("no pictures there")
    spec = TensorSpec("image", "float32", ("n", 3, 224, 224))
    preprocess = {"resize": 256, "crop": 224, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    places = np.array([0, 100, 600])
    dataset = open_dataset(str(folder), DataOptions(preprocess, (spec,)))
    assert dataset.length == 650
    (batch,) = dataset.batches(places, 8)
    labels = json.loads((folder / "labels.json").read_text())
    assert batch.labels is not None
    assert batch.labels.tolist() == [labels[sorted(labels)[place]] for place in places]
    assert batch.inputs["image"].shape == (3, 3, 224, 224)
    assert -3 < batch.inputs["image"].min() < batch.inputs["image"].max() < 3
