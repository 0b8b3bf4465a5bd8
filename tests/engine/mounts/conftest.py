"""A sandbox with a bucket mounted at /data, and another client of the bucket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from engine.mounts.store import Store
from smokebox.engine.mounts.request import MountRequest, parse_request
from smokebox.sandbox.access import Access

if TYPE_CHECKING:
    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox
    from smokebox.testing import SeaweedServer


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket with its endpoint and credentials."""

    name: str
    access: Access

    def at(self, path: str = "/data", *, prefix: str = "", read_only: bool = False) -> MountRequest:
        """Return the request to mount it."""
        return parse_request(
            self.name,
            path,
            cwd="/workspace",
            prefix=prefix,
            read_only=read_only,
            access=self.access,
            private=True,
        )


@pytest.fixture
def bucket(seaweed: SeaweedServer, bucket_name: str) -> Bucket:
    """An empty bucket."""
    return Bucket(
        bucket_name,
        Access(
            endpoint=seaweed.endpoint,
            region=seaweed.region,
            access_key=seaweed.access_key,
            secret_key=seaweed.secret_key,
        ),
    )


@pytest.fixture
def store(bucket: Bucket) -> Store:
    """Its objects, read by another client."""
    return Store.of(bucket.name, bucket.access)


@pytest_asyncio.fixture
async def sandbox(host: Host, bucket: Bucket) -> Sandbox:
    """A sandbox with the bucket mounted at /data."""
    sandbox = await host.create("mounted")
    await sandbox.mounts.mount(bucket.at())
    return sandbox
