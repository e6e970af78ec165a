"""The Python API, on models and data in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compressor import CompressError, compress, load_engine
from compressor.errors import UsageError


class TinyNet:
    """Made on demand: torch is imported by the tests that need it."""

    def __new__(cls) -> object:
        import torch

        torch.manual_seed(0)
        layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4)
        return torch.nn.Sequential(*layers).eval()


@pytest.fixture(scope="module")
def samples() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(48, 3, 8, 8)).astype(np.float32)


def test_a_module_with_labelled_arrays(samples: np.ndarray, tmp_path: Path) -> None:
    import torch

    net = TinyNet()
    with torch.no_grad():
        answers = net(torch.from_numpy(samples)).argmax(1).numpy()
    report = compress(
        net,
        "int8:onnx",
        example_inputs=torch.zeros(2, 3, 8, 8),
        data=(samples, answers),
        bench=0,
        out=tmp_path / "o",
    )
    float_engine, int8 = report.engines
    assert float_engine["metric"] == pytest.approx({**float_engine["metric"], "value": 100.0, "n": 24})
    assert int8["agreement"]["sqnr_db"] > 25
    assert "<table" in report._repr_html_()
    session = load_engine(tmp_path / "o" / "engines" / "int8-onnx-cpu")
    outputs = session.run({session.inputs[0].name: samples})
    with torch.no_grad():
        reference = net(torch.from_numpy(samples)).numpy()
    error = np.square(next(iter(outputs.values())) - reference).sum()
    assert 10 * np.log10(np.square(reference).sum() / error) > 25


def test_a_loader_of_batches(samples: np.ndarray, tmp_path: Path, net: Path) -> None:
    data = np.load(net / "data.npz")
    batches = [(data["x"][start : start + 50], data["y"][start : start + 50]) for start in (0, 50, 100)]
    report = compress(net / "net.onnx", "int8:onnx", data=iter(batches), bench=0, out=tmp_path / "o")
    assert report.data["data"]["evaluation"]["n"] + report.data["data"]["calibration"]["n"] == 120
    assert report.engines[0]["metric"]["value"] == 100.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": 3}, "nn.Module"),
        ({"model": "m.onnx", "colour": 1}, "colour"),
        ({"model": "m.onnx", "data": []}, "no batches"),
        ({"model": "m.onnx", "data": [np.zeros((2, 3)), np.zeros((2, 4))]}, "do not fit"),
    ],
)
def test_a_wrong_request_is_one_line(arguments: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(CompressError, match=words) as caught:
        compress(**arguments, out=tmp_path / "o")
    assert "\n" not in str(caught.value)


def test_a_module_needs_example_inputs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="example_inputs"):
        compress(TinyNet(), out=tmp_path / "o")
    assert list(tmp_path.iterdir()) == []
