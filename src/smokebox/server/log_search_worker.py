"""A program that matches a regular expression against lines, with a limit of CPU time.

`log_search` starts it as a process, because an untrusted pattern can take forever on an untrusted
line. It forks for each search, so that the end of one does not end it: the server, which has much
memory, takes long to start another. It imports nothing of Smokebox.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from typing import NoReturn

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
        pid = os.fork()
        if not pid:
            respond(line)
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status):
            write({"error": "it takes too long on a line of this log"})
        elif status:
            write({"error": "it is too large"})


def respond(line: bytes) -> NoReturn:
    """Handle one request in a process that ends with it."""
    try:
        # By default this signal ends the process, even in the middle of a search, and even if
        # its server has died.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        response = search(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        write(response)
        os._exit(0)
    finally:
        os._exit(1)


def write(response: dict[str, object]) -> None:
    """Write a response."""
    sys.stdout.buffer.write(json.dumps(response).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
