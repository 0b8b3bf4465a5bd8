"""Tests of the option `persist`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from smokebox.agents.log.conformance import KEY, write_session
from smokebox.agents.log.memory import MemoryStore
from smokebox.agents.log.persistence import open_store
from smokebox.agents.log.postgres import PostgresStore
from smokebox.agents.log.sqlite import SqliteStore
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from pathlib import Path


async def test_true_opens_a_file_in_the_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMOKEBOX_HOME", str(tmp_path / "home"))
    store = open_store()
    await write_session(store, KEY)
    await store.aclose()
    assert (tmp_path / "home" / "agents.db").exists()


async def test_false_opens_separate_memory() -> None:
    first, second = open_store(False), open_store(False)
    await write_session(first, KEY)
    assert await second.sessions() == []


async def test_path_opens_a_file(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a.db")
    assert isinstance(store, SqliteStore)
    assert not os.path.exists(store.path), "the file is created on first use"
    await store.aclose()


async def test_file_is_shared_until_the_last_aclose(tmp_path: Path) -> None:
    first, second = open_store(f"{tmp_path}/a.db"), open_store(tmp_path / "x" / ".." / "a.db")
    assert first is second
    await first.aclose()
    await write_session(second, KEY)
    await second.aclose()
    third = open_store(f"{tmp_path}/a.db")
    assert third is not first
    assert len(await third.read(KEY)) == 1
    await third.aclose()


def test_url_opens_a_database() -> None:
    for url in ("postgres://me@host/db", "postgresql://host/db"):
        assert isinstance(open_store(url), PostgresStore)


def test_store_is_returned_unchanged() -> None:
    store = MemoryStore()
    assert open_store(store) is store


@pytest.mark.parametrize("value", ["", "mysql://me:secret@host/db", 7, None, "a\0b"])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(InvalidOption, match="persist=") as caught:
        open_store(value)  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)
    assert caught.value.option == "persist"
