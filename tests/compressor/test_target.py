import pytest

from compressor.errors import UsageError
from compressor.target import Target


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int8", Target("int8")),
        ("int8:onnx", Target("int8", 0, "onnx")),
        ("INT8:onnx:cpu", Target("int8", 0, "onnx", "cpu")),
        ("int8+prune50:onnx", Target("int8", 50, "onnx")),
        ("int8-dynamic", Target("int8-dynamic")),
    ],
)
def test_a_target_is_read_and_printed_back(text: str, expected: Target) -> None:
    assert Target.parse(text) == expected
    assert Target.parse(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("int7", "int7"),
        ("", "''"),
        ("int8:", "int8:"),
        ("int8:onnx:cpu:0", "int8:onnx:cpu:0"),
        ("int8+prune0", "prune0"),
        ("int8+prune100", "prune100"),
        ("int8+fast", "fast"),
        ("int8+prune10+prune20", "prune20"),
    ],
)
def test_what_is_not_understood_is_named(text: str, named: str) -> None:
    with pytest.raises(UsageError, match="target") as caught:
        Target.parse(text)
    assert named in str(caught.value)


def test_baseline_is_float_on_the_same_place() -> None:
    assert str(Target.parse("int8+prune50:onnx:cpu").baseline) == "fp32:onnx:cpu"
