"""Names of previews: `{port}-{id}-{slug}`, the first label of a host name."""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST_LABEL = 63
"""Longest label that DNS allows."""

PATH = "/p/"
"""Start of the path form of a preview: /p/{id}/{port}/{token}/."""

TOKEN_PARAMETER = "token"
"""Parameter of the first request to a host name of a preview, which becomes a cookie."""

TOKEN_HEADER = "x-smokebox-token"
"""Header in which a program sends the token of a preview."""

# Only the id may contain hyphens.
_TARGET = re.compile(r"([1-9][0-9]{0,4})-([a-z0-9](?:[a-z0-9-]*[a-z0-9])?)-([a-z0-9_]+)")


@dataclass(frozen=True, slots=True)
class PreviewTarget:
    """The port and sandbox that a preview shows.

    A host name has a `slug`, the random part that is no secret. A path has the `token`, which
    grants access: its pages have no cookies.
    """

    port: int
    id: str
    slug: str = ""
    token: str = ""

    @property
    def label(self) -> str:
        """The preview as a label of a host name."""
        return f"{self.port}-{self.id}-{self.slug}"

    @property
    def path(self) -> str:
        """The preview as a path, for hosts with a single name."""
        return f"{PATH}{self.id}/{self.port}/{self.token}/"


def parse_label(label: str) -> PreviewTarget | None:
    """Parse a label of a host name; None if it does not name a preview."""
    found = _parse(label.lower()) if len(label) <= LONGEST_LABEL else None
    return None if found is None else PreviewTarget(found[0], found[1], slug=found[2])


def parse_path(path: str) -> PreviewTarget | None:
    """Parse the path of a request; None if it does not name a preview."""
    parts = path.partition("?")[0].split("/", 5)
    if len(parts) < 6 or parts[:2] != ["", "p"] or "-" in parts[3] + parts[4]:
        return None
    found = _parse(f"{parts[3]}-{parts[2]}-{parts[4]}")
    return None if found is None else PreviewTarget(found[0], found[1], token=found[2])


def _parse(text: str) -> tuple[int, str, str] | None:
    """Return the port, the id and the last part."""
    found = _TARGET.fullmatch(text)
    if found is None or int(found[1]) > 65535:
        return None
    return int(found[1]), found[2], found[3]
