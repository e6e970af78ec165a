from pathlib import Path

import pytest

from compressor.errors import UsageError
from compressor.options import Options, from_toml


@pytest.mark.parametrize(
    "wrong",
    [
        {"calib": 0},
        {"batch": 0},
        {"threads": -1},
        {"bench": -1.0},
        {"max_drop": -0.1},
        {"max_drop": float("nan")},
    ],
)
def test_values_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="must be"):
        Options("m.onnx", **wrong)  # type: ignore[arg-type]


def test_folder_follows_out_and_work() -> None:
    assert Options("a/m.onnx").folder == Path("m-compressed")
    assert Options("m.onnx", out="here").folder == Path("here")
    assert Options("m.onnx", out="a/small.onnx").folder == Path("a/small.onnx.work")
    assert Options("m.onnx", out="a/small.onnx", work="w").folder == Path("w")


def test_one_file_takes_one_target() -> None:
    with pytest.raises(UsageError, match="2 targets"):
        Options("m.onnx", target=("int8", "fp32"), out="small.onnx")


def test_toml_beside_the_model_names_files_relative_to_itself(tmp_path: Path) -> None:
    (tmp_path / "digits.npz").touch()
    (tmp_path / "net.py").touch()
    (tmp_path / "compress.toml").write_text(
        'data = "digits.npz:test"\narch = "net:Net"\nmax-drop = 1\n'
        'target = "int8"\ninput = ["x=?x3"]\nout = "o"\n'
    )
    options, path = from_toml(str(tmp_path / "model.pt"), trust=True)
    assert path == tmp_path / "compress.toml"
    assert options == {
        "data": f"{tmp_path / 'digits.npz'}:test",
        "arch": f"{tmp_path / 'net.py'}:Net",
        "max_drop": 1,
        "target": ("int8",),
        "input": ("x=?x3",),
        "out": str(tmp_path / "o"),
    }


def test_a_module_of_the_environment_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "compress.toml").write_text('arch = "torchvision.models:resnet18"\n')
    assert from_toml(str(tmp_path / "m.pt"))[0] == {"arch": "torchvision.models:resnet18"}


@pytest.mark.parametrize(
    "text",
    [
        'arch = "net.py:Net"',
        'arch = "net:Net"',
        """arch = "os:system('true')" """,
        """arch = "torchvision.models:_api.inspect.os.system('true')" """,
        """arch = "timm.models:load_state_dict('net.pt', weights_only=False)" """,
        'arch = "timm:../net.py:Net"',
        'data = "net.py:samples"',
        'calib-data = "net:samples"',
        'metric = "net.py:score"',
        "trust = true",
    ],
)
def test_a_table_beside_a_model_elsewhere_may_not_run_code(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.py").touch()
    (tmp_path / "compress.toml").write_text(text)
    with pytest.raises(UsageError, match=r"pass --trust if you trust it"):
        from_toml(str(tmp_path / "m.pt"))
    assert from_toml(str(tmp_path / "m.pt"), trust=True)[0]
    name = text.partition(" ")[0].replace("-", "_")
    assert from_toml(str(tmp_path / "m.pt"), given=[name])[0]
    monkeypatch.chdir(tmp_path)
    assert from_toml("m.pt")[0]


@pytest.mark.parametrize("text", ['out = "../x"', 'work = "/x"', 'out = "/x.onnx"', 'out = "a/../../b"'])
def test_a_table_beside_a_model_elsewhere_may_not_write_outside(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "compress.toml").write_text(text)
    with pytest.raises(UsageError, match=r"outside of its folder.* pass --trust"):
        from_toml(str(tmp_path / "m.pt"))
    assert from_toml(str(tmp_path / "m.pt"), trust=True)[0]
    monkeypatch.chdir(tmp_path)
    assert from_toml("m.pt")[0]


def test_a_table_beside_a_model_elsewhere_may_name_a_known_network_and_a_place_in_it(tmp_path: Path) -> None:
    arch = "torchvision.models:resnet18(num_classes=10)"
    (tmp_path / "compress.toml").write_text(f'arch = "{arch}"\nout = "made"\n')
    found = {"arch": arch, "out": str(tmp_path / "made")}
    assert from_toml(str(tmp_path / "m.pt"))[0] == found


def test_a_table_beside_a_model_elsewhere_may_name_data(tmp_path: Path) -> None:
    (tmp_path / "digits.npz").touch()
    (tmp_path / "compress.toml").write_text('data = "digits.npz:test"\nmax-drop = 1\nmetric = "top5"\n')
    found = {"data": f"{tmp_path / 'digits.npz'}:test", "max_drop": 1, "metric": "top5"}
    assert from_toml(str(tmp_path / "m.pt"))[0] == found


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("colour = 1", "colour"),
        ('batch = "many"', "batch"),
        ("batch = true", "batch"),
        ("a =", "compress.toml"),
        ("max-drop = 1\nmax_drop = 2", "max-drop is set twice"),
    ],
)
def test_what_is_wrong_in_the_table_is_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "compress.toml").write_text(text)
    with pytest.raises(UsageError, match=named):
        from_toml(str(tmp_path / "m.pt"))
