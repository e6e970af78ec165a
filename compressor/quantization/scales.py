"""Scales and zero points of activations: one for each range, and what a runtime's kernels ask of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from compressor.quantization.layers import clip_bounds
from compressor.quantization.placement import Placement
from compressor.quantization.scheme import Scheme
from compressor.quantization.view import View
from compressor.quantization.weights import activation_parameters

if TYPE_CHECKING:
    from onnx import NodeProto

__all__ = ["activation_scales", "pad_value"]

Range = tuple[float, float]
Codes = tuple[np.float32, int]
_UNBOUNDED = (-np.inf, np.inf)
_PASSES = 16  # raising one scale may ask for raising the next one behind


def activation_scales(
    view: View, placement: Placement, ranges: Mapping[str, Range], scheme: Scheme
) -> dict[str, Codes]:
    """Scale and zero point of every root of `placement`, by its name.

    Operators with a fixed output have theirs; a root that stands for several tensors covers all of their
    ranges. Scales are raised until the scheme's ratios hold; a fixed one is not, and leaves its kernel to
    the runtime's slower fallback.
    """
    roots = dict.fromkeys(placement.pairs.values())
    fixed = {root for root in roots if _maker_op(view, root) in scheme.fixed}
    wide = {root: _range(view, placement, ranges, root) for root in roots}
    codes = {root: _codes(view, root, wide[root], scheme) for root in roots}
    for _ in range(_PASSES if scheme.ratios else 0):
        factors = _raised(view, placement, scheme, codes)
        factors = {root: factor for root, factor in factors.items() if root not in fixed}
        if not factors:
            break
        for root, factor in factors.items():
            low, high = (bound * factor for bound in wide[root][0])
            wide[root] = (low, high), _UNBOUNDED
            codes[root] = activation_parameters(low, high, scheme)
    return codes


def pad_value(view: View, node: NodeProto) -> float:
    """The constant with which a Pad fills."""
    value = view.array(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    return 0.0 if value is None else float(value.reshape(-1)[0])


def _maker_op(view: View, root: str) -> str:
    maker = view.producers.get(root)
    return "" if maker is None else maker.op_type


def _codes(view: View, root: str, wide: tuple[Range, Range], scheme: Scheme) -> Codes:
    given = scheme.fixed.get(_maker_op(view, root))
    if given is not None:
        return np.float32(given[0]), given[1]
    (low, high), bounds = wide
    return activation_parameters(low, high, scheme, bounds)


def _range(view: View, placement: Placement, ranges: Mapping[str, Range], root: str) -> tuple[Range, Range]:
    """The range of a root, and the bounds within which all its codes must lie."""
    members = placement.joined.get(root, (root,))
    low, high = min(ranges[name][0] for name in members), max(ranges[name][1] for name in members)
    maker = view.producers.get(root)
    bounds = (clip_bounds(view, maker) if maker is not None else None) or _UNBOUNDED
    bounds = bounds if len(members) == 1 else _UNBOUNDED
    for value in _padded(view, placement, root):
        low, high = min(low, value), max(high, value)
        bounds = bounds if bounds[0] <= value <= bounds[1] else _UNBOUNDED
    return (low, high), bounds


def _padded(view: View, placement: Placement, root: str) -> list[float]:
    """The values with which tensors of the range of `root` are padded."""
    nodes = [view.producers[key] for key in placement.integer_forms | placement.movers]
    return [
        pad_value(view, node)
        for node in nodes
        if node.op_type == "Pad" and placement.pairs.get(node.input[0]) == root
    ]


def _raised(view: View, placement: Placement, scheme: Scheme, codes: Mapping[str, Codes]) -> dict[str, float]:
    """Factors by which scales must grow for the ratios to hold."""
    factors: dict[str, float] = {}
    for key in placement.integer:
        node = view.producers[key]
        if node.op_type not in scheme.ratios:
            continue
        least, most = scheme.ratios[node.op_type]
        output = placement.pairs[placement.written.get(key, key)]
        inputs = [placement.pairs[name] for name in node.input if name in placement.pairs]
        if node.op_type == "Mul":
            ratios = {output: float(np.prod([codes[root][0] for root in inputs]) / codes[output][0])}
        else:
            ratios = {root: float(codes[root][0] / codes[output][0]) for root in inputs}
        for root, ratio in ratios.items():
            if ratio >= most:  # the intervals are open at the upper end
                factors[output] = max(factors.get(output, 1.0), ratio / most * (1 + 2**-20))
            elif ratio < least:
                grown = inputs[:1] if node.op_type == "Mul" else [root]
                for name in grown:
                    factors[name] = max(factors.get(name, 1.0), least / ratio * (1 + 2**-20))
    return factors
