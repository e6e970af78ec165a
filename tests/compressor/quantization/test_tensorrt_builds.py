"""TensorRT's own parser and builder take our files, and make int8 kernels of what is quantized.

TensorRT-RTX builds engines without a GPU, and its build log lists the engine's layers with their types; to
load an engine, to inspect or to time it, takes a GPU. So the form is proven here, and no speed.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import onnx
import pytest

from compressor.quantization.lint import lint

trt = pytest.importorskip(
    "tensorrt_rtx", reason="tensorrt_rtx is not installed; it parses and builds engines"
)
RNG = np.random.default_rng(8)


def array(*shape, scale=0.2):
    return (RNG.normal(0, 1, shape) * scale).astype(np.float32)


class Log(trt.ILogger):
    """Keeps every line of the build."""

    def __init__(self):
        trt.ILogger.__init__(self)
        self.lines = []

    def log(self, severity, message):
        self.lines += message.splitlines()


def built(model, path):
    """Layers of the engine, as (kind, type of the first input, type of the first constant), counted."""
    onnx.save(model, path)
    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    assert parser.parse_from_file(str(path)), [parser.get_error(i).desc() for i in range(parser.num_errors)]
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        shapes = [tuple(size if free == -1 else free for free in tensor.shape) for size in (1, 2, 4)]
        profile.set_shape(tensor.name, *shapes)
    assert config.add_optimization_profile(profile) >= 0
    assert builder.build_serialized_network(network, config) is not None, log.lines[-5:]
    lines = [line for line in log.lines if line.startswith("Name: ") and "LayerType: " in line]
    return Counter(map(described, lines))


def described(line):
    kind = re.search(r"LayerType: (\w+)", line)[1]
    data, _, rest = line.partition("Constants: ")
    types = [re.findall(r"Datatype: (\w+)", part)[:1] for part in (data, rest.partition("Outputs: ")[0])]
    return kind, *(found[0] if found else None for found in types)


def int8(layers, kind):
    return sum(
        count for (name, *types), count in layers.items() if name == kind and types == ["Int8", "Int8"]
    )


def test_residual_blocks_and_matrices_become_int8_kernels(build, quantize, tmp_path):
    same, feeds = {"pads": [1, 1, 1, 1]}, {"x": array(4, 16, 16, 16, scale=1.0)}
    nodes = [("Conv", "x w b", "c1", same), ("Relu", "c1", "r1"), ("Conv", "r1 v b", "c2", same)]
    nodes += [("Add", "c2 r1", "a"), ("Relu", "a", "m"), ("GlobalAveragePool", "m", "p")]
    nodes += [("Flatten", "p", "f"), ("Gemm", "f g d", "y", {"transB": 1})]
    constants = {"w": array(16, 16, 3, 3), "v": array(16, 16, 3, 3), "b": array(16), "g": array(32, 16)}
    model = build(nodes, {"x": ["N", 16, 16, 16]}, {"y": ["N", 32]}, {**constants, "d": array(32)})
    made = quantize(model, feeds, "tensorrt")
    assert lint(made, "tensorrt") == []
    layers = built(made, tmp_path / "m.onnx")
    assert int8(layers, "correlation") == 2, layers
    assert int8(layers, "gemm") == 1, layers


def test_the_builder_sees_no_int8_in_a_float_file(build, tmp_path):
    model = build([("Conv", "x w", "y")], {"x": ["N", 16, 8, 8]}, {"y": None}, {"w": array(16, 16, 3, 3)})
    assert not any("Int8" in types for _, *types in built(model, tmp_path / "m.onnx"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "shape", "layers"),
    [
        ("robust/onnx_opset21_resnet20_converted.onnx", (4, 3, 32, 32), 19),
        ("yolox_nano_onnx/yolox_nano.onnx", (1, 3, 416, 416), 113),
    ],
)
def test_real_models_become_int8_kernels(file, shape, layers, shared, quantize, tmp_path):
    model = onnx.load(shared / "assets" / file)
    made = quantize(model, {model.graph.input[0].name: array(*shape, scale=1.0)}, "tensorrt")
    assert lint(made, "tensorrt") == []
    found = built(made, tmp_path / "m.onnx")
    assert int8(found, "correlation") >= layers, found
