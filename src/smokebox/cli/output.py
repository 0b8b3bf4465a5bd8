"""Output of commands: tables, JSON, errors with hints, notices and progress bars."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

import typer

from smokebox.errors import InvalidOption, SmokeboxError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from smokebox.types import Stream

_UNITS = ((86400, "d"), (3600, "h"), (60, "m"))
_SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
# Transfers shorter than the first second get no bar.
_BAR_DELAY = 1.0
_BAR_INTERVAL = 0.1
_BAR_WIDTH = 24
_CLEAR_LINE = "\r\x1b[K"


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under a header, with aligned columns."""
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
    """Print a value of the API as JSON."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def write_chunk(name: Stream, text: str) -> None:
    """Write output of a sandbox to the same stream of this process, and flush it."""
    stream = sys.stdout if name == "stdout" else sys.stderr
    stream.write(text)
    stream.flush()


def format_age(moment: float | None) -> str:
    """Format a moment relative to the present, such as "3m ago" or "in 2d"."""
    if moment is None:
        return "-"
    passed = time.time() - moment
    return f"{format_span(passed)} ago" if passed >= 0 else f"in {format_span(-passed)}"


def format_span(seconds: float) -> str:
    """Format a duration, such as "42s" or "3d"."""
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds // size:.0f}{unit}"
    return f"{seconds:.0f}s"


def format_size(count: float | None) -> str:
    """Format a number of bytes, such as "1.5 GiB"."""
    if count is None:
        return "-"
    for unit, name in _SIZES:
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"


def format_value(value: object) -> str:
    """Format a value of a listing, such as "yes" or "-" for None."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def format_pairs(values: dict[str, str]) -> str:
    """Format names and values as options take them."""
    return ",".join(f"{name}={value}" for name, value in sorted(values.items()))


def notice(text: str) -> None:
    """Print a status line to stderr if that is a terminal."""
    if sys.stderr.isatty():
        typer.secho(text, err=True, dim=True)


def report(error: Exception) -> int:
    """Print an error and its hint to stderr, and return the exit code for it."""
    if isinstance(error, SmokeboxError):
        return _report(error.message, error.hint, 2 if isinstance(error, InvalidOption) else 1)
    # typer has had two base classes for usage errors; both have this method.
    if hasattr(error, "format_message"):
        usage: Any = error
        command = usage.ctx.command_path if getattr(usage, "ctx", None) else "smokebox"
        return _report(usage.format_message(), f"See `{command} --help`.", usage.exit_code)
    if isinstance(error, OSError):
        return _report(str(error), "`smokebox --debug ...` shows the traceback.", 1)
    hint = "This is a bug in Smokebox: `smokebox --debug ...` shows the traceback."
    return _report(f"{type(error).__name__}: {error}", hint, 1)


def _report(message: str, hint: str, code: int) -> int:
    typer.secho(f"smokebox: {message}", err=True, fg="red")
    if hint:
        typer.echo(f"  {hint}", err=True)
    return code


@contextlib.contextmanager
def progress(name: str) -> Iterator[Callable[[int, int | None], None] | None]:
    """Show a progress bar on stderr; yields its update function, or None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = _ProgressBar(name)
    try:
        yield bar.update
    finally:
        bar.clear()


class _ProgressBar:
    def __init__(self, name: str) -> None:
        self._name = name
        self._began = time.monotonic()
        self._next = self._began + _BAR_DELAY
        self._shown = False

    def update(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next, self._shown = now + _BAR_INTERVAL, True
        speed = f"{format_size(done / (now - self._began))}/s"
        if total:
            full = min(_BAR_WIDTH, done * _BAR_WIDTH // total)
            bar = f"[{'#' * full}{'.' * (_BAR_WIDTH - full)}]"
            bar = f"{bar} {format_size(done)} of {format_size(total)}"
        else:
            bar = format_size(done)
        sys.stderr.write(f"{_CLEAR_LINE}{self._name}  {bar}  {speed}")
        sys.stderr.flush()

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write(_CLEAR_LINE)
            sys.stderr.flush()
