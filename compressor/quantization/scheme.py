"""Quantization schemes: what a runtime's integer kernels take, as data.

A scheme holds every choice that differs between runtimes and instruction sets; the rest of the package
reads it and knows no runtime by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from compressor.errors import UnsupportedError

__all__ = ["SCHEMES", "Scheme", "for_machine", "named"]


@dataclass(frozen=True)
class Scheme:
    """How a runtime wants its integers.

    `activation` is the integer type of activations, quantized per tensor with a zero point.
    Weights are int8, symmetric, one scale per output channel; biases int32 with scale
    (activation scale x weight scale).
    `pair_limit` bounds |q1| + |q2| of two weights of one sign that lie next to each other in the kernel's
    order of summation; None where the kernel adds products in int32 (see `pairs`). `pairs_restart`: a Conv
    without groups begins a new pair at every place of its window, so that an odd channel has no neighbour.
    `compute` are the operators with weights that have an integer kernel, `elementwise` the others;
    `pass_through` are dropped between two pairs of one scale, `on_integers` are written on the quantized
    tensor itself because the runtime does not move pairs over them; `absorbed` vanish into the range of a
    following pair.
    """

    name: str
    activation: Literal["uint8", "int8"]
    pair_limit: int | None
    pairs_restart: bool = False
    compute: frozenset[str] = frozenset({"Conv", "Gemm", "MatMul"})
    elementwise: frozenset[str] = frozenset(
        {"Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "Sigmoid", "LeakyRelu"}
    )
    pass_through: frozenset[str] = frozenset(
        {
            "MaxPool", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Gather",
            "Split", "Resize", "Tile",
        }
    )  # fmt: skip
    on_integers: frozenset[str] = frozenset({"Pad", "DepthToSpace"})
    absorbed: frozenset[str] = frozenset({"Relu", "Clip"})

    @property
    def codes(self) -> tuple[int, int]:
        """Smallest and largest activation code."""
        return (0, 255) if self.activation == "uint8" else (-128, 127)


# Two products of a uint8 and an int8 that are added in int16 stay below 2**15 while 255 * (|q1| + |q2|) does.
_PAIR_LIMIT = 2**15 // 255

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("ort-x86-avx2", "uint8", _PAIR_LIMIT),
        Scheme("ort-x86-vnni", "uint8", None),
        Scheme("ort-arm", "int8", None),
        Scheme("openvino-x86-avx2", "uint8", _PAIR_LIMIT, pairs_restart=True),
        Scheme("openvino-x86-vnni", "uint8", None),
        Scheme("openvino-arm", "uint8", None),
    )
}


def _by_processor(runtime: str) -> Callable[[set[str]], str]:
    def choose(flags: set[str]) -> str:
        if flags & {"asimd", "neon"}:
            return f"{runtime}-arm"
        return f"{runtime}-x86-vnni" if flags & {"avx512_vnni", "avx_vnni"} else f"{runtime}-x86-avx2"

    return choose


_FAMILIES: dict[tuple[str, str], Callable[[set[str]], str]] = {
    ("onnx", "cpu"): _by_processor("ort"),
    ("openvino", "cpu"): _by_processor("openvino"),
}


def named(name: str) -> Scheme:
    """The scheme of that name; raises `UnsupportedError` with the names that exist."""
    if name not in SCHEMES:
        raise UnsupportedError(f"there is no quantization scheme '{name}'; there are: {', '.join(SCHEMES)}")
    return SCHEMES[name]


def for_machine(runtime: str, device: str, cpu_flags: set[str]) -> str:
    """The scheme for a runtime on a device; `cpu_flags` as in /proc/cpuinfo ("avx2", "avx512_vnni").

    On x86 the pair-safe scheme is the answer unless the processor has VNNI, whose kernels add in int32.
    """
    try:
        choose = _FAMILIES[runtime, device]
    except KeyError:
        known = ", ".join(":".join(key) for key in _FAMILIES)
        raise UnsupportedError(
            f"static int8 for {runtime}:{device} is not supported by the Q/DQ quantizer; it knows {known}"
        ) from None
    return choose(cpu_flags)
