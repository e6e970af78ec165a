"""What a loaded model is called: a digest of all that decides it, and the files of code behind it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from compressor import worker
from compressor.loading import LoadOptions, load
from compressor.model import Model, TensorSpec


def matmul(path: Path, value: float = 1.0, beside: bool = False) -> Path:
    weight = np.full((4, 2), value, np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 2])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save_model(
        model, str(path), save_as_external_data=beside, location=f"{path.stem}.data", size_threshold=0
    )
    return path


def digest(path: Path, *inputs: TensorSpec, **options: object) -> str:
    folder = path.parent / "step"
    folder.mkdir(exist_ok=True)
    return str(load(path, LoadOptions(inputs=inputs, **options), folder).facts["digest"])  # type: ignore[arg-type]


def test_an_onnx_models_digest_covers_side_files_and_inputs(tmp_path: Path) -> None:
    first = digest(matmul(tmp_path / "m.onnx", beside=True))
    graph = (tmp_path / "m.onnx").read_bytes()
    assert digest(tmp_path / "m.onnx") == first
    assert digest(matmul(tmp_path / "whole.onnx")) == first  # where the weights lie makes no other model
    assert digest(tmp_path / "m.onnx", TensorSpec("x", "float32", (3, 4))) != first
    (tmp_path / "m.data").unlink()
    matmul(tmp_path / "m.onnx", 2.0, beside=True)
    assert (tmp_path / "m.onnx").read_bytes() == graph
    assert digest(tmp_path / "m.onnx") != first


def test_a_torch_models_digest_covers_weights_graph_and_inputs(tmp_path: Path) -> None:
    def saved(name: str, scale: float, *more: torch.nn.Module) -> Path:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 2), *more)
        net[0].weight.data *= scale
        torch.save(net, tmp_path / name)
        return tmp_path / name

    spec = TensorSpec("input", "float32", ("batch", 4))
    first = digest(saved("a.pt", 1.0), spec)
    assert digest(saved("b.pt", 1.0), spec) == first
    assert digest(saved("c.pt", 2.0), spec) != first
    assert digest(saved("d.pt", 1.0, torch.nn.ReLU()), spec) != first
    assert digest(tmp_path / "a.pt", TensorSpec("input", "float32", ("batch", 5, 4))) != first


@pytest.mark.parametrize("how", ["module", "file"])
def test_the_code_of_an_architecture_is_named_and_changes_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(torch.nn.Sequential(torch.nn.Linear(4, 2)).state_dict(), tmp_path / "net.pt")
    (tmp_path / "step").mkdir()
    Path("parts.py").write_text("import torch\nLAST = torch.nn.ReLU\n")
    Path("user_net.py").write_text(
        "import torch, parts\ndef net(): return torch.nn.Sequential(torch.nn.Linear(4, 2), parts.LAST())\n"
    )

    def loaded() -> Model:
        options = {
            "architecture": "user_net:net" if how == "module" else "user_net.py:net",
            "inputs": [{"name": "input", "dtype": "float32", "shape": ["batch", 4]}],
        }
        given = {"path": str(tmp_path / "net.pt"), "options": options, "folder": str(tmp_path / "step")}
        return Model.of(worker.call("compressor.loading:load_task", given).value)

    first = loaded()
    assert first.facts["code"] == [
        {
            "path": str((tmp_path / name).resolve()),
            "sha256": hashlib.sha256((tmp_path / name).read_bytes()).hexdigest(),
        }
        for name in ("parts.py", "user_net.py")
    ]
    Path("parts.py").write_text("import torch\nLAST = torch.nn.Sigmoid\n")
    second = loaded()
    assert second.facts["digest"] != first.facts["digest"]
    assert second.facts["code"] != first.facts["code"]
