"""Signal handlers of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterator, Sequence


@contextlib.contextmanager
def handle_signals(
    signals: Sequence[signal.Signals], handler: Callable[[signal.Signals], object]
) -> Iterator[None]:
    """Call `handler` on the running loop for each of these signals during the block."""
    loop = asyncio.get_running_loop()
    for number in signals:
        loop.add_signal_handler(number, handler, number)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
