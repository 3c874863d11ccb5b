# SPDX-License-Identifier: Apache-2.0
"""How a cost grows: the slope in a plot where both axes are logarithmic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

__all__ = ["FLAT", "LINEAR", "Growth", "fit"]

FLAT = 0.25
"""A slope up to here is called O(1): caches and TLB make a lookup in a larger table
slower, by a factor of 1.8 each decade at this bound."""

LINEAR = 0.75
"""A slope from here on is called O(n)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Growth:
    """What a fit found."""

    slope: float
    """Cost is about n to this power, over all n, by least squares."""
    last_slope: float
    """The same over the two largest n alone."""
    each: float
    """What each more adds, between the two largest n, in the unit of the cost."""

    @property
    def order(self) -> str:
        """``O(1)``, ``O(n)`` or ``between``, by the two largest n."""
        if self.last_slope <= FLAT:
            return "O(1)"
        return "O(n)" if self.last_slope >= LINEAR else "between"


def fit(costs: Mapping[int, float]) -> Growth | None:
    """Return how ``costs``, by n, grow; None of fewer than two points."""
    points = sorted((n, cost) for n, cost in costs.items() if n > 0 and cost > 0)
    if len(points) < 2:
        return None
    logs = [(math.log(n), math.log(cost)) for n, cost in points]
    mean_x = sum(x for x, _ in logs) / len(logs)
    mean_y = sum(y for _, y in logs) / len(logs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum(
        (x - mean_x) ** 2 for x, _ in logs
    )
    (x0, y0), (x1, y1) = logs[-2:]
    (n0, cost0), (n1, cost1) = points[-2:]
    return Growth(slope, (y1 - y0) / (x1 - x0), (cost1 - cost0) / (n1 - n0))
