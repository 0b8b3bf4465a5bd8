"""Tests of records of other versions."""

from __future__ import annotations

from typing import Any

import pytest

from smokebox.agents.log.records import (
    UPGRADES,
    VERSION,
    MessageAdded,
    Record,
    ReplyDelta,
    ToolEnded,
    decode,
    encode,
)
from smokebox.agents.messages import Text, ToolReturn, UserMessage
from smokebox.errors import StoreTooNew


def test_older_record_is_upgraded_when_read() -> None:
    def rename(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "text": record["words"]}

    def uppercase(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "text": record["text"].upper()}

    old = b'{"type":"reply_delta","reply_id":"r","words":"hello"}'
    found = decode(old, 0, where="here", latest=2, upgrades={0: rename, 1: uppercase})
    assert found == ReplyDelta("r", "HELLO")


def test_every_older_version_has_an_upgrade() -> None:
    assert set(UPGRADES) == set(range(1, VERSION))


def test_newer_record_is_an_error() -> None:
    with pytest.raises(StoreTooNew, match=f"a record of here is of version {VERSION + 1}.*Upgrade"):
        decode(b"{}", VERSION + 1, where="here")


@pytest.mark.parametrize("text", ["half \ud83d of a pair", "\0 \u2028 \U0001f600", ""])
def test_any_text_can_be_encoded(text: str) -> None:
    records: list[Record] = [
        MessageAdded("w", UserMessage((Text(text),))),
        ToolEnded("c", ToolReturn("c", "t", text)),
    ]
    clean = text.encode(errors="replace").decode()
    assert [decode(encode(one), VERSION, where="here") for one in records] == [
        MessageAdded("w", UserMessage((Text(clean),))),
        ToolEnded("c", ToolReturn("c", "t", clean)),
    ]
