"""The log of a server contains errors, and no secrets."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
from smokebox.server import request_log

request_log.configure(json={json})

def fail(headers):
    raise RuntimeError("a bug")

try:
    fail({{b"authorization": b"Bearer sbx_secret"}})
except RuntimeError:
    logging.getLogger("smokebox.server").exception("failed at /x?token=sbx_secret")
"""


@pytest.mark.parametrize("json", [False, True])
def test_tracebacks_contain_no_local_variables(json: bool) -> None:
    program = PROGRAM.format(json=json)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "RuntimeError: a bug" in done.stderr
    assert "sbx_secret" not in done.stderr.replace('b"Bearer sbx_secret"', "")
