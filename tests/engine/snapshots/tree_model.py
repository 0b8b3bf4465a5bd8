"""A directory that random operations change in a sandbox and in a copy on this host."""

from __future__ import annotations

import random
import shlex

# Type, mode, size, links and target of every file, and a checksum of its content.
LISTING = (
    # Names of one file by its first name: after a copy up, the kernel counts links that are gone.
    "cd /workspace; find . ! -type d -printf '%P %i %y %m %U %s %l\\n' -o -type d "
    "-printf '%P / %y %m %U\\n' | LC_ALL=C sort | "
    "awk '$2 != \"/\" { if (!($2 in first)) first[$2] = $1; $2 = first[$2] } { print }'; "
    "find . -type f -print0 | LC_ALL=C sort -z | xargs -0r md5sum"
)

_NAMES = ("a", "b", "c", "d")


class RandomOperations:
    """Shell commands that create, change, rename and remove files below a directory."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def script(self, count: int) -> str:
        """Return a script of so many operations; those that fail change nothing."""
        steps = [f"{{ {self._operation()}; }} 2>/dev/null" for _ in range(count)]
        return "\n".join(["cd /workspace", *steps, "true"])

    def _path(self) -> str:
        depth = self._random.randint(1, 3)
        return shlex.quote("/".join(self._random.choice(_NAMES) for _ in range(depth)))

    def _operation(self) -> str:
        one, other, number = self._path(), self._path(), self._random.randrange(1 << 30)
        content = f"echo {number}"
        return self._random.choice(
            (
                f"mkdir -p {one}",
                f"mkdir -p {one}",
                # Opening a pipe waits for its other end.
                f"test -p {one} || {content} > {one}",
                f"test -p {one} || {content} > {one}",
                f"test -p {one} || {content} >> {one}",
                f"rm -f {one}",
                f"rm -rf {one}",
                f"rm -rf {one}; mkdir {one}",
                f"rm -rf {one}; mkdir -p {one}; {content} > {one}/a",
                f"mv -T {one} {other}",
                f"mv -fT {one} {other}",
                f"rm -rf {other}; mv {one} {other}",
                f"chmod {self._random.choice(('600', '644', '755', '700', '2750'))} {one}",
                f"ln -s {other} {one}",
                f"ln -sfn {number} {one}",
                f"ln {one} {other}",
                f"rm -rf {one}; mkfifo {one}",
                f"truncate -s {self._random.randrange(9000)} {one}",
                f"test -f {one} && cp --preserve=all {one} {other}",
                f"find {one} -type d -empty -delete",
            )
        )
