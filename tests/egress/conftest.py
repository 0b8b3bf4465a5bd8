"""One S3 server for the tests of signatures, and a bucket of its own for each."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from smokebox.testing import Seaweed

if TYPE_CHECKING:
    from collections.abc import Iterator

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def seaweed() -> Iterator[Seaweed]:
    """The server."""
    with Seaweed() as server:
        yield server


@pytest.fixture
def bucket_name(seaweed: Seaweed) -> Iterator[str]:
    """An empty bucket in it."""
    name = seaweed.create_bucket(f"signed-{next(_numbers)}")
    yield name
    seaweed.delete_bucket(name)
