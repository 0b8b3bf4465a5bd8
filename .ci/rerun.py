"""Run pytest, and run the tests that failed once more, one at a time.

A test that passes the second time is printed as `FLAKY <nodeid>`. It is a defect of the test or
of the product, but only more than ALLOWED of them fail the build, so that a busy machine does not
block a change.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ALLOWED = 3
# Above this the change is broken, not the machine busy.
MOST_TO_RERUN = 20
FAILURES = 1  # pytest's exit code for "tests ran, and some failed"
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main(options: list[str]) -> int:
    LAST_FAILED.unlink(missing_ok=True)
    if (code := pytest(*options)) != FAILURES:
        return code
    failed = last_failed()
    if not 0 < len(failed) <= MOST_TO_RERUN:
        return FAILURES
    print(f"\nRunning what failed once more, one at a time: {len(failed)}", flush=True)
    code = pytest(*failed)
    again = last_failed()
    flaky = sorted(failed - again) if code in (0, FAILURES) else []
    for test in flaky:
        print(f"FLAKY {test}")
    if len(flaky) > ALLOWED:
        print(f"More than {ALLOWED} flaky tests fail the build.")
        code = code or FAILURES
    print(f"{len(flaky)} passed, {len(again)} failed")
    return code


def pytest(*options: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *options]).returncode


def last_failed() -> set[str]:
    """Return the ids of the tests that failed when they last ran."""
    return set(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
