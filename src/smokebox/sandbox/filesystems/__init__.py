"""Filesystems in Python: what can be mounted in a virtual sandbox."""

from smokebox.sandbox.filesystems.filesystem import Entry, Filesystem

__all__ = ["Entry", "Filesystem"]
