"""File identity of a worker thread while it works on a sandbox's files.

Root of the host has no id in the user namespace of a sandbox's overlay, so it cannot create
files there (EOVERFLOW). For the time of a call the thread is root of the sandbox instead, for
files only, with the five capabilities that files need.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import TYPE_CHECKING

from smokebox.errors import IsolationUnavailable

if TYPE_CHECKING:
    from smokebox.engine.jail.spec import Owner

_CLONE_FS = 0x200
_VERSION_3 = 0x20080522
# CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER and FSETID.
_FILE_CAPABILITIES = 0b11111
_UMASK = 0o022
_INVALID_ID = 0xFFFFFFFF

_libc = ctypes.CDLL(None, use_errno=True)
# Unlike setuid and the like, these change the calling thread only.
_setfsuid, _setfsgid = _libc.setfsuid, _libc.setfsgid
_capget, _capset = _libc.capget, _libc.capset
for _call in (_setfsuid, _setfsgid):
    _call.argtypes = (ctypes.c_uint,)
    _call.restype = ctypes.c_uint
for _call in (_capget, _capset):
    _call.argtypes = (ctypes.c_void_p, ctypes.c_void_p)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilitySets(ctypes.Structure):
    _fields_ = tuple(
        (f"{name}_{half}", ctypes.c_uint32)
        for half in ("low", "high")
        for name in ("effective", "permitted", "inheritable")
    )


class _ThreadCapabilities(threading.local):
    """Capabilities of a thread: its `usual` ones, and those `reduced` to the ones for files."""

    def __init__(self) -> None:
        self.header = _Header(_VERSION_3, 0)
        self.usual = _CapabilitySets()
        _capget(ctypes.addressof(self.header), ctypes.addressof(self.usual))
        self.reduced = _CapabilitySets.from_buffer_copy(self.usual)
        self.reduced.effective_low = self.usual.permitted_low & _FILE_CAPABILITIES
        self.reduced.effective_high = 0
        self.verified = False

    def set(self, sets: _CapabilitySets) -> None:
        if _capset(ctypes.addressof(self.header), ctypes.addressof(sets)):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))


_thread = _ThreadCapabilities()


class acting_as:
    """Access files as root of a sandbox in this thread. Does nothing unless we are root."""

    __slots__ = ("_gid", "_uid")

    def __init__(self, owner: Owner) -> None:
        self._uid = owner.uid
        self._gid = owner.gid

    def __enter__(self) -> None:
        if os.geteuid() != 0:
            return
        # Read first, as the change of identity drops capabilities.
        reduced = _thread.reduced
        _setfsgid(self._gid)
        _setfsuid(self._uid)
        try:
            if not _thread.verified:
                self._verify()
            _thread.set(reduced)
        except BaseException:
            self._restore()
            raise

    def __exit__(self, *_: object) -> None:
        if os.geteuid() == 0:
            self._restore()

    def _verify(self) -> None:
        # The calls report no failure; with an invalid id they return the current one.
        if _setfsuid(_INVALID_ID) != self._uid or _setfsgid(_INVALID_ID) != self._gid:
            raise IsolationUnavailable(
                f"the file identity {self._uid}:{self._gid} could not be set.",
                hint="Run the engine with CAP_SETUID and CAP_SETGID.",
                tier="namespaces",
            )
        _thread.verified = True

    def _restore(self) -> None:
        _setfsuid(0)
        _setfsgid(0)
        _thread.set(_thread.usual)


def set_thread_umask() -> None:
    """Give this thread the usual umask, independent of that of the process."""
    if _libc.unshare(_CLONE_FS) == 0:
        os.umask(_UMASK)
