"""The names of previews: `{port}-{id}-{token}`, the first label of a host's name."""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST_LABEL = 63
"""What DNS has room for between two dots."""

PATH = "/p/"
"""What the path form of a preview begins with: /p/{id}/{port}/{token}/."""

# Only the id may have hyphens.
_TARGET = re.compile(r"([1-9][0-9]{0,4})-([a-z0-9](?:[a-z0-9-]*[a-z0-9])?)-([a-z0-9_]+)")


@dataclass(frozen=True, slots=True)
class Target:
    """What a preview is of, and the token that opens it."""

    port: int
    id: str
    token: str

    @property
    def label(self) -> str:
        """The label that says so."""
        return f"{self.port}-{self.id}-{self.token}"

    @property
    def path(self) -> str:
        """The path that says so, for hosts that have one name only."""
        return f"{PATH}{self.id}/{self.port}/{self.token}/"


def parse_label(label: str) -> Target | None:
    """What a label says; None where it does not name a preview."""
    return _target(label.lower()) if len(label) <= LONGEST_LABEL else None


def parse_path(path: str) -> Target | None:
    """What the path of a request says; None where it does not name a preview."""
    parts = path.partition("?")[0].split("/", 5)
    if len(parts) < 6 or parts[:2] != ["", "p"] or "-" in parts[3] + parts[4]:
        return None
    return _target(f"{parts[3]}-{parts[2]}-{parts[4]}")


def _target(text: str) -> Target | None:
    found = _TARGET.fullmatch(text)
    if found is None or int(found[1]) > 65535:
        return None
    return Target(int(found[1]), found[2], found[3])
