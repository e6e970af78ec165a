"""The ways in which torch networks are saved, with and without their code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.errors import ModelFileError, UnsupportedError, UsageError
from compressor.loading import LoadOptions, load
from compressor.model import Model, TensorSpec
from compressor.torch_graph import flat_module, load_program

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.drop, self.fc = nn.Dropout(0.5), nn.Linear(4, classes)

    def forward(self, image):
        return self.fc(self.drop(torch.relu(self.bn(self.conv(image))).mean((2, 3))))
"""
SAMPLES = (TensorSpec("image", "float32", (3, 8, 8)),)


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.nn.Module]:
    """A network whose code lies in the working directory, with weights that are not its first ones."""
    (tmp_path / "netcode.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import netcode  # type: ignore[import-not-found]

    torch.manual_seed(1)
    network = netcode.Net()
    for value in network.state_dict().values():
        if value.is_floating_point():
            value.uniform_(0.2, 1.5)
    yield network.eval()
    sys.modules.pop("netcode")


def loaded(path: Path, **options: Any) -> Model:
    folder = path.parent / "out"
    folder.mkdir(exist_ok=True)
    return load(path, LoadOptions(samples=SAMPLES, **options), folder)


def check_same(model: Model, net: torch.nn.Module, tolerance: float = 1e-5) -> None:
    """The same answers at batches that the trace did not see, and the same ones twice."""
    graph = flat_module(load_program(model.path))
    for batch in (1, 5):
        image = torch.randn(batch, 3, 8, 8)
        with torch.no_grad():
            assert torch.allclose(graph(image)[0], net(image), rtol=tolerance, atol=tolerance)
            assert torch.equal(graph(image)[0], graph(image)[0])


def saved(net: torch.nn.Module, how: str) -> Any:
    weights = net.state_dict()
    return {
        "plain": weights,
        "data parallel": {f"module.{key}": value for key, value in weights.items()},
        "compiled": {f"_orig_mod.{key}": value for key, value in weights.items()},
        "training": {"epoch": 3, "model": weights, "optimizer": {"state": {}}, "best": 0.9},
        "lightning": {"state_dict": {f"net.{key}": value for key, value in weights.items()}, "epoch": 3},
        "wrapped twice": {"ema": {f"module.net.{key}": value for key, value in weights.items()}},
        "extra": {"model_state": {**weights, "loss.weight": torch.ones(3)}},
    }[how]


@pytest.mark.parametrize(
    "how", ["plain", "data parallel", "compiled", "training", "lightning", "wrapped twice", "extra"]
)
def test_weights_find_their_place(net: torch.nn.Module, tmp_path: Path, how: str) -> None:
    path = tmp_path / "net.pt"
    torch.save(saved(net, how), path, _use_new_zipfile_serialization=how != "plain")
    model = loaded(path, architecture="netcode:Net")
    assert model.inputs == (TensorSpec("image", "float32", ("batch", 3, 8, 8)),)
    assert model.outputs == (TensorSpec("output", "float32", ("batch", 3)),)
    assert model.parameters == sum(value.numel() for value in net.parameters())
    check_same(model, net)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_floats_are_widened(net: torch.nn.Module, tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "net.pt"
    torch.save({key: value.to(dtype) for key, value in net.state_dict().items()}, path)
    check_same(loaded(path, architecture="netcode:Net"), net, 0.05)


def test_safetensors_and_a_file_as_architecture(net: torch.nn.Module, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "net.safetensors"
    save_file(net.state_dict(), path)
    check_same(loaded(path, architecture=f"{tmp_path}/netcode.py:Net(classes=3)"), net)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weights: weights.pop("fc.bias"), "1 tensors are missing from the file \\(fc.bias\\)"),
        (lambda weights: weights.update({"fc.bias": torch.ones(9)}), "fc.bias is \\[9\\], not \\[3\\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    net: torch.nn.Module, tmp_path: Path, change: Any, words: str
) -> None:
    weights = dict(net.state_dict())
    change(weights)
    torch.save(weights, tmp_path / "net.pt")
    with pytest.raises(ModelFileError, match=words):
        loaded(tmp_path / "net.pt", architecture="netcode:Net")


def test_weights_alone_ask_for_the_architecture(net: torch.nn.Module, tmp_path: Path) -> None:
    torch.save(net.state_dict(), tmp_path / "net.pt")
    with pytest.raises(ModelFileError, match=r"weights only .* --arch module:callable"):
        loaded(tmp_path / "net.pt")


def test_a_known_network_is_recognised(tmp_path: Path) -> None:
    import torchvision

    from compressor.architectures import fitting, preprocess

    weights = torchvision.models.resnet18(num_classes=7).state_dict()
    found = fitting({f"module.{key}": weights[key] for key in sorted(weights)})
    assert found == ["torchvision.models:resnet18(num_classes=7)"]
    asked = preprocess(found[0])
    assert asked is not None
    assert (asked["resize"], asked["crop"], asked["mean"][0]) == (256, 224, 0.485)
    del weights["layer4.1.conv2.weight"]
    assert fitting(weights) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing", "not of the form"),
        ("nosuchmodule:Net", "cannot import"),
        (f"{'a' * 300}.py:Net", "there is no file"),
        (f"{'a' * 300}:Net", "cannot import"),
        ("..relative:Net", "cannot import"),
        ("netcode:Nix", "there is no 'Nix'"),
        ("netcode:Net(open('x'))", "not of the form"),
        ("netcode:Net(bogus=1)", "failed: TypeError"),
        ("netcode:torch.rand(2)", "gave a Tensor"),
    ],
)
def test_a_wrong_architecture_is_a_usage_error(
    net: torch.nn.Module, tmp_path: Path, text: str, words: str
) -> None:
    torch.save(net.state_dict(), tmp_path / "net.pt")
    with pytest.raises(UsageError, match=words):
        loaded(tmp_path / "net.pt", architecture=text)


def test_a_pickled_module_needs_trust(net: torch.nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    torch.save(net, path)
    with pytest.raises(ModelFileError, match=r"code of netcode.Net.*--trust"):
        loaded(path)
    check_same(loaded(path, trust=True), net)


def test_a_pickled_module_of_torch_needs_none(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()).eval()
    torch.save({"model": net, "epoch": 1}, tmp_path / "net.pt")
    check_same(loaded(tmp_path / "net.pt"), net)


def test_a_class_of_a_script_is_named(
    net: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(net), "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Net", type(net), raising=False)
    torch.save(net, tmp_path / "net.pt")
    with pytest.raises(ModelFileError, match=r"__main__.Net: the class Net"):
        loaded(tmp_path / "net.pt", trust=True)


def test_torchscript_is_switched_to_evaluation(net: torch.nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    torch.jit.script(net.train()).save(str(path))
    model = loaded(path)
    assert model.parameters == sum(value.numel() for value in net.parameters())
    check_same(model, net.eval())


def test_a_trace_made_in_training_mode_is_switched_too(net: torch.nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    before = {key: value.clone() for key, value in net.state_dict().items()}
    torch.jit.trace(net.train(), torch.rand(2, 3, 8, 8), check_trace=False).save(str(path))
    model = loaded(path)
    path.unlink()
    stored = torch.export.load(str(model.path)).state_dict
    net.load_state_dict({**before, **{key: value for key, value in stored.items() if key in before}})
    check_same(model, net.eval())


def test_torchscript_with_a_branch_keeps_it(tmp_path: Path) -> None:
    class Branch(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if bool(x.sum() > 0):
                x = x * 2
            return x - 1

    path = tmp_path / "branch.pt"
    torch.jit.script(Branch()).save(str(path))
    folder = tmp_path / "out"
    folder.mkdir()
    model = load(path, LoadOptions(samples=(TensorSpec("x", "float32", (4,)),)), folder)
    graph = flat_module(load_program(model.path))
    assert graph(torch.ones(3, 4))[0].unique().tolist() == [1]
    assert graph(-torch.ones(3, 4))[0].unique().tolist() == [-2]


def test_torchscript_that_takes_a_number_is_refused(tmp_path: Path) -> None:
    class Rate(torch.nn.Module):
        def forward(self, x: torch.Tensor, rate: int) -> torch.Tensor:
            return x * rate

    torch.jit.script(Rate()).save(str(tmp_path / "net.pt"))
    with pytest.raises(UnsupportedError, match="'rate' is of type int"):
        loaded(tmp_path / "net.pt")


def test_a_real_checkpoint_with_leftovers(shared: Path, tmp_path: Path) -> None:
    asset = shared / "assets" / "speaker_lstm_resemblyzer"
    options = LoadOptions(
        f"{asset}/model.py:build", inputs=(TensorSpec("mels", "float32", ("batch", 20, 40)),)
    )
    model = load(asset / "pretrained.pt", options, tmp_path)
    assert model.parameters == 1_423_616
