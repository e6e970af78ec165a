"""Quantization schemes: what a runtime's integer kernels take, as data.

A scheme holds every choice that differs between runtimes and instruction sets; the rest of the package
reads it and knows no runtime by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from compressor.errors import UnsupportedError

__all__ = ["SCHEMES", "Scheme", "for_machine", "named"]


Where = Literal["between", "inside", "behind"]
Interval = tuple[float, float]

_MOVERS = frozenset(
    {
        "MaxPool", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Gather",
        "Split", "Resize", "Tile",
    }
)  # fmt: skip
_MATRICES = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "Gather"})
_STORED = _MATRICES | {"LSTM", "GRU", "RNN"}


@dataclass(frozen=True)
class Scheme:
    """How a runtime wants its integers.

    `place` is the runtime and device that the scheme is made for, `title` says so in words.
    `activation` is the integer type of activations, quantized per tensor, with a zero point unless they are
    `symmetric`. Weights are int8 from -127 to 127, symmetric, one scale per output channel. `bias` is int32
    with scale (activation scale x weight scale), or stays float32.
    `pair_limit` bounds |q1| + |q2| of two weights of one sign that lie next to each other in the kernel's
    order of summation; None where the kernel adds products in int32 (see `pairs`). `pairs_restart`: a Conv
    without groups begins a new pair at every place of its window, so that an odd channel has no neighbour.
    `narrow` names the scheme of the same runtime and kind of processor that has such a limit.
    `channels`: convolutions that read the model's input are given a multiple of so many channels (`widen`).

    `compute` are the operators with weights that have an integer kernel, of which those of `thin` size stay
    float: (least channels, or such a multiple of channels). `elementwise` are the other operators with an
    integer kernel, taken `where` codes come from one side and go to the other ("between"), come from all
    sides and go to the other ("inside", which keeps normalization and masks in float), or come from all sides
    ("behind"). Kernels in `writes_float` may also give floats. Model `outputs` may be codes, count as readers
    of codes, or are float. `pass_through` are dropped between two pairs of one scale, `on_integers` are
    written on the quantized tensor itself because the runtime does not move pairs over them; `absorbed`
    vanish into the range of a following pair.
    `sums`: a sum behind a layer is fused into it if the other summand has a pair, and the layer none.
    `equal` are operators whose quantized inputs and outputs have one scale; `fixed` those whose output has
    a given scale and zero point; `ratios` bound (input scale / output scale) of sums, and that of the
    product of input scales for products.
    `least_scale` of weights and activations; products of two stay normal float32 numbers.
    `stores`: operators whose large weights are stored as int8 where they run in float. `guards`: the runtime
    would round layers that stay float, and run integer ones in float, unless it is kept from it (see
    `float_layers`, `matmul_sums`). `dynamic`: the runtime has kernels that quantize activations as it runs.
    """

    name: str
    title: str
    place: tuple[str, str]
    activation: Literal["uint8", "int8"]
    pair_limit: int | None = None
    pairs_restart: bool = False
    narrow: str | None = None
    channels: int = 1
    symmetric: bool = False
    bias: Literal["int32", "float32"] = "int32"
    compute: frozenset[str] = frozenset({"Conv", "Gemm", "MatMul"})
    thin: tuple[int, int] | None = None
    elementwise: frozenset[str] = frozenset(
        {"Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "Sigmoid", "LeakyRelu"}
    )
    where: Where = "between"
    writes_float: frozenset[str] = frozenset({"Gemm", "MatMul"})
    outputs: Literal["any", "codes", "float"] = "any"
    pass_through: frozenset[str] = _MOVERS
    on_integers: frozenset[str] = frozenset({"Pad", "DepthToSpace"})
    absorbed: frozenset[str] = frozenset({"Relu", "Clip"})
    sums: bool = False
    equal: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    ratios: Mapping[str, Interval] = field(default_factory=dict)
    least_scale: float = 2.0**-60
    stores: frozenset[str] = _STORED
    guards: bool = True
    dynamic: bool = True

    @property
    def codes(self) -> tuple[int, int]:
        """Smallest and largest activation code."""
        return (0, 255) if self.activation == "uint8" else (-128, 127)


_JOINS = frozenset({"Concat"})

# Two products of a uint8 and an int8 that are added in int16 stay below 2**15 while 255 * (|q1| + |q2|) does.
_PAIR_LIMIT = 2**15 // 255

# OpenVINO's recurrent kernels want constants: weights that are computed from codes are none, beside pairs.
_ORT, _OPENVINO, _CUDA = ("onnx", "cpu"), ("openvino", "cpu"), ("onnx", "cuda")

# TensorRT's parser takes zero points of 0 and float biases only; its builder moves pairs over what commutes
# with them and fuses activations and residual sums into layers. Scales must not vanish where a build casts
# them to float16. Thin layers: NVIDIA Model Optimizer.
_TENSORRT = Scheme(
    "tensorrt",
    "TensorRT",
    ("tensorrt", "cuda"),
    "int8",
    symmetric=True,
    bias="float32",
    thin=(16, 8),
    elementwise=frozenset({"AveragePool", "GlobalAveragePool"}),
    where="behind",
    writes_float=frozenset({"Conv", "Gemm", "MatMul", "Add"}),
    outputs="float",
    pass_through=frozenset(),
    on_integers=frozenset(),
    sums=True,
    equal=_MOVERS | {"Concat", "Pad"},
    least_scale=2.0**-24,
    stores=frozenset(),
    guards=False,
    dynamic=False,
)

# LiteRT 8-bit quantization specification (tensorflow.org/lite/performance/quantization_spec), with scales per
# channel for fully connected layers as its kernels take them; ratios: XNNPACK's checks of scales.
_LITERT = Scheme(
    "litert",
    "LiteRT",
    ("tflite", "cpu"),
    "int8",
    elementwise=frozenset(
        {"Add", "Sub", "Mul", "Concat", "GlobalAveragePool", "Sigmoid", "Tanh", "Softmax", "LogSoftmax",
         "LeakyRelu", "HardSwish"}
    ),
    where="inside",
    writes_float=frozenset(),
    outputs="codes",
    pass_through=_MOVERS | {"AveragePool", "Pad", "DepthToSpace"},
    on_integers=frozenset(),
    equal=frozenset({"Concat"}),
    fixed={
        "Sigmoid": (1 / 256, -128),
        "Softmax": (1 / 256, -128),
        "Tanh": (1 / 128, 0),
        "LogSoftmax": (16 / 256, 127),
    },
    ratios={"Add": (2.0**-10, 2.0**8), "Sub": (2.0**-10, 2.0**8), "Mul": (2.0**-16, 2.0**8)},
    stores=frozenset(),
    guards=False,
    dynamic=False,
)  # fmt: skip

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("ort-x86-avx2", "ONNX Runtime on x86 without VNNI", _ORT, "uint8", _PAIR_LIMIT, channels=4),
        Scheme(
            "ort-x86-vnni", "ONNX Runtime on x86 with VNNI", _ORT, "uint8", narrow="ort-x86-avx2", channels=4
        ),
        Scheme("ort-arm", "ONNX Runtime on ARM", _ORT, "int8"),
        replace(_TENSORRT, name="ort-cuda", title="ONNX Runtime's TensorRT provider", place=_CUDA),
        _TENSORRT,
        Scheme(
            "openvino-x86-avx2", "OpenVINO on x86 without VNNI", _OPENVINO, "uint8", _PAIR_LIMIT,
            pairs_restart=True, equal=_JOINS, stores=_MATRICES,
        ),
        Scheme(
            "openvino-x86-vnni", "OpenVINO on x86 with VNNI", _OPENVINO, "uint8", narrow="openvino-x86-avx2",
            equal=_JOINS, stores=_MATRICES,
        ),
        Scheme("openvino-arm", "OpenVINO on ARM", _OPENVINO, "uint8", equal=_JOINS, stores=_MATRICES),
        _LITERT,
    )
}  # fmt: skip


def named(name: str) -> Scheme:
    """The scheme of that name; raises `UnsupportedError` with the names that exist."""
    if name not in SCHEMES:
        raise UnsupportedError(f"there is no quantization scheme '{name}'; there are: {', '.join(SCHEMES)}")
    return SCHEMES[name]


def for_machine(runtime: str, device: str, cpu_flags: set[str]) -> str:
    """The scheme for a runtime on a device; `cpu_flags` as in /proc/cpuinfo ("avx2", "avx512_vnni").

    On x86 the pair-safe scheme is the answer unless the processor has VNNI, whose kernels add in int32.
    """
    here = [scheme.name for scheme in SCHEMES.values() if scheme.place == (runtime, device)]
    if not here:
        known = ", ".join(dict.fromkeys(":".join(scheme.place) for scheme in SCHEMES.values()))
        raise UnsupportedError(
            f"static int8 for {runtime}:{device} is not supported by the Q/DQ quantizer; it knows {known}"
        )
    kind = "x86-vnni" if cpu_flags & {"avx512_vnni", "avx_vnni"} else "x86-avx2"
    kind = "arm" if cpu_flags & {"asimd", "neon"} else kind
    return here[0] if len(here) == 1 else next(name for name in here if name.endswith(kind))
