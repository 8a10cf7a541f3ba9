"""The curve of a learning-rate range test, the rate that it suggests, and its picture."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ktrainer.errors import DataError

SKIPS = "the loss scale skips all updates"  # why a range test has ended

_WIDTH = 3.0  # of the smoothing, in updates: a standard deviation
_FEWEST = 10  # updates that a curve needs
_FALL = 0.02  # of the loss that is no accident


@dataclass(frozen=True)
class RateCurve:
    """Losses by learning rate.

    Attributes:
        rates: of each update, rising.
        losses: of the batch after it, with the weights that it has made.
        smooth: the same, smoothed.
        untested: how many of the updates were not made, as the data had ended.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smooth: tuple[float, ...]
    untested: int = 0

    @classmethod
    def of(
        cls, rates: Sequence[float], losses: Sequence[float], untested: int = 0, why: str = ""
    ) -> RateCurve:
        """The curve of losses that were computed before each update.

        Args:
            why: there are no more.

        Raises:
            DataError: there are too few.
        """
        after = [loss for loss in losses[1:] if math.isfinite(loss)]
        if len(after) < _FEWEST and why == SKIPS:
            raise DataError(
                f"{why} after {len(after)} of them: the gradients are not finite at any scale. "
                "Look for what is not a number in the data or the model"
            )
        if len(after) < _FEWEST and untested:
            made = len(rates)
            raise DataError(
                f"the data ended after {made} of {made + untested} updates, too few for a curve: "
                "let fit have data that repeats"
            )
        if len(after) < _FEWEST:
            raise DataError(
                f"the loss was finite in {len(after)} updates only: begin with a lower --min, or "
                "make more --updates"
            )
        return cls(tuple(rates[: len(after)]), tuple(after), tuple(_smoothed(after)), untested)

    @classmethod
    def read(cls, path: Path) -> RateCurve:
        """The curve in the file that a range test has written."""
        found = json.loads(path.read_text())
        return cls.of(found["rates"], found["losses"], found["untested"], found["why"])

    @property
    def lowest(self) -> int:
        """Index of the lowest loss."""
        return min(range(len(self.smooth)), key=self.smooth.__getitem__)

    @property
    def steepest(self) -> int | None:
        """Index where the loss falls fastest, per decade of the rate, before it is lowest; None:
        it hardly falls."""
        end = self.lowest
        highest = max(self.smooth[: end + 1])
        if end < 2 or highest - self.smooth[end] < _FALL * abs(highest):
            return None
        return min(range(1, end), key=lambda i: self.smooth[i + 1] - self.smooth[i - 1])

    @property
    def ends_falling(self) -> bool:
        """Whether the loss is lowest at the highest rate."""
        return self.lowest >= len(self.rates) - 2

    def report(self) -> str:
        """A table of some rates, and the suggestion."""
        count = len(self.rates)
        rows = sorted({round(k * (count - 1) / 11) for k in range(12)})
        lines = ["learning rate        loss"]
        lines += [f"{self.rates[i]:13.3g}  {self.smooth[i]:10.4g}" for i in rows]
        if self.steepest is None:
            said = "no suggestion: the loss falls at none of these rates"
        else:
            said = (
                f"suggestion: {self.rates[self.steepest]:.2g}, where the loss falls fastest; it is "
                f"lowest at {self.rates[self.lowest]:.2g}"
            )
            if self.ends_falling and not self.untested:
                said += ", the highest: try a higher --max"
        if self.untested:
            said += (
                f"\nThe data ended before the last {self.untested} updates: rates above "
                f"{self.rates[-1]:.2g} are not tested. Let fit have data that repeats, or make "
                "fewer --updates."
            )
        return "\n".join([*lines, "", said])


def _smoothed(values: Sequence[float]) -> list[float]:
    """Means weighted by a bell curve around each value, which shifts nothing."""
    found = []
    reach = int(3 * _WIDTH)
    for i in range(len(values)):
        near = range(max(0, i - reach), min(len(values), i + reach + 1))
        weights = [math.exp(-(((k - i) / _WIDTH) ** 2) / 2) for k in near]
        total = sum(weight * values[k] for weight, k in zip(weights, near, strict=True))
        found.append(total / sum(weights))
    return found


_WIDTH_PX, _HEIGHT_PX, _LEFT, _TOP, _BOTTOM = 640, 400, 60, 30, 340


def draw(curve: RateCurve, path: Path) -> None:
    """Draw a curve as SVG: losses as dots, the smoothed line, and the suggestion."""
    low, high = math.log10(curve.rates[0]), math.log10(curve.rates[-1])
    least, most = min(curve.smooth), max(curve.smooth[: curve.lowest + 1])
    margin = 0.15 * (most - least or 1.0)
    floor, top = least - margin, most + margin

    def place(rate: float, loss: float) -> tuple[str, str]:
        x = _LEFT + (math.log10(rate) - low) / (high - low) * (_WIDTH_PX - _LEFT - 20)
        seen = (min(max(loss, floor), top) - floor) / (top - floor)
        return f"{x:.1f}", f"{_BOTTOM - seen * (_BOTTOM - _TOP):.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH_PX}" height="{_HEIGHT_PX}" '
        'font-family="sans-serif" font-size="12">',
        "<title>Loss by learning rate</title>",
        f'<rect width="{_WIDTH_PX}" height="{_HEIGHT_PX}" fill="white"/>',
        *_axes(place, range(math.ceil(low), math.floor(high) + 1), (floor, top)),
        *_curve(place, curve),
        "</svg>",
    ]
    path.write_text("\n".join(lines) + "\n")


Place = Callable[[float, float], tuple[str, str]]  # of a rate and a loss, in the picture


def _axes(place: Place, decades: Iterable[int], losses: tuple[float, float]) -> list[str]:
    lines, (floor, top) = [], losses
    for decade in decades:
        x, _ = place(10.0**decade, floor)
        lines.append(f'<path d="M{x} {_TOP}V{_BOTTOM}" stroke="#e4e4e4"/>')
        lines.append(f'<text x="{x}" y="{_BOTTOM + 18}" text-anchor="middle">1e{decade}</text>')
    for part in range(5):
        loss = floor + part / 4 * (top - floor)
        _, y = place(1.0, loss)
        lines.append(f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end">{loss:.3g}</text>')
    middle = (_LEFT + _WIDTH_PX) / 2
    lines.append(f'<text x="{middle}" y="384" text-anchor="middle">learning rate</text>')
    lines.append(f'<text x="{_LEFT}" y="18">loss</text>')
    return lines


def _curve(place: Place, curve: RateCurve) -> list[str]:
    lines = []
    for rate, loss in zip(curve.rates, curve.losses, strict=True):
        x, y = place(rate, loss)
        lines.append(f'<circle cx="{x}" cy="{y}" r="2" fill="#b8c6d6"/>')
    points = [place(*point) for point in zip(curve.rates, curve.smooth, strict=True)]
    line = " ".join(f"{x},{y}" for x, y in points)
    lines.append(f'<polyline points="{line}" fill="none" stroke="#0b6e99" stroke-width="2"/>')
    if curve.steepest is not None:
        x, y = points[curve.steepest]
        rate = curve.rates[curve.steepest]
        lines.append(f'<path d="M{x} {_TOP}V{_BOTTOM}" stroke="#d00000" stroke-dasharray="4 3"/>')
        lines.append(f'<circle cx="{x}" cy="{y}" r="4" fill="#d00000"/>')
        lines.append(f'<text x="{x}" y="44" dx="6" fill="#d00000">{rate:.2g}</text>')
    return lines
