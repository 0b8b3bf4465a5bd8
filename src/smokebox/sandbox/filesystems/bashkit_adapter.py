"""Adapter that mounts any `Filesystem` in the virtual shell, by bashkit's stable C ABI.

The ABI is a table of C functions that take an instance, here a number that identifies a filesystem.
The shell calls them on its own threads, several at once, and they never raise.
"""

from __future__ import annotations

import _thread
import ctypes
import errno
import itertools
import logging
import os
import posixpath
import struct
import threading
from ctypes import c_bool, c_char, c_size_t, c_uint32, c_void_p, py_object
from math import floor
from typing import TYPE_CHECKING, Concatenate, ParamSpec

import bashkit

from smokebox.errors import AccessDenied, InvalidPath, SmokeboxError, Unsupported
from smokebox.sandbox.stack import deepen_engine_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from smokebox.sandbox.filesystems.filesystem import Entry, Filesystem

P = ParamSpec("P")

_log = logging.getLogger("smokebox.filesystems")


def as_bashkit(filesystem: Filesystem) -> bashkit.FileSystem:
    """Return `filesystem` as an object that a `bashkit.Bash` can mount.

    The shell follows symlinks itself and resolves absolute ones from its own root, not from the
    mount's. It keeps `filesystem` alive while it needs it; the caller closes it.
    """
    deepen_engine_threads()
    instance = _registry.add(filesystem)
    handle = _Handle(_ABI_VERSION, 0, instance, *_counters, ctypes.addressof(_table))
    try:
        # The handle is copied and the instance retained, so the capsule is no longer needed.
        return bashkit.FileSystem.from_capsule(
            _new_capsule(ctypes.addressof(handle), _CAPSULE_NAME, None)
        )
    finally:
        _registry.release(instance)


def registered_count() -> int:
    """Return the number of filesystems that shells reference."""
    return len(_registry.filesystems)


class _Registry:
    """Filesystems that shells reference, by number, with reference counts.

    A shell may release one as late as interpreter shutdown, when this module's globals are gone, so
    nothing here uses a global.
    """

    def __init__(self) -> None:
        self.filesystems: dict[int, Filesystem] = {}
        self._references: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def add(self, filesystem: Filesystem) -> int:
        """Register a filesystem with one reference, held by the caller."""
        instance = next(self._numbers)
        self.filesystems[instance], self._references[instance] = filesystem, 1
        return instance

    def retain(self, instance: int) -> None:
        with self._lock:
            self._references[instance] += 1

    def release(self, instance: int) -> None:
        with self._lock:
            self._references[instance] -= 1
            last = self._references[instance] == 0
            # Drop the filesystem outside the lock: its finalizer may run arbitrary code.
            filesystem = self.filesystems.pop(instance) if last else None
            if last:
                del self._references[instance]
        del filesystem


_registry = _Registry()
_filesystems = _registry.filesystems

_ABI_VERSION = 1
_CAPSULE_NAME = b"bashkit.FileSystem.v1"
_OK, _FAILED = 0, 1
_KINDS = {"file": 0, "directory": 1, "symlink": 2, "other": 3}
_OTHER = 0
_ERRNO_MESSAGES = {
    number: (kind, os.strerror(number).encode())
    for number, kind in {
        errno.ENOENT: 1,
        errno.EEXIST: 2,
        errno.EACCES: 3,
        errno.EPERM: 3,
        errno.EROFS: 3,
        errno.EINVAL: 4,
        errno.EISDIR: 5,
        errno.ENOTDIR: 6,
        errno.ENOTEMPTY: 7,
        errno.ENOTSUP: 8,
        errno.ELOOP: _OTHER,
        errno.ENOSPC: _OTHER,
        errno.EFBIG: _OTHER,
    }.items()
}

# Bytes: address and length. Failure: kind and message. Metadata: type, size, mode, then seconds and
# nanoseconds of the modification and creation times. Record: name and metadata.
_BYTES = struct.Struct("@PN")
_FAILURE = struct.Struct("@I4xPN")
_METADATA = struct.Struct("@B7xQI4xqI4xqI4x")
_RECORD = struct.Struct("@PNB7xQI4xqI4xqI4x")
_BytesSlot = c_char * _BYTES.size
_FailureSlot = c_char * _FAILURE.size
_MetadataSlot = c_char * _METADATA.size

_python = ctypes.pythonapi
_decode = ctypes.PYFUNCTYPE(py_object, c_size_t, c_size_t)(("PyUnicode_FromStringAndSize", _python))
_bytes = ctypes.PYFUNCTYPE(py_object, c_size_t, c_size_t)(("PyBytes_FromStringAndSize", _python))
_address = ctypes.PYFUNCTYPE(c_void_p, py_object)(("PyBytes_AsString", _python))
_increase = ctypes.PYFUNCTYPE(None, py_object)(("Py_IncRef", _python))
_decrease = ctypes.PYFUNCTYPE(None, c_void_p)(("Py_DecRef", _python))
_new_capsule = ctypes.PYFUNCTYPE(py_object, c_void_p, ctypes.c_char_p, c_void_p)(
    ("PyCapsule_New", _python)
)
# Offset from a bytes object to its data.
_HEADER = _address(b"-") - id(b"-")


# A struct of an address and a length passed by value is passed as two registers on x86-64, AArch64
# and RISC-V as long as registers last, and no function here has more than six. Declared as integers
# they cost half of what ctypes charges for a struct.
_TEXT = (c_size_t, c_size_t)
_ADDRESS = c_size_t


def _function(
    *arguments: type,
) -> Callable[[Callable[Concatenate[Filesystem, P], int | None]], ctypes._CFunctionType]:
    """Wrap a function that takes a filesystem as a C function; it may return an errno to fail."""
    prototype = ctypes.CFUNCTYPE(c_uint32, c_size_t, *arguments, c_size_t)

    def decorate(body: Callable[Concatenate[Filesystem, P], int | None]) -> ctypes._CFunctionType:
        def call(instance: int, *values: int) -> int:
            try:
                number = body(_filesystems[instance], *values[:-1])  # type: ignore[arg-type, call-arg]
                return (
                    _OK if number is None else _write_failure(values[-1], *_ERRNO_MESSAGES[number])
                )
            except BaseException as error:
                return _report_error(error, values[-1])

        return prototype(call)

    return decorate


@_function(*_TEXT, _ADDRESS)
def _read_file(filesystem: Filesystem, path: int, length: int, out: int) -> None:
    data = filesystem.read(_text(path, length))
    _lend_bytes(data if type(data) is bytes else bytes(data), out)


@_function(*_TEXT, *_TEXT)
def _write_file(filesystem: Filesystem, path: int, length: int, data: int, size: int) -> None:
    filesystem.write(_text(path, length), _bytes(data, size))


@_function(*_TEXT, *_TEXT)
def _append_file(filesystem: Filesystem, path: int, length: int, data: int, size: int) -> None:
    filesystem.append(_text(path, length), _bytes(data, size))


@_function(*_TEXT, c_bool)
def _mkdir(filesystem: Filesystem, path: int, length: int, recursive: bool) -> None:
    make = filesystem.makedirs if recursive else filesystem.mkdir
    make(_text(path, length))


@_function(*_TEXT, c_bool)
def _remove(filesystem: Filesystem, path: int, length: int, recursive: bool) -> None:
    filesystem.remove(_text(path, length), recursive=recursive)


@_function(*_TEXT, _ADDRESS)
def _stat(filesystem: Filesystem, path: int, length: int, out: int) -> int | None:
    entry = filesystem.peek(_text(path, length))
    if entry is None:
        return errno.ENOENT
    _METADATA.pack_into(_MetadataSlot.from_address(out), 0, *_metadata(entry))
    return None


@_function(*_TEXT, _ADDRESS)
def _read_dir(filesystem: Filesystem, path: int, length: int, out: int) -> None:
    entries = filesystem.listdir(_text(path, length))
    if entries:
        listing = _listing(entries)
        address = ctypes.addressof(listing)
        _listings[address] = listing
        _BYTES.pack_into(_BytesSlot.from_address(out), 0, address, len(entries))


@_function(*_TEXT, _ADDRESS)
def _exists(filesystem: Filesystem, path: int, length: int, out: int) -> None:
    c_bool.from_address(out).value = filesystem.peek(_text(path, length)) is not None


@_function(*_TEXT, *_TEXT)
def _rename(filesystem: Filesystem, source: int, length: int, target: int, size: int) -> None:
    filesystem.rename(_text(source, length), _text(target, size))


@_function(*_TEXT, *_TEXT)
def _copy(filesystem: Filesystem, source: int, length: int, target: int, size: int) -> None:
    filesystem.copy(_text(source, length), _text(target, size))


@_function(*_TEXT, *_TEXT)
def _symlink(filesystem: Filesystem, target: int, size: int, path: int, length: int) -> None:
    filesystem.symlink(_decode(target, size), _text(path, length))


@_function(*_TEXT, _ADDRESS)
def _read_link(filesystem: Filesystem, path: int, length: int, out: int) -> None:
    _lend_bytes(filesystem.readlink(_text(path, length)).encode(), out)


@_function(*_TEXT, c_uint32)
def _chmod(filesystem: Filesystem, path: int, length: int, mode: int) -> None:
    filesystem.chmod(_text(path, length), mode)


def _text(address: int, length: int) -> str:
    path: str = _decode(address, length)
    # The shell sends normalized paths; other users of `bashkit.FileSystem` may not.
    if "/." in path or "//" in path or path[:1] != "/" or path[-1] == "/":
        return "/" + posixpath.normpath("/" + path).lstrip("/")
    return path


def _free_bytes(instance: int, address: int, length: int) -> None:
    if address:
        _decrease(address - _HEADER)


def _free_dir_entries(instance: int, address: int, length: int) -> None:
    _listings.pop(address, None)


def _lend_bytes(data: bytes, out: int) -> None:
    """Lend the bytes without copying them; `_free_bytes` releases them."""
    _BYTES.pack_into(_BytesSlot.from_address(out), 0, id(data) + _HEADER, len(data))
    _increase(data)


_listings: dict[int, ctypes.Array[c_char]] = {}


def _listing(entries: Mapping[str, Entry]) -> ctypes.Array[c_char]:
    """Return the records of a directory, followed by the names they point at."""
    names = [name.encode() for name in entries]
    text = b"".join(names)
    records = len(entries) * _RECORD.size
    buffer = (c_char * (records + len(text)))()
    position = ctypes.addressof(buffer) + records
    pack = _RECORD.pack_into
    for place, name, entry in zip(
        range(0, records, _RECORD.size), names, entries.values(), strict=True
    ):
        size = len(name)
        pack(buffer, place, position, size, *_metadata(entry))
        position += size
    ctypes.memmove(ctypes.addressof(buffer) + records, text, len(text))
    return buffer


def _metadata(entry: Entry) -> tuple[int, int, int, int, int, int, int]:
    mtime = entry.mtime
    seconds = floor(mtime)
    nanoseconds = int((mtime - seconds) * 1e9)
    kind = _KINDS[entry.kind]
    return kind, entry.size, entry.mode, seconds, nanoseconds, seconds, nanoseconds


def _report_error(error: BaseException, out: int) -> int:
    """Report an error to the shell, with the C library's message where there is one."""
    try:
        if isinstance(error, KeyboardInterrupt):
            # Do not swallow it: it is raised again once the shell has returned to Python.
            _thread.interrupt_main()
        return _write_failure(out, *_failure_of(error))
    except BaseException:
        _log.exception("cannot report a filesystem's error")
        return _FAILED


def _write_failure(out: int, kind: int, message: bytes) -> int:
    slot = _FailureSlot.from_address(out)
    _FAILURE.pack_into(slot, 0, kind, id(message) + _HEADER, len(message))
    _increase(message)
    return _FAILED


def _failure_of(error: BaseException) -> tuple[int, bytes]:
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, InvalidPath | UnicodeError):
        number = errno.EINVAL
    elif isinstance(error, AccessDenied) and error.fields.get("read_only"):
        number = errno.EROFS
    elif isinstance(error, Unsupported):
        number = errno.ENOTSUP
    if number in _ERRNO_MESSAGES:
        return _ERRNO_MESSAGES[number]
    if isinstance(error, SmokeboxError):
        return _OTHER, str(error).encode(errors="replace")
    if isinstance(error, Exception):
        _log.error("a filesystem failed", exc_info=error)
    return _OTHER, os.strerror(number or errno.EIO).encode()


class _Handle(ctypes.Structure):
    _fields_ = (
        ("abi_version", c_uint32),
        ("reserved", c_uint32),
        ("instance", c_size_t),
        ("retain", c_void_p),
        ("release", c_void_p),
        ("table", c_void_p),
    )


_count = ctypes.CFUNCTYPE(None, c_size_t)
_free = ctypes.CFUNCTYPE(None, c_size_t, *_TEXT)
_reference_callbacks = (_count(_registry.retain), _count(_registry.release))
_functions = (
    _read_file,
    _write_file,
    _append_file,
    _mkdir,
    _remove,
    _stat,
    _read_dir,
    _exists,
    _rename,
    _copy,
    _symlink,
    _read_link,
    _chmod,
    _free(_free_bytes),
    _free(_free_dir_entries),
)
_counters = [ctypes.cast(function, c_void_p).value for function in _reference_callbacks]
_table = (c_void_p * len(_functions))(
    *(ctypes.cast(function, c_void_p).value for function in _functions)
)
# A shell in a user's global variable outlives this module, so its callbacks must too.
for _kept_alive in (_reference_callbacks, _functions, _table):
    _increase(_kept_alive)
