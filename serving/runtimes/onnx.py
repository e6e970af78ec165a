"""ONNX Runtime: opens `.onnx` engines on CPU and CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import io
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import ModelFileError, UnsupportedError
from compressor.model import TensorSpec
from serving.runtimes import check_feeds, check_threads

if TYPE_CHECKING:
    import onnxruntime

    from serving.runtimes import Array, Feeds

__all__ = [
    "DESCRIPTION",
    "PACKAGE",
    "SUFFIX",
    "OnnxSession",
    "available",
    "devices",
    "open_session",
    "precision",
    "session_options",
]

DESCRIPTION = "ONNX Runtime"
SUFFIX = ".onnx"
PACKAGE = "onnxruntime"

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_DTYPES = {"float": "float32", "double": "float64"}
_ORT_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : (\w+) : ")
_FATAL_ONLY = 4
_PROFILED_RUNS = 9
_PROFILED_SECONDS = 10.0


def available() -> str | None:
    """Why ONNX Runtime cannot be used here; None when it can."""
    if find_spec(PACKAGE) is None:
        return "the package onnxruntime is not installed; install it with: pip install onnxruntime"
    return None


def devices() -> tuple[str, ...]:
    """The devices on which a session can be asked for here: "cpu", and "cuda" beside a GPU and its driver.

    Nothing is imported to find out.
    """
    spec = find_spec(PACKAGE)
    folder = Path(spec.origin).parent if spec and spec.origin else Path()
    built_for_cuda = any(folder.glob("capi/*onnxruntime_providers_cuda*"))
    return ("cpu", "cuda") if built_for_cuda and _gpus() else ("cpu",)


def _gpus() -> int:
    """The number of GPUs that the NVIDIA driver sees (0 without a driver)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


class OnnxSession:
    """An ONNX Runtime session: numpy arrays in, numpy arrays out, synchronous."""

    def __init__(self, session: onnxruntime.InferenceSession, name: str) -> None:
        self._session = session
        self._name = name
        self.inputs = tuple(_spec(node) for node in session.get_inputs())
        self.outputs = tuple(_spec(node) for node in session.get_outputs())
        self._names = [spec.name for spec in self.outputs]

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """All outputs for one set of inputs; raises `DataError` and `UnsupportedError`."""
        return dict(zip(self._names, self.bind(feeds)(), strict=True))

    def bind(self, feeds: Feeds) -> Callable[[], Any]:
        """A call that runs the engine on `feeds`, which are checked now, and gives a list of arrays."""
        check_feeds(self.inputs, feeds)
        arrays = dict(feeds)

        def call() -> Any:
            try:
                return self._session.run(self._names, arrays)
            except Exception as error:
                raise UnsupportedError(
                    f"{self._name}: the engine fails on this input: {_line(error)}"
                ) from error

        return call


def open_session(path: Path, *, device: str, threads: int = 1, simulate: bool = False) -> OnnxSession:
    """Load an engine on `device` with `threads` threads inside each operator.

    `simulate` turns all graph optimizations off, so that quantize/dequantize pairs run as they are
    written, around float kernels. Raises `ModelFileError` when the file cannot be read and
    `UnsupportedError` when the runtime or this machine cannot run it, also when ONNX Runtime would
    have gone back to the CPU in silence; `UsageError` for a number of threads out of range.
    """
    options = session_options(threads, simulate=simulate)
    return OnnxSession(_inference_session(path, options, device), path.name)


def session_options(threads: int, *, simulate: bool = False) -> onnxruntime.SessionOptions:
    """Options for sessions that are measured side by side.

    Threads spin while a run is on, as they do by default, but stop when it ends: an idle session
    must not take the core of the one being timed.
    """
    import onnxruntime as ort

    check_threads(threads)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = _FATAL_ONLY
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if simulate:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    return options


def precision(path: Path, feeds: Feeds, *, device: str, threads: int = 1) -> dict[str, Any]:
    """In which types the compute of an engine really ran, from a few profiled runs on `feeds`.

    See `serving.runtimes._precision.summary` for the result, and `_onnx_precision.weights_by_type` for the
    key of that name.
    """
    from serving.runtimes import _onnx_precision

    def profiled(options: onnxruntime.SessionOptions) -> str:
        session = _inference_session(path, options, device)
        call = OnnxSession(session, path.name).bind(feeds)
        began = time.monotonic()
        for run in range(_PROFILED_RUNS):
            call()
            if run and time.monotonic() - began > _PROFILED_SECONDS:
                break
        return str(session.end_profiling())

    shapes = {name: array.shape for name, array in feeds.items()}
    found = _onnx_precision.precision(path, session_options(threads), profiled, shapes)
    return {**found, "weights_by_type": _onnx_precision.weights_by_type(path)}


def _inference_session(
    path: Path, options: onnxruntime.SessionOptions, device: str
) -> onnxruntime.InferenceSession:
    import onnxruntime as ort

    provider = _provider(device)
    if not path.is_file():
        raise ModelFileError(f"{path}: there is no such engine file")
    with _quiet_about(device), _opening(path):
        session = ort.InferenceSession(
            str(path), options, providers=list(dict.fromkeys([provider, _PROVIDERS["cpu"]]))
        )
    if provider not in session.get_providers():
        raise UnsupportedError(
            f"{path.name}: device '{device}' was asked, but ONNX Runtime could not start it and would run on "
            "the CPU; check that the CUDA and cuDNN libraries of this onnxruntime-gpu are installed"
        )
    session.disable_fallback()
    return session


def _provider(device: str) -> str:
    if device not in _PROVIDERS:
        raise UnsupportedError(f"ONNX Runtime has no device '{device}' here; it has: {', '.join(_PROVIDERS)}")
    if device not in devices():
        raise UnsupportedError(
            f"device '{device}' was asked, but this machine has: {', '.join(devices())} "
            "(for cuda: a GPU, its driver and the package onnxruntime-gpu)"
        )
    return _PROVIDERS[device]


@contextmanager
def _quiet_about(device: str) -> Iterator[None]:
    """Load the CUDA libraries that came as Python packages; what ONNX Runtime prints about it is dropped."""
    import onnxruntime as ort

    if device != "cuda":
        yield
        return
    with contextlib.redirect_stdout(io.StringIO()):
        ort.preload_dlls(directory="")
        yield


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        kind = _ORT_PREFIX.match(str(error))
        if (kind and kind[1] in ("INVALID_PROTOBUF", "NO_MODEL")) or "No graph was found" in str(error):
            raise ModelFileError(f"{path}: this is not a whole ONNX file ({_line(error)})") from error
        raise UnsupportedError(f"ONNX Runtime cannot load {path.name}: {_line(error)}") from error


def _line(error: Exception) -> str:
    """ONNX Runtime's words without its prefix, in one line of bounded length."""
    return " ".join(_ORT_PREFIX.sub("", str(error)).split())[:300]


def _spec(node: Any) -> TensorSpec:
    match = re.fullmatch(r"tensor\((\w+)\)", node.type)
    if not match:
        raise UnsupportedError(f"'{node.name}' is of type {node.type}; only tensors are served")
    shape = tuple(f"dim{axis}" if size is None else size for axis, size in enumerate(node.shape))
    return TensorSpec(node.name, _DTYPES.get(match[1], match[1]), shape)
