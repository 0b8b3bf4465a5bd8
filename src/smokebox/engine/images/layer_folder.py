"""The directory of layers: how they are found, added and removed, by blocking calls.

A layer is the directory `ID/files` with a description in `ID/layer.json`: one of an image, or what
a sandbox wrote, in a step of a build or until a snapshot. It appears by a rename: a killed engine
leaves only directories whose lock is free, and those are removed. Several engines may share the
directory. Each registers the layers it uses in `.users`, and one removes what none has registered.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.disk import flush_filesystem, measure
from smokebox.engine.files.descriptors import LIST, closing, path_errors
from smokebox.engine.files.placement import spread_directories
from smokebox.engine.files.trees import remove_tree
from smokebox.engine.images.image import Layer
from smokebox.engine.images.image_config import DIGEST
from smokebox.engine.images.layer_pack import GENERATED, LayerPacker
from smokebox.engine.images.layer_unpack import LayerUnpacker, stream_limit
from smokebox.engine.images.layer_writer import LayerWriter
from smokebox.engine.workers import JobStopped
from smokebox.errors import ImageError, Unsupported, from_os_error
from smokebox.foundation.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from smokebox.engine.images.overlay import LowerView
    from smokebox.engine.record.rows import SnapshotLayerRow

_UNFINISHED, _REMOVED = ".making-", ".removed-"
_USERS, _LOCK, _HOME = ".users", ".lock", ".home"
_FILES, _DESCRIPTION = "files", "layer.json"
_UPPER = re.compile(r"upper-[0-9a-f]{32}")
_DEPENDENT = re.compile(rf"({DIGEST.pattern})@[0-9a-f]{{64}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayer:
    """A layer in the store.

    `id` names it in the store: the diff_id, alone or with the digest of the layers below if its
    content depends on them, or a random one for what a sandbox wrote. `owner` is as in `Layer`,
    and `target` where a sandbox wrote it. `diff_id` is the digest of its tar archive; None until
    what a sandbox wrote is packed. `bytes` and `files` are None until that is measured.
    """

    id: str
    path: str
    owner: int = 0
    target: str = "/"
    diff_id: str | None = None
    bytes: int | None = None
    files: int | None = None

    @property
    def written(self) -> bool:
        """True if it has what a sandbox wrote."""
        return _UPPER.fullmatch(self.id) is not None

    def at(self, target: str | None = None) -> Layer:
        """Return it as a layer of an image, by default at its own target."""
        return Layer(path=self.path, target=target or self.target, owner=self.owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneResult:
    """Layers that were removed, and the bytes that they occupied."""

    layers: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackLimits:
    """Bytes and files that a layer may have, and what is called before some are written."""

    bytes: int
    files: int
    charge: Callable[[int], None] | None = None


def check_digest(digest: str) -> None:
    """Raise unless this is a digest. It becomes a part of paths."""
    if not DIGEST.fullmatch(digest):
        raise ImageError(
            f"{digest!r:.100} is not a digest.",
            hint="Digests look like 'sha256:' and 64 hex digits.",
            reason="damaged",
            image=digest,
        )


def check_media_type(media_type: str) -> None:
    """Raise for layers that cannot be read."""
    if "encrypted" in media_type:
        raise ImageError(
            f"a layer of the image is encrypted ({media_type}).",
            hint="Use an image that is not encrypted.",
            reason="unsupported",
            image=media_type,
        )


def dependent_id(diff_id: str, below: Sequence[str]) -> str:
    """Return the id of a layer whose content depends on the layers below it."""
    return f"{diff_id}@{hashlib.sha256(' '.join(below).encode()).hexdigest()}"


def missing(id: str) -> ImageError:
    """Return the error for a layer that the store does not have."""
    return ImageError(
        f"the layer {id} is not in the store.",
        hint="Pull or load the image again.",
        reason="missing",
        image=id,
    )


class UnfinishedLayer:
    """A layer that is written to `files`, and removed by `close` unless it was placed."""

    def __init__(self, folder: LayerFolder, path: str, lock: int) -> None:
        self._folder = folder
        self._path = path
        self._lock = lock
        self.files = os.path.join(path, _FILES)

    def place(
        self, id: str, description: Mapping[str, object], *, durable: bool = False
    ) -> StoredLayer:
        """Give the layer its id. With `durable` it is on the disk, if its files are."""
        _write(self._path, description, durable=durable)
        return self._folder.place(self._path, id, durable=durable)

    def close(self) -> None:
        """Release it. Safe to repeat."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            with closing(lock):
                self._folder.clear(self._path)


class LayerFolder:
    """The layers in `path`, a private directory that is made when it is needed.

    `home` is the state directory of the engine: its registrations count while that exists.
    """

    def __init__(self, path: str, home: str) -> None:
        self.path = path
        self._home = home
        self._user = hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
        self._prepared = False
        # Read for each sandbox that starts.
        self._registered: dict[str, StoredLayer] = {}

    def use(self, id: str) -> StoredLayer | None:
        """Return a complete layer, and register this engine as its user."""
        name = _name(id)
        if not os.path.isdir(os.path.join(self.path, name, _FILES)):
            return None
        if (known := self._registered.get(id)) is not None:
            return known
        with self._locked(fcntl.LOCK_SH):
            self._register(name)
            return self._read(id)

    def unpack(
        self,
        chunks: Iterator[bytes],
        *,
        digest: str,
        diff_id: str,
        below: Sequence[str],
        limits: UnpackLimits,
        keep_owners: bool,
        view: Callable[[], LowerView],
        row: SnapshotLayerRow | None = None,
    ) -> StoredLayer:
        """Unpack a blob into a new layer. A failure leaves nothing.

        With a `row` it is what a sandbox wrote, and is on the disk.
        """
        viewed: list[LowerView] = []

        def view_once() -> LowerView:
            if not viewed:
                viewed.append(view())
            return viewed[0]

        with path_errors(self.path), contextlib.closing(self.begin()) as unfinished:
            with closing(os.open(unfinished.files, LIST | os.O_CLOEXEC)) as top:
                writer = LayerWriter(
                    top,
                    keep_owners=keep_owners,
                    max_bytes=limits.bytes,
                    max_files=limits.files,
                    charge=limits.charge,
                    view=view_once,
                )
                with contextlib.closing(writer):
                    size = stream_limit(limits.bytes, limits.files)
                    LayerUnpacker(writer, digest=digest, diff_id=diff_id, max_stream=size).run(
                        chunks
                    )
            id = dependent_id(diff_id, below) if viewed and below else diff_id
            if row is not None:
                id = row.id
                with closing(_open(unfinished.files)) as top:
                    flush_filesystem(top)
            description = {
                "diff_id": diff_id,
                "owner": 0,
                "bytes": measure(unfinished.files).bytes,
                "files": writer.files,
                "owners": writer.owners,
                "target": "/" if row is None else row.target,
            }
            return unfinished.place(id, description, durable=row is not None)

    def adopt(
        self, directory: str, *, id: str, owner: int, target: str, durable: bool
    ) -> StoredLayer:
        """Move an upper layer here."""
        if not _UPPER.fullmatch(id):
            raise ValueError(f"not an id of an upper layer: {id!r}")
        place = os.path.join(self.path, id)
        try:
            self._prepare()
            with self._locked(fcntl.LOCK_SH):
                self._register(id)
                if (found := self._read(id)) is not None:
                    return found
                with contextlib.suppress(FileExistsError):
                    os.mkdir(place, 0o700)
                _write(place, {"owner": owner, "target": target}, durable=durable)
            # The one step that counts: before it nothing is here, and after it all is.
            os.rename(directory, os.path.join(place, _FILES))
            if durable:
                flush_directory(place)
                flush_directory(self.path)
        except OSError as error:
            if error.errno == errno.EXDEV:
                raise Unsupported(
                    f"the layers in {self.path} and the sandbox in {directory} are on different "
                    "file systems.",
                    hint="Open the host with images= on the file system of its state directory.",
                    operation="snapshot",
                ) from error
            raise from_os_error(error, directory) from error
        found = self._read(id)
        assert found is not None
        return found

    def write(self, layer: StoredLayer) -> None:
        """Record what became known of a layer that a sandbox wrote."""
        place = os.path.join(self.path, _name(layer.id))
        description = _load(place) or {}
        self._registered.pop(layer.id, None)
        known = {"diff_id": layer.diff_id, "bytes": layer.bytes, "files": layer.files}
        _write(
            place, description | {key: value for key, value in known.items() if value is not None}
        )

    def measure(self, layer: StoredLayer) -> StoredLayer:
        """Measure a layer, and record its size."""
        used = measure(layer.path)
        self.write(StoredLayer(id=layer.id, path=layer.path, bytes=used.bytes, files=used.inodes))
        return self._read(layer.id) or layer

    def packer(self, layer: StoredLayer, *, ids: int, whole: bool = False) -> LayerPacker:
        """Return what packs a layer whose files have so many ids.

        Files that every sandbox has of its own are left out, unless it is packed `whole`.
        """
        description = _load(os.path.join(self.path, _name(layer.id))) or {}
        owners = description.get("owners")
        return LayerPacker(
            layer.path,
            owner=layer.owner,
            ids=ids,
            owners={path: (uid, gid) for path, (uid, gid) in owners.items()}
            if isinstance(owners, dict)
            else {},
            skip=GENERATED if layer.written and not whole else frozenset(),
        )

    def drop(self, id: str) -> None:
        """Remove a layer that nothing refers to, unless another engine uses it."""
        name = _name(id)
        self._registered.pop(id, None)
        aside = os.path.join(self.path, _REMOVED + new_id())
        with self._locked(fcntl.LOCK_EX):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._registrations(self._user), name))
            if name not in self._used():
                with contextlib.suppress(FileNotFoundError):
                    os.rename(os.path.join(self.path, name), aside)
        self.clear(aside)

    def discard(self, keep: Collection[str], *, unused_for: float = 0.0) -> list[str]:
        """Move layers aside that no engine uses, and return the directories to remove.

        Registrations of this engine for other layers than `keep` are dropped. Unpacked layers
        that were stored within `unused_for` seconds stay, so that the next pull finds them.
        """
        before = time.time() - unused_for
        if not os.path.isdir(self.path):
            return []
        kept = {_name(id) for id in keep}
        self._registered.clear()
        with self._locked(fcntl.LOCK_EX):
            for name in os.listdir(self._registrations(self._user)):
                if name not in kept and name != _HOME:
                    os.unlink(os.path.join(self._registrations(self._user), name))
            used = self._used()
            discarded = []
            for name in os.listdir(self.path):
                path = os.path.join(self.path, name)
                if name.startswith(_REMOVED):
                    discarded.append(path)
                elif name.startswith(".") or name in used:
                    continue
                elif _UPPER.fullmatch(name) or os.stat(path).st_mtime <= before:
                    aside = os.path.join(self.path, _REMOVED + new_id())
                    os.rename(path, aside)
                    discarded.append(aside)
            return discarded + self._abandoned()

    def remove(self, directories: Iterable[str]) -> PruneResult:
        """Remove discarded directories."""
        layers = size = 0
        for path in directories:
            size += measure(path).bytes
            layers += os.path.basename(path).startswith(_REMOVED)
            self.clear(path)
        return PruneResult(layers=layers, bytes=size)

    def _used(self) -> set[str]:
        """Return the names that engines with an existing state directory have registered."""
        used: set[str] = set()
        for user in os.listdir(os.path.join(self.path, _USERS)):
            folder = self._registrations(user)
            with contextlib.suppress(OSError):
                with open(os.path.join(folder, _HOME), "rb") as file:
                    home = os.fsdecode(file.read())
                if user == self._user or os.path.isdir(home):
                    used.update(os.listdir(folder))
        return used

    def _abandoned(self) -> list[str]:
        """Return unfinished directories of engines that were killed."""
        found = []
        for name in os.listdir(self.path):
            path = os.path.join(self.path, name)
            if name.startswith(_UNFINISHED):
                with contextlib.suppress(OSError), closing(_open(path)) as fd:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    found.append(path)
        return found

    def begin(self) -> UnfinishedLayer:
        """Return a layer to write to, which is empty."""
        path = os.path.join(self.path, _UNFINISHED + new_id())
        try:
            self._prepare()
            with closing(self._open_lock()) as lock:
                # Nothing is abandoned before it is locked.
                fcntl.flock(lock, fcntl.LOCK_SH)
                os.mkdir(path, 0o700)
                fd = _open(path)
                fcntl.flock(fd, fcntl.LOCK_EX)
            unfinished = UnfinishedLayer(self, path, fd)
            try:
                os.mkdir(unfinished.files)
                os.chmod(unfinished.files, 0o755)
            except BaseException:
                unfinished.close()
                raise
        except OSError as error:
            raise from_os_error(error, self.path) from error
        return unfinished

    def place(self, unfinished: str, id: str, *, durable: bool) -> StoredLayer:
        """Give a complete directory the name of a layer, unless there is one."""
        name = _name(id)
        with self._locked(fcntl.LOCK_SH):
            self._register(name)
            try:
                os.rename(unfinished, os.path.join(self.path, name))
            except OSError as error:
                # Fine if another engine was faster.
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            found = self._read(id)
        if durable:
            flush_directory(self.path)
        assert found is not None
        return found

    def _read(self, id: str) -> StoredLayer | None:
        place = os.path.join(self.path, _name(id))
        path = os.path.join(place, _FILES)
        description = _load(place)
        if description is None or not os.path.isdir(path):
            return None
        diff_id, size, files = (description.get(key) for key in ("diff_id", "bytes", "files"))
        found = self._registered[id] = StoredLayer(
            id=id,
            path=path,
            owner=int(str(description.get("owner", 0))),
            target=str(description.get("target", "/")),
            diff_id=str(diff_id) if diff_id is not None else None,
            bytes=int(str(size)) if size is not None else None,
            files=int(str(files)) if files is not None else None,
        )
        return found

    def clear(self, path: str) -> None:
        """Remove a directory of the folder, if it exists."""
        with closing(os.open(self.path, LIST | os.O_CLOEXEC)) as parent:
            while True:
                # A call that was cancelled is told so once, and cleans up all the same.
                with contextlib.suppress(JobStopped):
                    with contextlib.suppress(FileNotFoundError):
                        remove_tree(parent, os.path.basename(path), path)
                    return

    def _register(self, name: str) -> None:
        path = os.path.join(self._registrations(self._user), name)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def _registrations(self, user: str) -> str:
        return os.path.join(self.path, _USERS, user)

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        """Hold the lock of the directory, which is never held for long."""
        try:
            self._prepare()
            lock = self._open_lock()
        except OSError as error:
            raise from_os_error(error, self.path) from error
        with closing(lock):
            fcntl.flock(lock, kind)
            yield

    def _open_lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(os.path.join(self.path, _LOCK), flags, 0o600)

    def _prepare(self) -> None:
        if self._prepared:
            return
        # Programs of other users could run what is setuid in a layer.
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, 0o700)
            spread_directories(self.path)
        registrations = self._registrations(self._user)
        os.makedirs(registrations, mode=0o700, exist_ok=True)
        with open(os.path.join(registrations, _HOME), "wb") as file:
            file.write(os.fsencode(self._home))
        self._prepared = True


def _name(id: str) -> str:
    """Return the directory of an id, which may come from outside."""
    if not (DIGEST.fullmatch(id) or _DEPENDENT.fullmatch(id) or _UPPER.fullmatch(id)):
        raise missing(id)
    return id.replace(":", "-")


def _open(path: str) -> int:
    return os.open(path, LIST | os.O_NOFOLLOW | os.O_CLOEXEC)


def _load(place: str) -> dict[str, object] | None:
    try:
        with open(os.path.join(place, _DESCRIPTION), "rb") as file:
            found = json.load(file)
    except FileNotFoundError:
        return None
    return found if isinstance(found, dict) else None


def _write(place: str, description: Mapping[str, object], *, durable: bool = False) -> None:
    temporary = os.path.join(place, f".{new_id()}")
    with open(temporary, "x") as file:
        json.dump(description, file)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.rename(temporary, os.path.join(place, _DESCRIPTION))
    if durable:
        flush_directory(place)


def flush_directory(path: str) -> None:
    """Write the names in a directory to the disk."""
    with closing(_open(path)) as fd:
        os.fsync(fd)
