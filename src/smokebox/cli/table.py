"""Listings: aligned columns for people, JSON for programs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_UNITS = ((86400, "d"), (3600, "h"), (60, "m"))
_SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under a header, each column as wide as the longest in it."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        cells = (f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Print names and values, one pair a line."""
    rows = list(fields)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}".rstrip())


def print_json(value: object) -> None:
    """Print a value of the API as JSON, as the API has it."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def ago(moment: float | None) -> str:
    """How long ago a moment was, or how far off it is, such as "3m ago" or "in 2d"."""
    if moment is None:
        return "-"
    passed = time.time() - moment
    return f"{span(passed)} ago" if passed >= 0 else f"in {span(-passed)}"


def span(seconds: float) -> str:
    """A length of time for people, such as "42s" or "3d"."""
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds // size:.0f}{unit}"
    return f"{seconds:.0f}s"


def size(count: float | None) -> str:
    """A number of bytes for people, such as "1.5 GiB"."""
    if count is None:
        return "-"
    for unit, name in _SIZES:
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"


def pairs(values: dict[str, str]) -> str:
    """Names and values as they are given to options."""
    return ",".join(f"{name}={value}" for name, value in sorted(values.items()))
