"""Rounding of weights by the loss of the layer's output, not of the weights: GPTQ with pairs that fit.

Source: Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers,
2022 (arXiv:2210.17323), after Frantar and Alistarh, Optimal Brain Compression, 2022 (arXiv:2208.11580).
Weights are rounded one after the other; what rounding one of them does to the output is made good by those
that are still free, as their correlation H = E[x x^T] tells. Where the kernel adds products in pairs
(`pairs`), two neighbours are rounded together: if they would exceed the limit, they take the point on the
line |a| + |b| = limit that costs least, and the weights after them make good for that as for any rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from compressor.quantization.pairs import project, worst_pair

__all__ = ["losses", "quantize_rows", "round_rows", "spaced"]

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
_LIMIT = 127
_DAMPING = 0.03  # of the mean diagonal; the paper has 0.01, for text with more samples
_BLOCK = 64  # columns whose errors are passed on together
_SHRUNK = (0.8, 0.9)  # scales below absmax / 127, which clip the largest weights
_CANDIDATES = 5  # scales from absmax / 127 to that at which no pair exceeds the limit


def quantize_rows(
    rows: NDArray[np.floating], second: Sequence[Floats], floor: Floats, limit: int | None
) -> tuple[NDArray[np.int8], Singles]:
    """Symmetric int8 codes [channels, k] and scales [channels] of least loss for weights `rows`.

    `second` holds E[x x^T] [groups, w, w] of the vectors that meet the rows of each group, in spans along k
    whose correlation with each other counts as zero. Each row takes, of a few scales, the one with which
    rounding to nearest has the least loss; none is below `floor` [channels]. (Rounding with every scale
    and taking the best was measured, too: it costs more and fits the samples more than the layer.)
    `limit` bounds pairs, as in `pairs.project`.
    """
    exact = rows.astype(np.float64)
    singles = [part.astype(np.float32) for part in second]
    best, scales = np.full(len(rows), np.inf), np.ones(len(rows), np.float32)
    for scale in _scales(exact, floor, limit):
        trial = project(exact / scale[:, None], limit or 2 * _LIMIT)
        error = losses((exact - trial * scale[:, None].astype(np.float64)).astype(np.float32), singles)
        better = error < best
        best[better], scales[better] = error[better], scale[better]
    return round_rows(exact / scales[:, None], second, limit), scales


def round_rows(real: Floats, second: Sequence[Floats], limit: int | None) -> NDArray[np.int8]:
    """Round `real` [channels, k], in units of the scale, span by span of `second` (see `quantize_rows`)."""
    codes = np.empty(real.shape, np.int8)
    start = 0
    for part in second:
        stop = start + part.shape[1]
        codes[:, start:stop] = _Span(part).round(real[:, start:stop], limit)
        start = stop
    return codes


def spaced(second: Sequence[Floats], span: int) -> list[Floats]:
    """`second` for rows that hold a zero after every `span` weights, which meets nothing.

    Each part must begin at an even multiple of `span`, so that its pairs stay pairs.
    """
    found, start = [], 0
    for part in second:
        groups, width = part.shape[:2]
        places = np.arange(width) + np.arange(width) // span
        wide = width + width // span
        filled = np.zeros((groups, wide, wide))
        filled[:, places[:, None], places] = part
        assert start % (2 * span) == 0
        found.append(filled)
        start += width
    return found


def losses(errors: NDArray[np.floating], second: Sequence[NDArray[np.floating]]) -> Floats:
    """E[(error . x)^2] for each row of `errors` [channels, k]; channels are in the order of groups."""
    total, start = np.zeros(len(errors)), 0
    for part in second:
        groups, width = part.shape[:2]
        block = errors[:, start : start + width].reshape(groups, -1, width)
        total += ((block @ part) * block).sum(axis=2).reshape(-1)
        start += width
    return total


class _Span:
    """Rounds weights whose inputs have known second moments [groups, w, w].

    Pairs with the largest inputs come first ("act order"): they have most others to make good for them.
    `order` [groups, w] is that order, `factor` [groups, w, w] the upper triangular U with
    inverse(H) = U^T U for the damped H in that order.
    """

    def __init__(self, second: Floats) -> None:
        diagonal = np.diagonal(second, axis1=1, axis2=2)
        self.groups, self.width = diagonal.shape
        self.order = _pair_order(diagonal)
        size = diagonal.mean(axis=1)
        size = np.where(size > 0, size, 1)[:, None, None]  # only ratios of U count
        rows, columns = self.order[:, :, None], self.order[:, None, :]
        damped = second[np.arange(self.groups)[:, None, None], rows, columns] / size
        factor = _inverse(_upper(damped, _DAMPING).astype(np.float32))
        self.factor = np.ascontiguousarray(factor, np.float32)

    def round(self, real: Floats, limit: int | None) -> NDArray[np.int8]:
        """Codes for `real` [channels, w]."""
        channels = real.reshape(self.groups, -1, self.width).transpose(0, 2, 1)
        rest = np.take_along_axis(channels, self.order[:, :, None], axis=1).astype(np.float32)
        codes = np.empty_like(rest)  # as `rest`: [groups, w, channels of a group]
        for start in range(0, self.width, _BLOCK):
            stop = min(start + _BLOCK, self.width)
            errors = self._round_block(rest, codes, start, stop, limit)
            rest[:, stop:] -= self.factor[:, start:stop, stop:].transpose(0, 2, 1) @ errors
        found = np.empty(codes.shape, np.int8)
        np.put_along_axis(found, self.order[:, :, None], codes.astype(np.int8), axis=1)
        return found.transpose(0, 2, 1).reshape(real.shape)

    def _round_block(
        self, rest: Singles, codes: Singles, start: int, stop: int, limit: int | None
    ) -> Singles:
        """Fill in `codes` from `start` to `stop`, passing errors on in `rest` so far; gives the errors."""
        errors = np.empty_like(rest[:, start:stop])
        for first in range(start, stop, 2):
            last = min(first + 2, stop)
            part = self.factor[:, first:last, first:last]
            codes[:, first:last] = _round_pair(rest[:, first:last], part, limit)
            for place in range(first, last):
                error = rest[:, place] - codes[:, place]
                error /= self.factor[:, place, place, None]
                later = self.factor[:, place, place + 1 : stop, None]
                rest[:, place + 1 : stop] -= later * error[:, None]
                errors[:, place - start] = error
        return errors


def _upper(symmetric: Floats, damping: float) -> Floats:
    """The upper triangular R with R R^T = `symmetric` [groups, w, w] + `damping`.

    Its inverse is U with U^T U = inverse of that: found so, no inverse is factored. Covariances that are
    small beside the means lose their definiteness to cancellation; they are damped more until it is back.
    """
    identity = np.eye(symmetric.shape[-1])
    for exponent in range(6):
        damped = symmetric + damping * 10**exponent * identity
        try:
            return np.asarray(np.linalg.cholesky(damped[:, ::-1, ::-1])[:, ::-1, ::-1])
        except np.linalg.LinAlgError:
            continue
    return np.broadcast_to(identity, symmetric.shape)  # nothing is known: rounding to nearest


def _inverse(upper: Singles) -> Singles:
    """The inverse of upper triangular matrices [groups, w, w], by halves: a tenth of inv's time."""
    width = upper.shape[-1]
    if width <= _BLOCK:
        return np.asarray(np.linalg.inv(upper))
    half = width // 2
    found = np.zeros_like(upper)
    found[:, :half, :half] = _inverse(upper[:, :half, :half])
    found[:, half:, half:] = _inverse(upper[:, half:, half:])
    found[:, :half, half:] = -found[:, :half, :half] @ upper[:, :half, half:] @ found[:, half:, half:]
    return found


def _round_pair(real: Singles, factor: Singles, limit: int | None) -> Singles:
    """Codes for one or two neighbours `real` [groups, 2, channels]; `factor` [groups, 2, 2] is part of U."""
    codes = np.clip(np.rint(real), -_LIMIT, _LIMIT)
    if real.shape[1] == 1:
        return np.asarray(codes)
    share = (factor[:, 0, 1] / factor[:, 0, 0])[:, None]
    left = real[:, 1] - (real[:, 0] - codes[:, 0]) * share
    codes[:, 1] = np.clip(np.rint(left), -_LIMIT, _LIMIT)
    if limit is not None:
        bad = (codes[:, 0] * codes[:, 1] > 0) & (np.abs(codes).sum(axis=1) > limit)
        if bad.any():
            group = np.nonzero(bad)[0]
            codes.transpose(0, 2, 1)[bad] = _on_line(
                real.transpose(0, 2, 1)[bad], factor[group], np.sign(codes[:, 0][bad]), limit
            )
    return np.asarray(codes)


def _on_line(real: Singles, factor: Singles, sign: Singles, limit: int) -> Singles:
    """The codes sign x (t, limit - t) of least loss for `real` [n, 2], `factor` [n, 2, 2], `sign` [n].

    With U = (u, v; 0, w) the loss is ((a - t) / u)^2 plus the square of what is left of b after the first
    error was passed on, over w.
    """
    a, b = (real * sign[:, None]).T
    u, w = factor[:, 0, 0], factor[:, 1, 1]
    share = factor[:, 0, 1] / u
    left = b - a * share - limit
    ratio = np.square(u / w)  # scales both terms by u^2
    t = (a - left * (1 + share) * ratio) / (1 + np.square(1 + share) * ratio)
    t = np.clip(np.rint(t), limit - _LIMIT, _LIMIT)
    return np.asarray(np.stack([t, limit - t], axis=1) * sign[:, None])


def _pair_order(diagonal: Floats) -> NDArray[np.intp]:
    """Places [groups, k] in pairs, those with the largest second moments first; a single last one stays."""
    groups, k = diagonal.shape
    even = k // 2 * 2
    pairs = np.argsort(-diagonal[:, :even].reshape(groups, -1, 2).sum(axis=2), axis=1, kind="stable")
    order = np.stack([2 * pairs, 2 * pairs + 1], axis=2).reshape(groups, even)
    single = np.broadcast_to(np.arange(even, k), (groups, k - even))
    return np.concatenate([order, single], axis=1)


def _scales(rows: Floats, floor: Floats, limit: int | None) -> list[Singles]:
    """The scales to try, [channels] each."""
    plain = np.abs(rows).max(axis=1, initial=0.0) / _LIMIT
    safe = plain if limit is None else np.maximum(plain, worst_pair(rows) / limit)
    count = 1 if limit is None else _CANDIDATES
    found = [plain * share for share in _SHRUNK]
    found += [plain + share * (safe - plain) for share in np.linspace(0.0, 1.0, count)]
    return [np.maximum(scale, floor).astype(np.float32) for scale in found]
