"""Any filesystem of ours inside the shell, through bashkit's stable ABI, in ctypes.

The ABI is a table of C functions that take an instance, here a number that stands for a
`Bridge`. They are called on the shell's own threads, several at once, and never raise.
"""

from __future__ import annotations

import _thread
import ctypes
import errno
import itertools
import logging
import os
import struct
import threading
from ctypes import c_bool, c_char, c_size_t, c_uint32, c_void_p, py_object, string_at
from typing import TYPE_CHECKING, Concatenate, ParamSpec

import bashkit

from smokebox.errors import InvalidPath, SmokeboxError, Unsupported
from smokebox.sandbox.filesystems.bridge import Bridge
from smokebox.sandbox.filesystems.memory import MemoryFilesystem
from smokebox.sandbox.filesystems.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.sandbox.filesystems.filesystem import Entry, Filesystem

P = ParamSpec("P")

_log = logging.getLogger("smokebox.filesystems")


def as_bashkit(files: Filesystem | Tree, *, at: str = "/") -> bashkit.FileSystem:
    """What `files` holds, as a filesystem that a `bashkit.Bash` can mount at `at`.

    Symlinks work inside the shell, and an absolute one is seen from the root of the shell:
    that is what `at` is for. A `Tree` gives its part below `at`, with links that lead
    anywhere in the tree; those in a single filesystem never leave it. The shell asks about
    symlinks in one way only, so `test -L` is true just for those that lead nowhere, which
    `test -e` calls existing. The shell keeps `files` alive as long as it needs it, and
    closing it is left to whoever made it.
    """
    bridge = Bridge(files if isinstance(files, Tree) else _tree_of(files, at), at)
    instance = next(_instances)
    _bridges[instance], _holders[instance] = bridge, 1
    handle = _Handle(_ABI_VERSION, 0, instance, *_counting_functions, ctypes.addressof(_table))
    try:
        # The handle is copied and the instance retained: the capsule has served its turn.
        return bashkit.FileSystem.from_capsule(
            _new_capsule(ctypes.addressof(handle), _CAPSULE_NAME, None)
        )
    finally:
        _release(instance)


def open_bridges() -> int:
    """How many filesystems shells hold on to."""
    return len(_bridges)


def _tree_of(filesystem: Filesystem, at: str) -> Tree:
    return Tree(filesystem) if at == "/" else Tree(MemoryFilesystem(), {at: filesystem})


_bridges: dict[int, Bridge] = {}
_holders: dict[int, int] = {}
_instances = itertools.count(1)
_counting = threading.Lock()


def _retain(instance: int) -> None:
    with _counting:
        _holders[instance] += 1


def _release(instance: int) -> None:
    with _counting:
        _holders[instance] -= 1
        if _holders[instance] == 0:
            del _holders[instance], _bridges[instance]


_ABI_VERSION = 1
_CAPSULE_NAME = b"bashkit.FileSystem.v1"
_OK, _FAILED = 0, 1
_KINDS = {"file": 0, "directory": 1, "symlink": 2, "other": 3}
_OTHER, _INVALID, _UNSUPPORTED = 0, 4, 8
_KINDS_OF_ERROR = {
    errno.ENOENT: 1,
    errno.EEXIST: 2,
    errno.EACCES: 3,
    errno.EPERM: 3,
    errno.EROFS: 3,
    errno.EISDIR: 5,
    errno.ENOTDIR: 6,
    errno.ENOTEMPTY: 7,
}

# Bytes: address and length. Failure: kind and message. Metadata: type, size, mode, then
# seconds and nanoseconds of the last change and of the birth. Record: name and metadata.
_BYTES = struct.Struct("@PN")
_FAILURE = struct.Struct("@I4xPN")
_METADATA = struct.Struct("@B7xQI4xqI4xqI4x")
_RECORD = struct.Struct("@PNB7xQI4xqI4xqI4x")
_BytesSlot = c_char * _BYTES.size
_FailureSlot = c_char * _FAILURE.size
_MetadataSlot = c_char * _METADATA.size

_python = ctypes.pythonapi
_address = ctypes.PYFUNCTYPE(c_void_p, py_object)(("PyBytes_AsString", _python))
_increase = ctypes.PYFUNCTYPE(None, py_object)(("Py_IncRef", _python))
_decrease = ctypes.PYFUNCTYPE(None, c_void_p)(("Py_DecRef", _python))
_new_capsule = ctypes.PYFUNCTYPE(py_object, c_void_p, ctypes.c_char_p, c_void_p)(
    ("PyCapsule_New", _python)
)
# From the address of what a bytes object holds to the object itself.
_HEADER = _address(b"-") - id(b"-")


# By value, a struct of an address and a length is passed as those two (x86-64, AArch64 and
# RISC-V alike, as long as registers last, and no function here has more than six). Taken
# as integers they cost half of what ctypes asks for a struct.
_TEXT = (c_size_t, c_size_t)
_ADDRESS = c_size_t


def _function(
    *arguments: type,
) -> Callable[[Callable[Concatenate[Bridge, P], None]], ctypes._CFunctionType]:
    """Make a C function of one that takes a bridge; the address for a failure comes last."""
    prototype = ctypes.CFUNCTYPE(c_uint32, c_size_t, *arguments, _ADDRESS)

    def decorate(body: Callable[Concatenate[Bridge, P], None]) -> ctypes._CFunctionType:
        def call(instance: int, *values: int) -> int:
            try:
                body(_bridges[instance], *values[:-1])  # type: ignore[call-arg, arg-type]
            except BaseException as error:
                return _fail(error, values[-1])
            return _OK

        return prototype(call)

    return decorate


@_function(*_TEXT, _ADDRESS)
def _read_file(bridge: Bridge, path: int, length: int, out: int) -> None:
    data = bridge.read_file(string_at(path, length).decode())
    _give(data if type(data) is bytes else bytes(data), out)


@_function(*_TEXT, *_TEXT)
def _write_file(bridge: Bridge, path: int, length: int, data: int, size: int) -> None:
    bridge.write_file(string_at(path, length).decode(), string_at(data, size))


@_function(*_TEXT, *_TEXT)
def _append_file(bridge: Bridge, path: int, length: int, data: int, size: int) -> None:
    bridge.append_file(string_at(path, length).decode(), string_at(data, size))


@_function(*_TEXT, c_bool)
def _mkdir(bridge: Bridge, path: int, length: int, recursive: bool) -> None:
    bridge.mkdir(string_at(path, length).decode(), recursive)


@_function(*_TEXT, c_bool)
def _remove(bridge: Bridge, path: int, length: int, recursive: bool) -> None:
    bridge.remove(string_at(path, length).decode(), recursive)


@_function(*_TEXT, _ADDRESS)
def _stat(bridge: Bridge, path: int, length: int, out: int) -> None:
    entry = bridge.stat(string_at(path, length).decode())
    _METADATA.pack_into(_MetadataSlot.from_address(out), 0, *_metadata(entry))


@_function(*_TEXT, _ADDRESS)
def _read_dir(bridge: Bridge, path: int, length: int, out: int) -> None:
    entries = bridge.read_dir(string_at(path, length).decode())
    if entries:
        listing = _listing(entries)
        address = ctypes.addressof(listing)
        _listings[address] = listing
        _BYTES.pack_into(_BytesSlot.from_address(out), 0, address, len(entries))


@_function(*_TEXT, _ADDRESS)
def _exists(bridge: Bridge, path: int, length: int, out: int) -> None:
    c_bool.from_address(out).value = bridge.exists(string_at(path, length).decode())


@_function(*_TEXT, *_TEXT)
def _rename(bridge: Bridge, source: int, length: int, target: int, size: int) -> None:
    bridge.rename(string_at(source, length).decode(), string_at(target, size).decode())


@_function(*_TEXT, *_TEXT)
def _copy(bridge: Bridge, source: int, length: int, target: int, size: int) -> None:
    bridge.copy(string_at(source, length).decode(), string_at(target, size).decode())


@_function(*_TEXT, *_TEXT)
def _symlink(bridge: Bridge, target: int, size: int, path: int, length: int) -> None:
    bridge.symlink(string_at(target, size).decode(), string_at(path, length).decode())


@_function(*_TEXT, _ADDRESS)
def _read_link(bridge: Bridge, path: int, length: int, out: int) -> None:
    _give(bridge.read_link(string_at(path, length).decode()).encode(), out)


@_function(*_TEXT, c_uint32)
def _chmod(bridge: Bridge, path: int, length: int, mode: int) -> None:
    bridge.chmod(string_at(path, length).decode(), mode)


def _free_bytes(instance: int, address: int, length: int) -> None:
    if address:
        _decrease(address - _HEADER)


def _free_dir_entries(instance: int, address: int, length: int) -> None:
    _listings.pop(address, None)


def _give(data: bytes, out: int) -> None:
    """Lend the bytes themselves, uncopied; `_free_bytes` takes them back."""
    _BYTES.pack_into(_BytesSlot.from_address(out), 0, _address(data), len(data))
    _increase(data)


_listings: dict[int, ctypes.Array[c_char]] = {}


def _listing(entries: dict[str, Entry]) -> ctypes.Array[c_char]:
    """The records of a directory, followed by the names they point at."""
    names = [name.encode() for name in entries]
    records = len(entries) * _RECORD.size
    buffer = (c_char * (records + sum(map(len, names))))()
    position = ctypes.addressof(buffer) + records
    for index, (name, entry) in enumerate(zip(names, entries.values(), strict=True)):
        place = index * _RECORD.size
        _RECORD.pack_into(buffer, place, position, len(name), *_metadata(entry))
        position += len(name)
    ctypes.memmove(ctypes.addressof(buffer) + records, b"".join(names), sum(map(len, names)))
    return buffer


def _metadata(entry: Entry) -> tuple[int, int, int, int, int, int, int]:
    seconds = int(entry.mtime // 1)
    nanoseconds = int((entry.mtime - seconds) * 1e9)
    kind = _KINDS[entry.kind]
    return kind, entry.size, entry.mode, seconds, nanoseconds, seconds, nanoseconds


def _fail(error: BaseException, out: int) -> int:
    """Tell the shell what went wrong, in the words of the C library."""
    try:
        if isinstance(error, KeyboardInterrupt):
            # Not ours to swallow: it comes back once the shell has returned to Python.
            _thread.interrupt_main()
        kind, text = _kind_and_text(error)
        message = text.encode(errors="replace")
        _FAILURE.pack_into(_FailureSlot.from_address(out), 0, kind, _address(message), len(message))
        _increase(message)
    except BaseException:
        _log.exception("an error could not be told to the shell")
    return _FAILED


def _kind_and_text(error: BaseException) -> tuple[int, str]:
    number = error.errno if isinstance(error, OSError) else None
    if number is not None and number != errno.EIO:
        return _KINDS_OF_ERROR.get(number, _OTHER), os.strerror(number)
    if isinstance(error, InvalidPath | UnicodeError):
        return _INVALID, os.strerror(errno.EINVAL)
    if isinstance(error, Unsupported):
        return _UNSUPPORTED, os.strerror(errno.ENOTSUP)
    if isinstance(error, SmokeboxError):
        return _OTHER, str(error)
    if isinstance(error, Exception):
        _log.error("a filesystem failed", exc_info=error)
    return _OTHER, os.strerror(errno.EIO)


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
_counters = (_count(_retain), _count(_release))
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
_counting_functions = [ctypes.cast(function, c_void_p).value for function in _counters]
_table = (c_void_p * len(_functions))(
    *(ctypes.cast(function, c_void_p).value for function in _functions)
)
