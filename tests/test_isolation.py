"""The table of isolation tiers, and the docs that follow it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from smokebox.errors import InvalidOption
from smokebox.isolation import DEFAULT_TIER, TIERS, Tier, check_tier

DOCS = Path(__file__).parents[1] / "docs"


def test_table_has_every_tier() -> None:
    assert set(TIERS) == set(get_args(Tier))
    assert DEFAULT_TIER in TIERS


def test_unknown_tier_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidOption, match="'namespaces' and 'gvisor'"):
        check_tier("microvm")


@pytest.mark.parametrize("tier", TIERS)
def test_docs_describe_every_tier(tier: Tier) -> None:
    page = (DOCS / "isolation.md").read_text()
    assert re.search(rf"^\|.*\| `{tier}` \|", page, re.MULTILINE)
    assert f"## `{tier}`" in page
    for option_table in ("client.md", "linux.md"):
        assert f"`{tier}`" in (DOCS / option_table).read_text()
