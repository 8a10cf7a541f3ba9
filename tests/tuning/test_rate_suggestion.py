"""The rate that a curve of losses suggests, on curves with a known answer."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ktrainer.errors import DataError
from ktrainer.tuning.range_test_mode import RangeTest
from ktrainer.tuning.rate_suggestion import RateCurve, draw

RATES = RangeTest("", 1e-6, 1.0, 121).rates()


def falling_until(worst: float) -> RateCurve:
    """A loss that falls fastest at a rate of 0.001, and rises above `worst`."""
    losses = [2 - math.tanh(2 * (math.log10(rate) + 3)) for rate in RATES]
    losses = [
        loss + max(0.0, 9 * math.log10(r / worst)) for loss, r in zip(losses, RATES, strict=True)
    ]
    return RateCurve.of(RATES, [losses[0], *losses])


def test_rates_grow_by_the_same_factor() -> None:
    assert RATES[0] == 1e-6
    assert RATES[-1] == pytest.approx(1.0, rel=1e-12)
    assert [b / a for a, b in pairwise(RATES)] == pytest.approx([10**0.05] * 120)


def test_the_steepest_and_the_lowest() -> None:
    curve = falling_until(0.1)
    assert curve.steepest is not None
    assert curve.rates[curve.steepest] == pytest.approx(1e-3, rel=0.13)  # a step of the rates
    assert 0.03 < curve.rates[curve.lowest] < 0.13
    assert "suggestion: 0.001, where the loss falls fastest" in curve.report()
    assert "--max" not in curve.report()


def test_a_loss_is_that_of_the_rate_before_it() -> None:
    curve = RateCurve.of(RATES[:20], [float(k) for k in range(20)])
    assert curve.losses[0] == 1.0
    assert len(curve.rates) == len(curve.losses) == 19
    assert curve.smooth[9] == pytest.approx(10.0)  # a straight line stays one


def test_a_loss_that_falls_to_the_end_or_not_at_all() -> None:
    assert (
        "the highest: try a higher --max" in falling_until(1e9).report()
        or falling_until(1e9).ends_falling
    )
    flat = RateCurve.of(RATES, [2.0 + 0.001 * (k % 2) for k in range(len(RATES))])
    assert flat.steepest is None
    assert "no suggestion: the loss falls at none of these rates" in flat.report()


def test_losses_that_are_not_finite() -> None:
    losses = [2.0] * 15 + [math.nan] * 5
    assert len(RateCurve.of(RATES, losses).losses) == 14
    with pytest.raises(DataError, match="the loss was finite in 4 updates only: begin with a low"):
        RateCurve.of(RATES, losses[10:])


def test_the_picture_shows_it(tmp_path: Path) -> None:
    curve = falling_until(0.1)
    draw(curve, tmp_path / "curve.svg")
    root = ElementTree.parse(tmp_path / "curve.svg").getroot()
    shapes = [each.tag.rpartition("}")[2] for each in root]
    assert shapes.count("circle") == len(curve.losses) + 1
    assert {"1e-6", "1e-3", "1e0", "0.001", "learning rate"} <= {e.text for e in root}
    (line,) = (each for each in root if each.tag.endswith("polyline"))
    places = [float(point.partition(",")[0]) for point in line.attrib["points"].split()]
    steps = [b - a for a, b in pairwise(places)]
    assert max(steps) - min(steps) < 0.21  # rounded to a tenth: the axis is logarithmic


def test_data_that_ends_too_early() -> None:
    with pytest.raises(DataError, match="ended after 5 of 60 updates"):
        RateCurve.of([1e-3] * 5, [1.0] * 5, untested=55)
