"""The proxy that restricts requests to a store to public addresses."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from smokebox.testing import SeaweedServer

# All requests that a mount daemon sends to a store. The test decides which addresses count as
# public, as no test can reach a public store.
PROGRAM = """
import sys
from smokebox.engine.mounts.daemon import use_guarded_proxy
from smokebox.sandbox.access import Access
from smokebox.sandbox.filesystems.bucket import BucketFilesystem
from smokebox.sandbox.stores import open_target

endpoint, key, secret, name, decision = sys.argv[1:]
checked = []

def allowed(address, port):
    checked.append(address)
    return decision == "allow"

use_guarded_proxy(allowed)
target = open_target(name, "", Access(endpoint=endpoint, access_key=key, secret_key=secret))
bucket = BucketFilesystem(target.store, "", label=target.label)
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
assert checked, "a request bypassed the proxy"
"""


def run_program(
    seaweed: SeaweedServer, name: str, decision: str, endpoint: str | None = None
) -> str:
    """Run the program and return its output."""
    keys = (endpoint or seaweed.endpoint, seaweed.access_key, seaweed.secret_key)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, *keys, name, decision],
        env={**os.environ, "NO_PROXY": "127.0.0.1,localhost"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_all_requests_to_a_store_use_the_proxy(
    seaweed: SeaweedServer, bucket_name: str, host: str
) -> None:
    endpoint = seaweed.endpoint.replace("127.0.0.1", host)
    assert run_program(seaweed, bucket_name, "allow", endpoint) == "['large', 'y']\n{}\n"


def test_private_address_is_refused(seaweed: SeaweedServer, bucket_name: str) -> None:
    assert run_program(seaweed, bucket_name, "deny") == "AccessDenied\n"
