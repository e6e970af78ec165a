"""OpenVINO: opens `.xml` engines (its intermediate representation) on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import ModelFileError, UnsupportedError
from compressor.model import TensorSpec
from serving.runtimes import check_feeds, check_threads

if TYPE_CHECKING:
    import openvino

    from serving.runtimes import Array, Feeds

__all__ = [
    "DESCRIPTION",
    "PACKAGE",
    "SUFFIX",
    "OpenvinoSession",
    "available",
    "compile_model",
    "devices",
    "open_session",
    "precision",
    "settings",
]

DESCRIPTION = "OpenVINO"
SUFFIX = ".xml"
PACKAGE = "openvino"

_PLUGINS = {"cpu": "CPU"}


def available() -> str | None:
    """Why OpenVINO cannot be used here; None when it can."""
    if find_spec(PACKAGE) is None:
        return (
            "the package openvino is not installed; install it with: pip install '.[openvino]' in a clone, "
            "or 'modelpress[openvino]' from a package index"
        )
    return None


def devices() -> tuple[str, ...]:
    """The devices on which a session can be asked for here."""
    return tuple(_PLUGINS)


class OpenvinoSession:
    """A compiled model: numpy arrays in, numpy arrays out, synchronous."""

    def __init__(self, compiled: openvino.CompiledModel, name: str) -> None:
        self._compiled = compiled
        self._name = name
        self.inputs = tuple(_spec(port) for port in compiled.inputs)
        self.outputs = tuple(_spec(port) for port in compiled.outputs)
        self._request = compiled.create_infer_request()

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """All outputs for one set of inputs; raises `DataError` and `UnsupportedError`."""
        arrays = self._bound(feeds, self._request)()
        return {spec.name: array for spec, array in zip(self.outputs, arrays, strict=True)}

    def bind(self, feeds: Feeds) -> Callable[[], Any]:
        """A call that runs the engine on `feeds`, which are checked now, and gives a list of arrays."""
        return self._bound(feeds, self._compiled.create_infer_request())

    def _bound(self, feeds: Feeds, request: openvino.InferRequest) -> Callable[[], list[Array]]:
        import numpy as np
        import openvino

        check_feeds(self.inputs, feeds)
        arrays = [np.ascontiguousarray(feeds[spec.name]) for spec in self.inputs]
        for index, array in enumerate(arrays):
            shared = array.ndim > 0 and array.size > 0 and array.flags.writeable
            request.set_input_tensor(index, openvino.Tensor(array, shared_memory=shared))
        count = len(self.outputs)

        def call(_kept: list[Array] = arrays) -> list[Array]:  # the request does not keep what it shares
            try:
                request.infer(share_outputs=True)
            except Exception as error:
                raise UnsupportedError(
                    f"{self._name}: the engine fails on this input: {_line(error)}"
                ) from error
            return [request.get_output_tensor(index).data.copy() for index in range(count)]

        return call


def open_session(path: Path, *, device: str, threads: int = 1, simulate: bool = False) -> OpenvinoSession:
    """Load an engine and compile it for `device`, for `threads` threads.

    `simulate` turns the low precision transformations off: the quantize/dequantize pairs of the same file
    are then computed as they are written, around float kernels. Raises `ModelFileError` when the file or
    the weights beside it cannot be read, `UnsupportedError` when the runtime cannot run it.
    """
    return OpenvinoSession(compile_model(path, device, settings(threads, simulate=simulate)), path.name)


def settings(threads: int, *, simulate: bool = False) -> dict[str, Any]:
    """Properties of engines that are measured side by side.

    Float stays float32: the CPU plugin would otherwise compute float layers in bfloat16 where the
    processor can (AMX), and quantize the inputs of layers with 8 bit weights at run time; a float
    baseline would then not be one. Threads are not pinned to cores, on which two engines would meet.
    One thread is the caller's (no stream): with a stream of one thread, OpenVINO 2026.4 loses errors and
    gives what was in memory.
    """
    check_threads(threads)
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 0 if threads == 1 else 1,
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        "ENABLE_CPU_PINNING": False,
        **({"LP_TRANSFORMS_MODE": False} if simulate else {}),
    }


def precision(path: Path, feeds: Feeds, *, device: str, threads: int = 1) -> dict[str, Any]:
    """In which types the compute of an engine really ran, from a few timed runs on `feeds`.

    See `serving.runtimes._precision.summary` for the result.
    """
    from serving.runtimes import _openvino_precision

    compiled = compile_model(path, device, {**settings(threads), "PERF_COUNT": True})
    call = OpenvinoSession(compiled, path.name).bind(feeds)
    shapes = {name: tuple(array.shape) for name, array in feeds.items()}
    return _openvino_precision.precision(_read(path), compiled, call, shapes)


def compile_model(path: Path, device: str, properties: dict[str, Any]) -> openvino.CompiledModel:
    """Compile an engine with the given properties; raises as `open_session` does."""
    import openvino

    if device not in _PLUGINS:
        raise UnsupportedError(f"OpenVINO has no device '{device}' here; it has: {', '.join(_PLUGINS)}")
    model = _read(path)
    try:
        return openvino.Core().compile_model(model, _PLUGINS[device], properties)
    except Exception as error:
        raise UnsupportedError(f"OpenVINO cannot run {path.name}: {_line(error)}") from error


def _read(path: Path) -> openvino.Model:
    import openvino

    weights = path.with_suffix(".bin")
    for file in (path, weights):
        if not file.is_file():
            raise ModelFileError(
                f"{file}: there is no such file; an OpenVINO engine is an .xml and a .bin file"
            )
    if path.suffix != SUFFIX:
        raise ModelFileError(f"{path}: an OpenVINO engine's file ends in {SUFFIX}")
    try:
        return openvino.Core().read_model(str(path), str(weights))
    except Exception as error:
        if "opset" in str(error):
            raise UnsupportedError(f"OpenVINO cannot load {path.name}: {_line(error)}") from error
        raise ModelFileError(f"{path}: this is not a whole OpenVINO engine ({_line(error)})") from error


def _line(error: Exception) -> str:
    """The last thing that OpenVINO says; before it come places in its own sources."""
    return [line.strip() for line in str(error).splitlines() if line.strip()][-1][:300]


def _spec(port: Any) -> TensorSpec:
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        return TensorSpec(_name(port), _dtype(port), ("...",))
    sizes = tuple(f"dim{axis}" if size.is_dynamic else size.get_length() for axis, size in enumerate(shape))
    return TensorSpec(_name(port), _dtype(port), sizes)


def _name(port: Any) -> str:
    """An input's own name: its tensor also has those of what compiling took out behind it."""
    own = str(port.get_node().get_friendly_name())
    return own if own in port.get_names() else str(port.get_any_name())


def _dtype(port: Any) -> str:
    return str(port.get_element_type().to_dtype().name)
