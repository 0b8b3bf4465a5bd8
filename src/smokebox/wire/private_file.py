"""A file that only its owner may read, made before SQLite would make it for everybody."""

from __future__ import annotations

import contextlib
import os
import secrets


def make_private(path: str) -> None:
    """See that a file is there; one that is not is made empty, for its owner only.

    The file itself is never opened: to close it would take away the locks that SQLite has on
    it in this process, and another process would then remove its log with all that is in it.
    """
    if os.path.exists(path):
        return
    beside = f"{path}.{secrets.token_hex(8)}"
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        # Somebody else may have been quicker.
        with contextlib.suppress(FileExistsError):
            os.link(beside, path)
    finally:
        os.unlink(beside)
