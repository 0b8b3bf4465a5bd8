"""Who a worker thread is while it touches a sandbox's files.

Root of the host has no id in the user namespace that a sandbox's overlay is mounted in,
so what it made there would belong to nobody (EOVERFLOW). For a while the thread is root
of the sandbox instead, for files only, with the five capabilities that files need.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import TYPE_CHECKING

from smokebox.errors import IsolationUnavailable

if TYPE_CHECKING:
    from smokebox.engine.jail.api import Owner

_CLONE_FS = 0x200
_VERSION_3 = 0x20080522
# CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER and FSETID.
_FOR_FILES = 0b11111
_UMASK = 0o022
_NOBODY = 0xFFFFFFFF

_libc = ctypes.CDLL(None, use_errno=True)
# Unlike setuid and its like, these change the calling thread only.
_setfsuid, _setfsgid = _libc.setfsuid, _libc.setfsgid
_capget, _capset = _libc.capget, _libc.capset
for _call in (_setfsuid, _setfsgid):
    _call.argtypes = (ctypes.c_uint,)
    _call.restype = ctypes.c_uint
for _call in (_capget, _capset):
    _call.argtypes = (ctypes.c_void_p, ctypes.c_void_p)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = tuple(
        (f"{name}_{half}", ctypes.c_uint32)
        for half in ("low", "high")
        for name in ("effective", "permitted", "inheritable")
    )


class _Thread(threading.local):
    """The capabilities of a thread: those it has, and those it keeps among a sandbox's files."""

    def __init__(self) -> None:
        self.header = _Header(_VERSION_3, 0)
        self.usual = _Sets()
        _capget(ctypes.addressof(self.header), ctypes.addressof(self.usual))
        self.reduced = _Sets.from_buffer_copy(self.usual)
        self.reduced.effective_low = self.usual.permitted_low & _FOR_FILES
        self.reduced.effective_high = 0
        self.proved = False

    def set(self, sets: _Sets) -> None:
        if _capset(ctypes.addressof(self.header), ctypes.addressof(sets)):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))


_thread = _Thread()


class acting_as:
    """Be root of the sandbox, for files, in this thread. Does nothing unless we are root."""

    __slots__ = ("_gid", "_uid")

    def __init__(self, owner: Owner) -> None:
        self._uid = owner.uid
        self._gid = owner.gid

    def __enter__(self) -> None:
        if os.geteuid() != 0:
            return
        # Looked at first, as the change of identity takes capabilities away.
        reduced = _thread.reduced
        _setfsgid(self._gid)
        _setfsuid(self._uid)
        try:
            if not _thread.proved:
                self._prove()
            _thread.set(reduced)
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *_: object) -> None:
        if os.geteuid() == 0:
            self._leave()

    def _prove(self) -> None:
        # A change that is refused is not reported; an id that nobody has asks for the present.
        if _setfsuid(_NOBODY) != self._uid or _setfsgid(_NOBODY) != self._gid:
            raise IsolationUnavailable(
                f"the file identity {self._uid}:{self._gid} could not be taken.",
                hint="Run the engine with CAP_SETUID and CAP_SETGID.",
                tier="namespaces",
            )
        _thread.proved = True

    def _leave(self) -> None:
        _setfsuid(0)
        _setfsgid(0)
        _thread.set(_thread.usual)


def own_umask() -> None:
    """Give this thread a file mode mask of its own, the usual one, whatever the process has."""
    if _libc.unshare(_CLONE_FS) == 0:
        os.umask(_UMASK)
