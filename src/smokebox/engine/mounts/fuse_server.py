"""FUSE server of a mounted bucket: handles requests of the kernel in a pool of threads."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from typing import TYPE_CHECKING

from smokebox.engine.mounts import fuse_protocol as fuse
from smokebox.engine.mounts.fuse_protocol import Init, Op, Valid
from smokebox.engine.mounts.volume import DOTS, Attributes
from smokebox.errors import AccessDenied, InvalidPath, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.engine.mounts.volume import Volume

# Many, so that a request that waits for the store delays no other.
MAX_THREADS = 64
# Time for which the kernel caches names and attributes.
VALID_SECONDS = 1

_BLOCK = 4096
# A bucket has no size, but `df` needs one.
_BLOCKS = 1 << 40
# Starting a thread takes longer than most requests, so a few stay idle.
_MAX_IDLE = 2
# Entry without attributes, for a name that is not a lookup.
_NO_ENTRY = bytes(fuse.ENTRY.size + fuse.ATTR.size)

Reply = bytes | list[bytes] | None


class FuseServer:
    """One connection to the kernel. `uid` and `gid` own all files."""

    def __init__(self, fd: int, *, uid: int, gid: int) -> None:
        self._fd = fd
        self._uid = uid
        self._gid = gid
        self._volume: Volume | None = None
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0
        self._ended = threading.Event()
        self._handlers: dict[int, Callable[[int, memoryview], Reply]] = {
            Op.LOOKUP: self._lookup,
            Op.GETATTR: self._getattr,
            Op.SETATTR: self._setattr,
            Op.MKNOD: self._mknod,
            Op.MKDIR: self._mkdir,
            Op.UNLINK: self._unlink,
            Op.RMDIR: self._rmdir,
            Op.RENAME: self._rename,
            Op.RENAME2: self._rename2,
            Op.OPEN: self._open,
            Op.CREATE: self._create,
            Op.READ: self._read,
            Op.WRITE: self._write,
            Op.FLUSH: self._sync,
            Op.FSYNC: self._sync,
            Op.RELEASE: self._release,
            Op.OPENDIR: self._opendir,
            Op.READDIR: self._readdir,
            Op.READDIRPLUS: self._readdirplus,
            Op.RELEASEDIR: self._releasedir,
            Op.FSYNCDIR: _ignore,
            Op.STATFS: _statfs,
            Op.INIT: _init,
            Op.SYMLINK: _refuse_link,
            Op.LINK: _refuse_link,
            Op.READLINK: _readlink,
            Op.DESTROY: _ignore,
        }

    @property
    def volume(self) -> Volume:
        """The volume that is served."""
        assert self._volume is not None, "run() sets it"
        return self._volume

    def run(self, volume: Volume) -> None:
        """Serve a volume until it is unmounted."""
        self._volume = volume
        with self._lock:
            self._add_thread()
        self._ended.wait()

    def invalidate(self, number: int) -> None:
        """Drop everything that the kernel has cached of an inode."""
        body = fuse.INVALID_INODE.pack(number, 0, 0)
        self._send(0, fuse.NOTIFY_INVALID_INODE, [body])

    def _add_thread(self) -> None:
        self._threads += 1
        name = f"smokebox-fuse-{self._threads}"
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        buffer = bytearray(fuse.BUFFER_SIZE)
        view = memoryview(buffer)
        while not self._ended.is_set():
            with self._lock:
                self._idle += 1
            try:
                size = os.readv(self._fd, [buffer])
            except OSError as error:
                size = 0
                # Others mean unmounted or aborted. ENOENT: interrupted before we read it.
                if error.errno not in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    self._ended.set()
            with self._lock:
                self._idle -= 1
                if size and not self._idle and self._threads < MAX_THREADS:
                    self._add_thread()
            if size:
                self._handle(view[:size])
            with self._lock:
                if self._idle > _MAX_IDLE:
                    self._threads -= 1
                    return

    def _handle(self, request: memoryview) -> None:
        _, opcode, unique, node, *_ = fuse.IN_HEADER.unpack_from(request)
        body = request[fuse.IN_HEADER.size :]
        if opcode in (Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT):
            self._handle_without_reply(opcode, node, body)
            return
        handler = self._handlers.get(opcode)
        try:
            if handler is None:
                raise OSError(errno.ENOSYS, "not supported")
            reply = handler(node, body)
        except Exception as error:
            self._send(unique, -_error_number(error), [])
            return
        self._send(unique, 0, reply if isinstance(reply, list) else [reply or b""])

    def _send(self, unique: int, error: int, parts: list[bytes]) -> None:
        size = fuse.OUT_HEADER.size + sum(map(len, parts))
        try:
            os.writev(self._fd, [fuse.OUT_HEADER.pack(size, error, unique), *parts])
        except OSError as failure:
            if failure.errno == errno.ENODEV:
                self._ended.set()
            elif failure.errno != errno.ENOENT and not error:
                # Without a reply the caller would wait for ever.
                self._send(unique, -errno.EIO, [])
            # ENOENT: the request was interrupted, or the kernel does not know the inode.

    def _handle_without_reply(self, opcode: int, node: int, body: memoryview) -> None:
        inodes = self.volume.inodes
        if opcode == Op.FORGET:
            inodes.forget(node, fuse.FORGET_IN.unpack_from(body)[0])
        elif opcode == Op.BATCH_FORGET:
            for number, lookups in fuse.parse_batch_forget(body):
                inodes.forget(number, lookups)

    def _lookup(self, node: int, body: memoryview) -> Reply:
        [name] = fuse.names(body)
        return self._entry(self.volume.lookup(node, name))

    def _getattr(self, node: int, body: memoryview) -> Reply:
        return self._attributes(self.volume.attributes(node))

    def _setattr(self, node: int, body: memoryview) -> Reply:
        fields = fuse.SETATTR_IN.unpack_from(body)
        valid, _, _, size, _, _, mtime, _, _, nanoseconds, _, mode, _, uid, gid, _ = fields
        if (valid & Valid.UID and uid != self._uid) or (valid & Valid.GID and gid != self._gid):
            raise PermissionError(errno.EPERM, "files of a bucket have no owners")
        when = None
        if valid & Valid.MTIME:
            when = time.time() if valid & Valid.MTIME_NOW else mtime + nanoseconds / 1e9
        return self._attributes(
            self.volume.set_attributes(
                node,
                size=size if valid & Valid.SIZE else None,
                mode=mode if valid & Valid.MODE else None,
                mtime=when,
            )
        )

    def _mknod(self, node: int, body: memoryview) -> Reply:
        mode, *_ = fuse.MKNOD_IN.unpack_from(body)
        if not stat.S_ISREG(mode):
            raise PermissionError(errno.EPERM, "a bucket holds only files")
        [name] = fuse.names(body[fuse.MKNOD_IN.size :])
        attributes, handle = self.volume.create(node, name, mode)
        try:
            self.volume.sync(handle)
        finally:
            self.volume.release(handle)
        return self._entry(attributes)

    def _mkdir(self, node: int, body: memoryview) -> Reply:
        [name] = fuse.names(body[fuse.MKDIR_IN.size :])
        return self._entry(self.volume.make_directory(node, name))

    def _unlink(self, node: int, body: memoryview) -> None:
        [name] = fuse.names(body)
        self.volume.unlink(node, name)

    def _rmdir(self, node: int, body: memoryview) -> None:
        [name] = fuse.names(body)
        self.volume.remove_directory(node, name)

    def _rename(self, node: int, body: memoryview) -> None:
        (target,) = fuse.RENAME_IN.unpack_from(body)
        name, to = fuse.names(body[fuse.RENAME_IN.size :])
        self.volume.rename(node, name, target, to)

    def _rename2(self, node: int, body: memoryview) -> None:
        target, flags, _ = fuse.RENAME2_IN.unpack_from(body)
        name, to = fuse.names(body[fuse.RENAME2_IN.size :])
        self.volume.rename(node, name, target, to, flags)

    def _open(self, node: int, body: memoryview) -> Reply:
        flags, _ = fuse.OPEN_IN.unpack_from(body)
        handle, keep_cache = self.volume.open(node, flags)
        return fuse.OPEN_OUT.pack(handle, fuse.KEEP_CACHE if keep_cache else 0, 0)

    def _create(self, node: int, body: memoryview) -> Reply:
        _, mode, *_ = fuse.CREATE_IN.unpack_from(body)
        [name] = fuse.names(body[fuse.CREATE_IN.size :])
        attributes, handle = self.volume.create(node, name, mode)
        return [self._entry(attributes), fuse.OPEN_OUT.pack(handle, 0, 0)]

    def _read(self, node: int, body: memoryview) -> Reply:
        handle, offset, size, *_ = fuse.READ_IN.unpack_from(body)
        return self.volume.read(handle, offset, size)

    def _write(self, node: int, body: memoryview) -> Reply:
        handle, offset, size, _, _, flags, _ = fuse.WRITE_IN.unpack_from(body)
        data = body[fuse.WRITE_IN.size : fuse.WRITE_IN.size + size]
        append = bool(flags & os.O_APPEND)
        return fuse.WRITE_OUT.pack(self.volume.write(handle, offset, data, append=append), 0)

    def _sync(self, node: int, body: memoryview) -> None:
        self.volume.sync(fuse.HANDLE_IN.unpack_from(body)[0])

    def _release(self, node: int, body: memoryview) -> None:
        self.volume.release(fuse.HANDLE_IN.unpack_from(body)[0])

    def _opendir(self, node: int, body: memoryview) -> Reply:
        return fuse.OPEN_OUT.pack(self.volume.open_directory(node), 0, 0)

    def _readdir(self, node: int, body: memoryview) -> Reply:
        handle, offset, size, *_ = fuse.READ_IN.unpack_from(body)
        entries: list[bytes] = []
        for next_offset, item in enumerate(self.volume.listing(handle)[offset:], offset + 1):
            kind = (stat.S_IFDIR if item.entry.kind == "directory" else stat.S_IFREG) >> 12
            # Only a lookup assigns an inode number; programs that list accept any but 0.
            entry = fuse.dirent(next_offset + 1, next_offset, item.name.encode(), kind)
            size -= len(entry)
            if size < 0:
                break
            entries.append(entry)
        return b"".join(entries)

    def _readdirplus(self, node: int, body: memoryview) -> Reply:
        handle, offset, size, *_ = fuse.READ_IN.unpack_from(body)
        entries: list[bytes] = []
        for next_offset, item in enumerate(self.volume.listing(handle)[offset:], offset + 1):
            name = item.name.encode()
            size -= len(_NO_ENTRY) + fuse.DIRENT.size + (len(name) + 7 & ~7)
            if size < 0:
                break
            if item.name in DOTS:
                kind = stat.S_IFDIR >> 12
                entries += [_NO_ENTRY, fuse.dirent(node, next_offset, name, kind)]
                continue
            attributes = self.volume.look_up_listed(node, item.name, item.entry)
            kind = stat.S_IFMT(attributes.mode) >> 12
            entries += [
                self._entry(attributes),
                fuse.dirent(attributes.number, next_offset, name, kind),
            ]
        return b"".join(entries)

    def _releasedir(self, node: int, body: memoryview) -> None:
        self.volume.release_directory(fuse.HANDLE_IN.unpack_from(body)[0])

    def _entry(self, attributes: Attributes) -> bytes:
        head = fuse.ENTRY.pack(attributes.number, 0, VALID_SECONDS, VALID_SECONDS, 0, 0)
        return head + self._packed(attributes)

    def _attributes(self, attributes: Attributes) -> bytes:
        return fuse.ATTR_OUT.pack(VALID_SECONDS, 0, 0) + self._packed(attributes)

    def _packed(self, attributes: Attributes) -> bytes:
        size = attributes.size
        seconds, fraction = divmod(attributes.mtime, 1)
        when, nanoseconds = int(seconds), int(fraction * 1e9)
        links = 2 if stat.S_ISDIR(attributes.mode) else 1
        return fuse.ATTR.pack(
            *(attributes.number, size, -(-size // 512), *[when] * 3, *[nanoseconds] * 3),
            *(attributes.mode, links, self._uid, self._gid, 0, _BLOCK, 0),
        )


def _error_number(error: Exception) -> int:
    if isinstance(error, InvalidPath):
        return errno.EINVAL
    if isinstance(error, AccessDenied):
        return errno.EACCES
    if isinstance(error, Unsupported):
        return errno.EOPNOTSUPP
    if isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError):
        return error.errno
    return errno.EIO


def _init(node: int, body: memoryview) -> Reply:
    _, minor, readahead, offered = fuse.INIT_IN.unpack_from(body)
    if minor < fuse.MINOR:
        raise OSError(errno.EPROTO, "the kernel is older than 5.4")
    return fuse.INIT_OUT.pack(
        *(fuse.MAJOR, fuse.MINOR, max(readahead, fuse.MAX_DATA), offered & sum(Init)),
        *(MAX_THREADS, MAX_THREADS * 3 // 4, fuse.MAX_DATA, 1, fuse.MAX_PAGES, 0),
    )


def _statfs(node: int, body: memoryview) -> Reply:
    return fuse.STATFS_OUT.pack(
        *(_BLOCKS, _BLOCKS, _BLOCKS, _BLOCKS, _BLOCKS, _BLOCK, fuse.NAME_MAX, _BLOCK)
    )


def _ignore(node: int, body: memoryview) -> None:
    pass


def _refuse_link(node: int, body: memoryview) -> Reply:
    raise PermissionError(errno.EPERM, "a bucket holds no links")


def _readlink(node: int, body: memoryview) -> Reply:
    raise OSError(errno.EINVAL, "not a symlink")
