"""Names of previews: `{port}-{id}-{token}`, the first label of a host name."""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST_LABEL = 63
"""Longest label that DNS allows."""

PATH = "/p/"
"""Start of the path form of a preview: /p/{id}/{port}/{token}/."""

# Only the id may contain hyphens.
_TARGET = re.compile(r"([1-9][0-9]{0,4})-([a-z0-9](?:[a-z0-9-]*[a-z0-9])?)-([a-z0-9_]+)")


@dataclass(frozen=True, slots=True)
class PreviewTarget:
    """The port and sandbox that a preview shows, and the token that grants access."""

    port: int
    id: str
    token: str

    @property
    def label(self) -> str:
        """The preview as a label of a host name."""
        return f"{self.port}-{self.id}-{self.token}"

    @property
    def path(self) -> str:
        """The preview as a path, for hosts with a single name."""
        return f"{PATH}{self.id}/{self.port}/{self.token}/"


def parse_label(label: str) -> PreviewTarget | None:
    """Parse a label of a host name; None if it does not name a preview."""
    return _target(label.lower()) if len(label) <= LONGEST_LABEL else None


def parse_path(path: str) -> PreviewTarget | None:
    """Parse the path of a request; None if it does not name a preview."""
    parts = path.partition("?")[0].split("/", 5)
    if len(parts) < 6 or parts[:2] != ["", "p"] or "-" in parts[3] + parts[4]:
        return None
    return _target(f"{parts[3]}-{parts[2]}-{parts[4]}")


def _target(text: str) -> PreviewTarget | None:
    found = _TARGET.fullmatch(text)
    if found is None or int(found[1]) > 65535:
        return None
    return PreviewTarget(int(found[1]), found[2], found[3])
