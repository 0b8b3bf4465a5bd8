"""Signals by name or number, as `kill` takes them."""

from __future__ import annotations

import signal as signals

from smokebox.errors import InvalidOption

_LAST = 64


def check_signal(signal: str | int | None) -> int | None:
    """The number of a signal: of SIGTERM, TERM or 15; None for None."""
    if signal is None:
        return None
    if isinstance(signal, str):
        name = signal.upper()
        found = getattr(signals, name if name.startswith("SIG") else f"SIG{name}", None)
        if isinstance(found, signals.Signals):
            return int(found)
    elif isinstance(signal, int) and not isinstance(signal, bool) and 1 <= signal <= _LAST:
        return int(signal)
    raise InvalidOption(
        f"{signal!r:.80} is not a signal.",
        hint=f"Pass a name such as 'SIGTERM', or a number from 1 to {_LAST}.",
        option="signal",
        value=signal,
    )


def check_grace(grace: float) -> float:
    """`grace` itself, once it is a number of seconds."""
    if (
        isinstance(grace, bool)
        or not isinstance(grace, (int, float))
        or not 0 <= grace < float("inf")
    ):
        raise InvalidOption(
            f"grace is a number of seconds, not {grace!r:.80}.",
            hint="Pass for example grace=5, or 0 to kill at once.",
            option="grace",
            value=grace,
        )
    return float(grace)
