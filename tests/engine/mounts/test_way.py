"""The proxy by which a store is asked that may be at public addresses only."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from smokebox.testing import SeaweedServer

# As the process that serves a mount does, with all that it asks of a store. What counts as
# public is told: a store that really is, no test could ask.
PROGRAM = """
import sys
from smokebox.engine.mounts.daemon import lead_outside
from smokebox.sandbox.access import Access
from smokebox.sandbox.filesystems.bucket import BucketFilesystem
from smokebox.sandbox.stores import open_target

endpoint, key, secret, name, opened = sys.argv[1:]
asked = []

def allowed(address):
    asked.append(address)
    return opened == "open"

lead_outside(allowed)
target = open_target(name, "", Access(endpoint=endpoint, access_key=key, secret_key=secret))
bucket = BucketFilesystem(target.store, "", place=target.place)
try:
    bucket.refresh()
    bucket.mkdir("/d")
    bucket.write("/d/large", bytes(9_000_000))
    assert bucket.read("/d/large") == bytes(9_000_000)
    bucket.write("/d/x", b"x")
    bucket.rename("/d/x", "/d/y")
    print(sorted(bucket.listdir("/d")))
    bucket.remove("/d", recursive=True)
    print(dict(bucket.listdir("/")))
except Exception as error:
    print(type(error).__name__)
assert asked, "something went another way"
"""


def told(seaweed: SeaweedServer, name: str, opened: str, endpoint: str | None = None) -> str:
    """What the program prints."""
    keys = (endpoint or seaweed.endpoint, seaweed.access_key, seaweed.secret_key)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, *keys, name, opened],
        env={**os.environ, "NO_PROXY": "127.0.0.1,localhost"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_all_that_is_asked_of_a_store_goes_this_way(
    seaweed: SeaweedServer, bucket_name: str, host: str
) -> None:
    endpoint = seaweed.endpoint.replace("127.0.0.1", host)
    assert told(seaweed, bucket_name, "open", endpoint) == "['large', 'y']\n{}\n"


def test_what_is_not_public_is_refused(seaweed: SeaweedServer, bucket_name: str) -> None:
    assert told(seaweed, bucket_name, "closed") == "AccessDenied\n"
