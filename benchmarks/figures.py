"""
Figures: medians, percentiles, ratios, goals, and the table on the screen.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs


@attrs.frozen
class Goal:
    """
    What a figure is to reach, on the embedded server and on a faster one. None: no goal there.
    """

    sign: Literal[">=", "<="]
    embedded: float | None
    faster: float | None

    def limit(self, *, is_embedded: bool) -> float | None:
        return self.embedded if is_embedded else self.faster

    def is_met(self, value: float, *, is_embedded: bool) -> bool | None:
        """
        Return whether *value* reaches the goal; None where there is no goal.
        """
        limit = self.limit(is_embedded=is_embedded)
        if limit is None:
            return None
        return value >= limit if self.sign == ">=" else value <= limit


@attrs.frozen(kw_only=True)
class Row:
    """
    One line of the result: a figure of the library, beside its floor where there is one.
    """

    measure: str
    name: str
    unit: str
    ours: float
    floor: float | None = None
    #: Ours divided by the floor: the median over the pairs of neighbouring runs.
    ratio: float | None = None
    goal: Goal | None = None
    note: str = ""
    #: The single runs, in their order.
    samples: Mapping[str, Sequence[float]] = attrs.field(factory=dict)

    @property
    def judged(self) -> float:
        """
        The value that the goal speaks of: the ratio where there is one.
        """
        return self.ours if self.ratio is None else self.ratio

    def as_json(self, *, is_embedded: bool) -> dict[str, Any]:
        limit = None if self.goal is None else self.goal.limit(is_embedded=is_embedded)
        goal = None
        if self.goal is not None and limit is not None:
            goal = {
                "sign": self.goal.sign,
                "limit": limit,
                "met": self.goal.is_met(self.judged, is_embedded=is_embedded),
            }
        return {
            "measure": self.measure,
            "name": self.name,
            "unit": self.unit,
            "ours": self.ours,
            "floor": self.floor,
            "ratio": self.ratio,
            "goal": goal,
            "note": self.note,
            "samples": {name: list(values) for name, values in self.samples.items()},
        }


def compared(
    measure: str,
    name: str,
    unit: str,
    ours: Sequence[float],
    floor: Sequence[float],
    *,
    goal: Goal | None = None,
    note: str = "",
) -> Row:
    """
    Make the row of runs that took turns: ``ours[n]`` and ``floor[n]`` were neighbours in time.
    """
    return Row(
        measure=measure,
        name=name,
        unit=unit,
        ours=statistics.median(ours),
        floor=statistics.median(floor),
        ratio=median_ratio(ours, floor),
        goal=goal,
        note=note,
        samples={"ours": ours, "floor": floor},
    )


def median_ratio(ours: Sequence[float], floor: Sequence[float]) -> float:
    """
    Return the median of the quotients of pairs.

    Runs that took turns share the state of the machine, which a quotient of medians would mix.
    A pair whose floor is 0 says nothing and is left out.

    Raises:
        ValueError: If the lengths differ, or no pair is left.
    """
    quotients = [a / b for a, b in zip(ours, floor, strict=True) if b]
    if not quotients:
        msg = "no pair with a floor above 0"
        raise ValueError(msg)
    return statistics.median(quotients)


def percentile(values: Sequence[float], percent: float) -> float:
    """
    Return the smallest of *values* that at least *percent* per cent of them do not exceed.

    Raises:
        ValueError: If there are no values, or *percent* is not above 0 and at most 100.
    """
    if not values or not 0 < percent <= 100:
        msg = f"needs values and a percentage above 0 up to 100, got {len(values)} and {percent!r}"
        raise ValueError(msg)
    ordered = sorted(values)
    # Whole numbers: 0.95 * 20 would be a little more than 19.
    rank = -(-len(ordered) * round(percent * 1000) // 100_000)
    return ordered[rank - 1]


def interleaved(repetitions: int, *runs: Callable[[], float]) -> list[list[float]]:
    """
    Call *runs* in turn, A B A B; return the results of each.
    """
    results: list[list[float]] = [[] for _ in runs]
    for _ in range(repetitions):
        for result, run in zip(results, runs, strict=True):
            result.append(run())
    return results


def number(value: float) -> str:
    """
    Write *value* with about three digits that count.
    """
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1 or size == 0:
        return f"{value:.2f}".removesuffix(".00")
    return f"{value:.3f}"


def table(rows: Sequence[Row], *, is_embedded: bool) -> str:
    """
    Return the rows as text in columns, a heading before each measure.
    """
    lines: list[list[str]] = [["", "ours", "floor", "ratio", "goal", ""]]
    measure = None
    for row in rows:
        if row.measure != measure:
            measure = row.measure
            lines.append([measure])
        lines.append(_cells(row, is_embedded=is_embedded))
    widths = [max((len(line[n]) for line in lines if len(line) > n), default=0) for n in range(5)]
    return "\n".join(
        line[0]
        if len(line) == 1
        else "  ".join(
            [
                line[0].ljust(widths[0]),
                *(line[n].rjust(widths[n]) for n in range(1, 4)),
                line[4].ljust(widths[4]),
                line[5],
            ]
        ).rstrip()
        for line in lines
    )


def _cells(row: Row, *, is_embedded: bool) -> list[str]:
    goal, verdict = "", ""
    limit = None if row.goal is None else row.goal.limit(is_embedded=is_embedded)
    if row.goal is not None and limit is not None:
        goal = f"{row.goal.sign} {number(limit)}"
        verdict = "ok" if row.goal.is_met(row.judged, is_embedded=is_embedded) else "MISSED"
    unit = f" {row.unit}" if row.unit else ""
    return [
        f"  {row.name}",
        f"{number(row.ours)}{unit}",
        "" if row.floor is None else f"{number(row.floor)}{unit}",
        "" if row.ratio is None else number(row.ratio),
        goal,
        "  ".join(part for part in (verdict, row.note) if part),
    ]
