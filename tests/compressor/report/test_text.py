"""Numbers as people read them."""

from __future__ import annotations

import pytest

from compressor.report import text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.02, "0.0200"),
        (0.9996, "1.00"),
        (1.374, "1.37"),
        (9.999, "10.0"),
        (13.66, "13.7"),
        (914.4, "914"),
        (1e4, "10000"),
        (None, "–"),
    ],
)
def test_milliseconds_have_three_digits(value: float | None, said: str) -> None:
    assert text.milliseconds(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.15, "0.15"),
        (-0.62, "−0.62"),
        (0.0, "0.00"),
        (0.00123, "0.0012"),
        (2e-7, "2.0e−07"),
        (123456.7, "123457"),
    ],
)
def test_amounts_keep_what_is_small(value: float, said: str) -> None:
    assert text.amount(value) == said


@pytest.mark.parametrize(
    ("share", "said"), [(1.0, "100 %"), (0.9999, "99.9 %"), (0.977, "97.7 %"), (0.0, "0.0 %")]
)
def test_only_all_is_a_hundred_percent(share: float, said: str) -> None:
    assert text.percent(share) == said


@pytest.mark.parametrize(
    ("value", "said"), [(0.62, "0.62×"), (1.405, "1.41×"), (12.34, "12.3×"), (0.012, "0.0120×")]
)
def test_ratios(value: float, said: str) -> None:
    assert text.ratio(value) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.44, "0.4 s"), (9.96, "10 s"), (59.7, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_durations(seconds: float, said: str) -> None:
    assert text.span(seconds) == said


@pytest.mark.parametrize(
    ("count", "said"), [(812, "812 B"), (4_930_112, "4.9 MB"), (123_456_789, "123 MB"), (0, "0 B")]
)
def test_sizes(count: int, said: str) -> None:
    assert text.size(count) == said


PERCENT, PLAIN = {"name": "top1", "unit": "%"}, {"name": "f1", "unit": ""}


@pytest.mark.parametrize(
    ("value", "quantity", "difference"),
    [
        (0.998, "0.9980", "0.998"),
        (0.9996, "0.9996", "1.00"),
        (0.99999, "1.000", "1.00"),
        (-0.004, "−0.004000", "−0.00400"),
        (23.4567, "23.46", "23.5"),
        (12345.6, "12350", "12300"),
        (0, "0", "0"),
        (3.2e-7, "3.200e−07", "3.20e−07"),
        (None, "–", "–"),
    ],
)
def test_metrics_without_a_unit_keep_their_digits(
    value: float | None, quantity: str, difference: str
) -> None:
    assert text.quantities(PLAIN)(value) == quantity
    assert text.differences(PLAIN)(value) == difference


def test_metrics_in_percent_have_two_decimals() -> None:
    assert text.quantities(PERCENT)(81.8461) == text.differences(PERCENT)(81.8461) == "81.85"


def test_ends_that_round_alike_get_a_digit_more() -> None:
    assert text.factors({"low": 1.108, "high": 1.1134}) == "1.108–1.113"
    assert text.factors({"low": 1.0, "high": 1.0}) == "1.00–1.00"
    assert text.factors({"low": 1.37, "high": 1.45}) == "1.37–1.45"
    assert text.between(0.108, 0.1134) == "0.108–0.113"
    assert text.between(-0.004, 0.004, text.differences(PLAIN)) == "−0.00400 to 0.00400"


def test_intervals_with_a_sign_are_words() -> None:
    assert text.interval({"value": 0.1, "low": -0.3, "high": 0.5}) == "0.10 (−0.30 to 0.50)"
    assert text.interval({"value": 1.41, "low": 1.37, "high": 1.45}) == "1.41 (1.37–1.45)"
    assert text.interval({"value": 1.41, "low": None, "high": None}) == "1.41"


@pytest.mark.parametrize("length", [1, 2, 3, 7, 20])
def test_shortening_keeps_both_ends(length: int) -> None:
    short = text.shorten("int8+prune50:onnx:cpu", length)
    assert len(short) == length
    if length >= 3:
        assert short[0] == "i"
        assert short[-1] == "u"
