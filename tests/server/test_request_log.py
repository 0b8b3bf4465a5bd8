"""The log of a server: what went wrong is in it, and nothing that opens anything."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
from smokebox.server import request_log

request_log.configure(json={json})

def fail(headers):
    raise RuntimeError("a defect")

try:
    fail({{b"authorization": b"Bearer sbx_secret"}})
except RuntimeError:
    logging.getLogger("smokebox.server").exception("failed at /x?token=sbx_secret")
"""


@pytest.mark.parametrize("json", [False, True])
def test_a_defect_is_told_without_what_variables_hold(json: bool) -> None:
    program = PROGRAM.format(json=json)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "RuntimeError: a defect" in done.stderr
    assert "sbx_secret" not in done.stderr.replace('b"Bearer sbx_secret"', "")
