"""Other quantizers on the same float ONNX file and the same samples, each in a process of its own.

    PYTHON scripts/_peers.py JOB.json        # what `make` starts; PYTHON has the peer's package

CPU-seconds count from when the packages are imported; the peak memory is that of the whole process.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from _cost import on_one_core, peak

__all__ = ["COSTED", "PEERS", "Peer", "PeerError", "inventory", "make", "missing"]


@dataclass(frozen=True)
class Peer:
    """A quantizer with its settings: `maker` is a function of this module, `needs` what it imports.

    `transformers_only`: it says itself that convolutional networks are not for it.
    """

    name: str
    maker: str
    needs: tuple[str, ...]
    file: str = "model.onnx"
    settings: dict[str, Any] = field(default_factory=dict)
    transformers_only: bool = False


_LAYERS = ["Conv", "Gemm", "MatMul"]  # of transformers, whose normalizations must stay float
_ORT = ("onnxruntime",)
_NNCF = ("nncf", "openvino")
PEERS = (
    Peer("ORT per-channel", "ort", _ORT),
    Peer("ORT per-channel, reduce_range", "ort", _ORT, settings={"reduce_range": True}),
    Peer(
        "ORT percentile, reduce_range",
        "ort",
        _ORT,
        settings={"reduce_range": True, "method": "Percentile", "samples": 40},
    ),
    Peer("ORT per-tensor, reduce_range", "ort", _ORT, settings={"reduce_range": True, "per_channel": False}),
    Peer("ORT dynamic", "ort_dynamic", _ORT, transformers_only=True),
    Peer("NNCF", "nncf", _NNCF, "model.xml"),
    Peer("NNCF, overflow_fix", "nncf", _NNCF, "model.xml", {"overflow_fix": "ENABLE"}),
    Peer("Quark A8W8", "quark", ("quark",), settings={"samples": 60}),
    Peer("AIMET", "aimet", ("aimet_onnx",), settings={"samples": 100}),
)
COSTED = (
    Peer("ORT min-max", "ort", _ORT),
    Peer("ORT percentile", "ort", _ORT, settings={"method": "Percentile"}),
    Peer("ORT entropy", "ort", _ORT, settings={"method": "Entropy"}),
    Peer("NNCF: min-max, fast bias correction", "nncf", _NNCF, "model.xml"),
)


class PeerError(Exception):
    """A peer is not there or could not quantize the model; the reason is its own last line."""


_INVENTORY = """
import json, sys
from importlib import metadata
owners = metadata.packages_distributions()
print(json.dumps({name: f"{owners[name][0]} {metadata.version(owners[name][0])}"
                  for name in sys.argv[1:] if name in owners}))
"""


def inventory(python: str) -> dict[str, str]:
    """The peers' packages that an interpreter has, with distribution and version, by the name of import."""
    packages = sorted({package for peer in PEERS for package in peer.needs})
    command = [python, "-c", _INVENTORY, *packages]
    try:
        found = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"--peer-python {python} is no Python that runs: {error}")
    return dict(json.loads(found.stdout))


def missing(python: str, there: dict[str, str]) -> dict[str, str]:
    """Peers whose packages are not `there`, with the words for it."""
    lacking = {peer.name: [name for name in peer.needs if name not in there] for peer in (*PEERS, *COSTED)}
    return {name: f"{python} has no {' and no '.join(names)}" for name, names in lacking.items() if names}


def make(python: str, peer: Peer, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Quantize `job["model"]`; gives `file` and its costs as `_cost.cost` does. Raises `PeerError`.

    `job` has `samples` (input: .npy of all) or `data` (a reference), `transformer`, and may have `one_core`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    request = {**job, **asdict(peer), "out": str(folder / peer.file), "result": str(folder / "result.json")}
    (folder / "job.json").write_text(json.dumps(request))
    command = [python, __file__, str(folder / "job.json")]  # some leave files where they run
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode or not (folder / peer.file).exists():
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        said = re.sub(r"\x1b\[[\d;]*m", "", lines[-1])[:200] if lines else "no reason given"
        raise PeerError(f"{said} (exit {done.returncode})")
    return {"file": str(folder / peer.file), **json.loads((folder / "result.json").read_text())}


# -------------------------------------------------------------------------- in the peer's process


class Samples:
    """Feeds of one sample each: from files of arrays, or read from a data reference as for our own calibration."""

    def __init__(self, job: dict[str, Any], limit: int | None) -> None:
        self.job, self.limit = job, limit
        self.arrays = {name: np.load(path, mmap_mode="r") for name, path in job.get("samples", {}).items()}
        count = min([len(array) for array in self.arrays.values()] or [job.get("data", {}).get("n", 0)])
        self.count = min(count, limit or count)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        if not self.arrays:
            from compressor.data import stream

            found = stream({**self.job["data"], "batch": 1})
            return (batch.inputs for batch in itertools.islice(found, self.count))
        names = self.arrays.items()
        return ({name: np.array(array[at : at + 1]) for name, array in names} for at in range(self.count))


def _reader(samples: Samples) -> Any:
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.rest = iter(samples)

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.rest, None)

    return Reader()


def ort(job: dict[str, Any], samples: Samples) -> float:
    """onnxruntime.quantization, static, Q/DQ, after its own preparation."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    settings, started = job["settings"], time.process_time()
    prepared = str(Path(job["out"]).with_name("prepared.onnx"))
    try:
        quant_pre_process(job["model"], prepared)
    except Exception:  # shapes that it cannot infer: its own message asks for this
        quant_pre_process(job["model"], prepared, skip_symbolic_shape=True)
    quantization.quantize_static(
        prepared,
        job["out"],
        _reader(samples),
        quant_format=quantization.QuantFormat.QDQ,
        op_types_to_quantize=_LAYERS if job["transformer"] else None,
        per_channel=settings.get("per_channel", True),
        reduce_range=settings.get("reduce_range", False),
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        calibrate_method=getattr(quantization.CalibrationMethod, settings.get("method", "MinMax")),
    )
    return started


def ort_dynamic(job: dict[str, Any], samples: Samples) -> float:
    """onnxruntime.quantization, weights per channel, activations at run time."""
    from onnxruntime import quantization

    started = time.process_time()
    kind = quantization.QuantType.QInt8
    quantization.quantize_dynamic(job["model"], job["out"], per_channel=True, weight_type=kind)
    return started


def nncf(job: dict[str, Any], samples: Samples) -> float:
    """NNCF's post-training quantization of the OpenVINO model, written as intermediate representation."""
    import nncf
    import openvino
    from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, OverflowFix

    started = time.process_time()
    overflow = job["settings"].get("overflow_fix")
    advanced = AdvancedQuantizationParameters(overflow_fix=OverflowFix[overflow]) if overflow else None
    made = nncf.quantize(
        openvino.Core().read_model(job["model"]),
        nncf.Dataset(samples),
        subset_size=samples.count,
        model_type=nncf.ModelType.TRANSFORMER if job["transformer"] else None,
        advanced_parameters=advanced,
    )
    openvino.save_model(made, job["out"], compress_to_fp16=False)
    return started


def quark(job: dict[str, Any], samples: Samples) -> float:
    """AMD Quark's preset A8W8."""
    from quark.onnx import ModelQuantizer
    from quark.onnx.quantization.config import Config, get_default_config

    started = time.process_time()
    config = get_default_config("A8W8")
    if job["transformer"]:
        config.op_types_to_quantize = _LAYERS
    quantizer = ModelQuantizer(Config(global_quant_config=config))
    quantizer.quantize_model(job["model"], job["out"], _reader(samples))
    return started


def aimet(job: dict[str, Any], samples: Samples) -> float:
    """AIMET's simulation with its default settings, of a transformer's layers alone, written with Q/DQ pairs."""
    import onnx
    from aimet_onnx.quantsim import QuantizationSimModel

    started = time.process_time()
    settings = {"config_file": _aimet_layers(job)} if job["transformer"] else {}
    model = onnx.load(job["model"])
    simulation = QuantizationSimModel(model, providers=["CPUExecutionProvider"], **settings)
    simulation.compute_encodings(list(samples))
    onnx.save(simulation.to_onnx_qdq(), job["out"])
    return started


def _aimet_layers(job: dict[str, Any]) -> str:
    """A file that has AIMET quantize nothing but inputs, outputs and weights of the layers."""
    layer = {
        "is_input_quantized": "True",
        "is_output_quantized": "True",
        "params": {"weight": {"is_quantized": "True", "is_symmetric": "True"}},
    }
    rules: dict[str, Any] = {
        "defaults": {"ops": {}, "params": {}, "per_channel_quantization": "True"},
        "params": {},
        "op_type": dict.fromkeys(_LAYERS, layer),
        "supergroups": [],
        "model_input": {"is_input_quantized": "True"},
        "model_output": {},
    }
    file = Path(job["out"]).with_name("aimet.json")
    file.write_text(json.dumps(rules))
    return str(file)


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    if job.get("one_core"):
        on_one_core()
    started = globals()[job["maker"]](job, Samples(job, job["settings"].get("samples")))
    ended = time.process_time()
    result = {"cpu_seconds": ended - started, "process_seconds": ended, "peak_bytes": peak()}
    Path(job["result"]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder, whose names are not the peer's
    sys.exit(main())
