"""A module becomes one program with a free batch, or says why it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compressor import events
from compressor.errors import UnsupportedError, UsageError
from compressor.model import TensorSpec
from compressor.parity import relative_error
from compressor.torch_graph import Origin, export, export_module, flat_module, load_program

ORIGIN = Origin("test", "0" * 64)


class Pair(torch.nn.Module):
    """Two named inputs of which one is a dictionary, an optional one, and named outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 3)

    def forward(
        self, batch: dict[str, torch.Tensor], bias: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        h = self.net(batch["zeta"]) + self.net(batch["alpha"]) * 2
        return {"scores": h if bias is None else h + bias, "zeta": batch["zeta"]}


class Tokens(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.net = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.net(self.embedding(ids)) * mask.unsqueeze(-1)
        return h.sum(1), h


def test_a_live_module_with_a_dictionary(tmp_path: Path) -> None:
    net = Pair().train()
    inputs = {"zeta": torch.rand(1, 4), "alpha": torch.rand(1, 4)}
    model = export_module(net, inputs, tmp_path)
    assert net.training, "the user's module is left as it was"
    assert [spec.shape for spec in model.inputs] == [("batch", 4)] * 2
    assert [spec.name.rpartition("_")[2] for spec in model.inputs] == ["zeta", "alpha"]
    assert [spec.name for spec in model.outputs] == ["scores", "zeta"]
    graph = flat_module(load_program(model.path))
    zeta, alpha = torch.rand(5, 4), torch.rand(5, 4)
    assert torch.allclose(graph(zeta, alpha)[0], net({"zeta": zeta, "alpha": alpha})["scores"])


def test_named_arguments_whole_numbers_and_two_free_axes(tmp_path: Path) -> None:
    net = Tokens()
    specs = [TensorSpec(name, "int64", ("batch", "dim1")) for name in ("mask", "ids")]
    model = export(net, specs, (), tmp_path / "model.pt2", ORIGIN)
    assert [str(spec) for spec in model.inputs] == ["ids=batchxdim1:int64", "mask=batchxdim1:int64"]
    assert [str(spec) for spec in model.outputs] == [
        "output_0=batchx2:float32",
        "output_1=batchxdim1x2:float32",
    ]
    ids = torch.randint(0, 8, (3, 11))
    got = flat_module(load_program(model.path))(ids, torch.ones_like(ids))
    assert torch.allclose(got[0], net(ids, torch.ones_like(ids))[0])


def test_shapes_come_from_samples_by_name(tmp_path: Path) -> None:
    samples = [
        TensorSpec("y", "int64", ()),
        TensorSpec("mask", "int64", (5,)),
        TensorSpec("ids", "int64", (5,)),
    ]
    model = export(Tokens(), (), samples, tmp_path / "model.pt2", ORIGIN)
    assert [spec.shape for spec in model.inputs] == [("batch", 5)] * 2


@pytest.mark.parametrize(
    ("inputs", "samples", "words"),
    [
        ((), (), "--input ids=.* --input mask="),
        ((TensorSpec("ids", "int64", ("batch", 5)),), (), "also takes mask"),
        ((TensorSpec("nix", "int64", ("batch", 5)),) * 2, (), "takes ids, mask"),
        ((), (TensorSpec("a", "int64", (5,)), TensorSpec("b", "int64", (5,))), "the data have a, b"),
    ],
)
def test_shapes_that_are_not_known_are_asked_for(
    tmp_path: Path, inputs: tuple[TensorSpec, ...], samples: tuple[TensorSpec, ...], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        export(Tokens(), inputs, samples, tmp_path / "model.pt2", ORIGIN)


def test_a_fixed_batch_is_kept_and_said(tmp_path: Path) -> None:
    class One(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(1, 4) * 2 if len(x) == 1 else x.view(2, 4)

    said: list[str] = []
    events.listen(lambda event: said.append(event.get("warning", "")))
    try:
        model = export(One(), (), (TensorSpec("x", "float32", (4,)),), tmp_path / "model.pt2", ORIGIN)
    finally:
        events.listen(events._default)
    assert model.inputs[0].shape == (1, 4)
    assert "fixes its batch" in said[0]


def test_a_module_that_rolls_dice_is_refused(tmp_path: Path) -> None:
    class Dice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand_like(x)

    with pytest.raises(UnsupportedError, match="different answers"):
        export(Dice(), (), (TensorSpec("x", "float32", (4,)),), tmp_path / "model.pt2", ORIGIN)


def test_a_branch_on_values_in_python_is_refused_with_the_reason(tmp_path: Path) -> None:
    class Branch(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(UnsupportedError, match=r"torch\.export cannot trace the model"):
        export(Branch(), (), (TensorSpec("x", "float32", (4,)),), tmp_path / "model.pt2", ORIGIN)


@pytest.mark.parametrize(
    ("expected", "got", "error"),
    [
        ([1.0, -4.0], [1.0, -4.4], 0.1),
        ([0.0], [0.0], 0.0),
        ([float("nan"), 1.0], [float("nan"), 1.0], 0.0),
        ([float("nan"), 1.0], [0.0, 1.0], float("inf")),
        ([1.0], [1.0, 1.0], float("inf")),
    ],
)
def test_relative_error(expected: list[float], got: list[float], error: float) -> None:
    assert relative_error(expected, got) == pytest.approx(error)
