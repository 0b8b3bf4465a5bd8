"""Attempts of a tenant to reach services of the host and its network through the server.

They are in `tenant_network.py`, which runs in a network namespace with its own addresses, so that
nothing leaves this machine even if the guard fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ADDRESSES = ("93.184.216.34/32", "10.9.8.7/32", "169.254.169.254/32")
CASES = Path(__file__).with_name("tenant_network.py")


@pytest.mark.timeout(180)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can add addresses to a network namespace")
@pytest.mark.skipif(not shutil.which("ip"), reason="there is no `ip` here")
def test_tenant_reaches_no_private_service() -> None:
    script = "ip link set lo up && " + " && ".join(f"ip addr add {one} dev lo" for one in ADDRESSES)
    options = ["-p", "no:cacheprovider", "-p", "no:randomly", "-x"]
    command = [sys.executable, "-m", "pytest", *options, str(CASES)]
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", f'{script} && exec "$@"', "sh", *command],
        cwd=CASES.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
