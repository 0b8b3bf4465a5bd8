"""Filesystems in Python that can be mounted in a virtual sandbox."""

from smokebox.sandbox.filesystems.filesystem import Entry, Filesystem
from smokebox.sandbox.filesystems.host import HostFilesystem
from smokebox.sandbox.filesystems.memory import MemoryFilesystem
from smokebox.sandbox.filesystems.overlay import OverlayFilesystem, ReadOnlyFilesystem

__all__ = [
    "Entry",
    "Filesystem",
    "HostFilesystem",
    "MemoryFilesystem",
    "OverlayFilesystem",
    "ReadOnlyFilesystem",
]
