"""Latencies of the ordinary tenants, in quiet and in hostile windows, as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from soak.ordinary import OrdinaryReport

ALL = "all"
_HEADING = (
    f"{'operation':10} {'quiet':>7} {'p50':>8} {'p99':>8} {'hostile':>8} {'p50':>8} {'p99':>8} "
    f"{'p50':>7} {'p99':>7}  times\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Seconds of one operation in quiet and in hostile windows, in ascending order."""

    quiet: Sequence[float]
    hostile: Sequence[float]

    def ratio(self, percent: float) -> float:
        """Return a percentile of hostile windows as a multiple of that of quiet ones."""
        return percentile(self.hostile, percent) / percentile(self.quiet, percent)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of numbers in ascending order; not a number if there is none."""
    if not ordered:
        return float("nan")
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def merge(reports: Iterable[OrdinaryReport]) -> dict[str, Latencies]:
    """Return the latencies of each operation in several reports, and of all together."""
    found: dict[str, dict[str, list[float]]] = {ALL: {"quiet": [], "hostile": []}}
    for report in reports:
        for name, kinds in report.seconds.items():
            for kind, seconds in kinds.items():
                found.setdefault(name, {"quiet": [], "hostile": []})[kind] += seconds
                found[ALL][kind] += seconds
    return {
        name: Latencies(quiet=sorted(kinds["quiet"]), hostile=sorted(kinds["hostile"]))
        for name, kinds in sorted(found.items())
    }


def table(latencies: Mapping[str, Latencies]) -> str:
    """Return a table of milliseconds and ratios."""
    text = _HEADING
    for name, one in latencies.items():
        text += f"{name:10}"
        for seconds in (one.quiet, one.hostile):
            text += f" {len(seconds):7}"
            text += "".join(f" {percentile(seconds, p) * 1e3:8.1f}" for p in (50, 99))
        text += f" {one.ratio(50):8.2f} {one.ratio(99):7.2f}\n"
    return text
