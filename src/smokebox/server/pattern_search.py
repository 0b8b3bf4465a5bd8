"""A program that tries a regular expression on lines, for as long as that may take.

It stands alone and is run by `patterns`: the search of a pattern that somebody sent can take
for ever on a line that somebody else wrote, and holds up everything in its process.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys

CPU_SECONDS = 1.0
MEMORY = 1 << 30
MOST_IN_GROUPS = 1 << 20


def answer(request: dict[str, object]) -> dict[str, object]:
    """The first line in which the pattern is found, by its number, or what is wrong with it."""
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
    """Answer one request after the other, each a line of JSON, until there are no more."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        # By default this signal ends the process, also in the middle of a search, and also
        # one whose server is no more.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        told = json.dumps(answer(json.loads(line))).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(told + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
