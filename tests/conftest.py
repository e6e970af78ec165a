"""Fixtures that all tests share."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real models and data; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("MODELPRESS_SHARED", Path(__file__).parents[2] / "shared"))
    if not (folder / "assets").is_dir():
        pytest.skip(f"no real models in {folder} (set MODELPRESS_SHARED)")
    return folder


@pytest.fixture(scope="session")
def without_vnni(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process whose kernels are those of AVX2, which add in saturating int16."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("the saturating kernels are those of x86; hiding VNNI needs Linux")
    flags = set(Path("/proc/cpuinfo").read_text().split("flags", 2)[1].split("\n")[0].split())
    environment = dict(os.environ)
    if flags & {"avx512_vnni", "avx_vnni"}:
        library = tmp_path_factory.mktemp("avx2") / "avx2.so"
        source = Path(__file__).parent / "avx2.c"
        if not shutil.which("gcc"):
            pytest.skip("this processor has VNNI, and there is no gcc to build what hides it")
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        environment["LD_PRELOAD"] = str(library)
        if subprocess.run(["true"], env=environment, check=False).returncode:
            pytest.skip("this processor has VNNI and no CPUID faulting to hide it")
    return environment


@pytest.fixture(scope="session")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small convolutional classifier `net.onnx` and `data.npz` (x 120x3x12x12, y).

    The labels are what the float network itself answers, so its accuracy is 100 %.
    """
    import numpy as np
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    folder = tmp_path_factory.mktemp("net")
    rng = np.random.default_rng(0)
    weights = {
        "w0": rng.normal(0, 0.3, (16, 3, 3, 3)),
        "b0": rng.normal(0, 0.1, 16),
        "w1": rng.normal(0, 0.12, (16, 16, 3, 3)),
        "w2": rng.normal(0, 0.5, (4, 16)),
        "b2": np.zeros(4),
    }
    nodes = [
        helper.make_node("Conv", ["image", "w0", "b0"], ["c0"], "first", pads=[1] * 4),
        helper.make_node("Relu", ["c0"], ["r0"], "relu0"),
        helper.make_node("Conv", ["r0", "w1"], ["c1"], "second", pads=[1] * 4),
        helper.make_node("Add", ["c1", "r0"], ["sum"], "residual"),
        helper.make_node("Relu", ["sum"], ["r1"], "relu1"),
        helper.make_node("GlobalAveragePool", ["r1"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "w2", "b2"], ["logits"], "head", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, 12, 12])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 4])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    x = (rng.normal(0, 1, (120, 3, 12, 12)) * rng.uniform(0.3, 1.5, (120, 3, 1, 1))).astype(np.float32)

    def logits() -> np.ndarray:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return session.run(None, {"image": x})[0]

    even = -np.median(logits(), axis=0)  # so that each class is the answer for some samples
    model.graph.initializer[-1].CopyFrom(numpy_helper.from_array(even, "b2"))
    onnx.save(model, folder / "net.onnx")
    np.savez(folder / "data.npz", x=x, y=logits().argmax(1))
    return folder
