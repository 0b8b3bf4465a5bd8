"""A program that matches a regular expression against lines, with a limit of CPU time.

`log_search` starts it as a process, because an untrusted pattern can take forever on an untrusted
line. It imports nothing of Smokebox.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys

CPU_SECONDS = 1.0
MEMORY = 1 << 30
# The server itself goes first.
NICENESS = 5
MOST_IN_GROUPS = 1 << 20


def search(request: dict[str, object]) -> dict[str, object]:
    """Return the number of the first line that matches, or an error of the pattern."""
    try:
        pattern = re.compile(str(request["pattern"]), int(str(request["flags"])))
        lines = request["lines"]
        assert isinstance(lines, list)
        for number, line in enumerate(lines):
            if found := pattern.search(line):
                groups = found.groups()
                if sum(map(len, filter(None, groups))) > MOST_IN_GROUPS:
                    return {"error": "its groups hold too much of a line"}
                return {"line": number, "span": found.span(), "groups": groups}
    except (ValueError, re.error, OverflowError) as error:
        return {"error": str(error)}
    except (RecursionError, MemoryError):
        return {"error": "it is too large"}
    return {}


def main() -> None:
    """Handle requests, one line of JSON each, until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    for line in sys.stdin.buffer:
        # By default this signal ends the process, even in the middle of a search, and even if
        # its server has died.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        response = json.dumps(search(json.loads(line))).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(response + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
