"""How much all sandboxes of a host asked of the network, since it was opened."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smokebox.types import NetworkEvent, NetworkVerdict


class Traffic:
    """Events by what became of them, and bytes as the sandboxes saw them."""

    def __init__(self) -> None:
        self.events: Counter[NetworkVerdict] = Counter()
        self.sent = 0
        self.received = 0

    def count(self, event: NetworkEvent) -> None:
        """Add what a journal was told."""
        self.events[event.verdict] += 1
        self.sent += event.sent
        self.received += event.received
