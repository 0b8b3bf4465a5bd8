"""Becoming an ordinary user, to whom this checkout must be open."""

from __future__ import annotations

from pathlib import Path

NOBODY = 65534
CHECKOUT = Path(__file__).parents[1]
# Shows this checkout where it is, but below directories that everybody may pass, to the
# program that follows and to nobody else.
OPEN = """
set -e
here=$(pwd)
hold=$(mktemp -d)
mount --bind "$1" "$hold"
mount -t tmpfs -o mode=755 tmpfs "$2"
mkdir -p "$1"
mount --move "$hold" "$1"
rmdir "$hold"
cd "$here"
shift 2
exec "$@"
"""


def as_nobody() -> list[str]:
    """What to put before a command, for root."""
    drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    closed = [folder for folder in CHECKOUT.parents if not folder.stat().st_mode & 0o001]
    if not closed:
        return drop
    apart = ["unshare", "--mount", "--propagation", "private"]
    return [*apart, "sh", "-c", OPEN, "sh", str(CHECKOUT), str(closed[-1]), *drop]
