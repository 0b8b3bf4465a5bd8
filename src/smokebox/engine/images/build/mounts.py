"""The mounts of one RUN: parts of the context and of other stages, caches, secrets, scratch space.

A directory is an overlay of its own at its target, whose upper layer is dropped after the RUN. A
cache is such an upper layer: it is moved there before the RUN and back after it, so that one build
at a time has it. A single file is in a layer above the image.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import posixpath
import stat as stat_bits
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.engine.disk import measure
from smokebox.engine.files.descriptors import closing
from smokebox.engine.files.rooted_files import RootedFiles
from smokebox.engine.files.trees import remove_tree
from smokebox.engine.images.build.copier import Copier, CopyOptions, Ids
from smokebox.engine.images.build.sources import clean, follow
from smokebox.engine.images.image import Layer
from smokebox.engine.jail.spec import Owner
from smokebox.errors import InvalidOption, PathNotFound

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from smokebox.engine.images.build.instructions import MountOption
    from smokebox.engine.images.build.sources import Source
    from smokebox.engine.images.build.step_sandbox import StepSandbox

_REFUSED = ("/", "/dev", "/proc", "/sys", "/run/smokebox")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedMount:
    """A mount with the path in the image where it is seen, its symlinks resolved.

    `parents` are the status of the directories above it in the image, as far as they exist.
    """

    mount: MountOption
    path: str
    parents: dict[str, tuple[int, int, int]] = field(default_factory=dict)


class CacheDirectories:
    """The directories of cache mounts, by scope and id. One build uses one at a time."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._locks: dict[str, asyncio.Lock] = {}

    @contextlib.asynccontextmanager
    async def use(self, scope: str, id: str) -> AsyncIterator[str]:
        """Yield the path of a cache, which may not exist, and keep others out meanwhile."""
        path = os.path.join(self._scope(scope), _hash(id))
        async with self._locks.setdefault(path, asyncio.Lock()):
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            yield path

    def usage(self, scope: str) -> int:
        """Return the bytes on disk of a scope's caches. Blocks."""
        path = self._scope(scope)
        return measure(path).bytes if os.path.isdir(path) else 0

    async def clear(self, scope: str) -> None:
        """Remove the caches of a scope that no build uses at the moment."""
        directory = self._scope(scope)
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(directory):
                path = os.path.join(directory, name)
                lock = self._locks.setdefault(path, asyncio.Lock())
                if not lock.locked():
                    async with lock:
                        await asyncio.to_thread(_remove, directory, name)

    def _scope(self, scope: str) -> str:
        return os.path.join(self._directory, _hash(scope))


def _remove(directory: str, name: str) -> None:
    with closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        remove_tree(fd, name, name)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]


class MountSet:
    """The mounts of one RUN, set up in the directory of its sandbox before it starts.

    Args:
        sandbox: The sandbox of the RUN, before it is started.
        owner: Id on the host of root in files that are made for it; other ids follow.
        ids: Number of ids that a sandbox has.
        scope: Scope of the build, which owns its caches.
    """

    def __init__(
        self, sandbox: StepSandbox, caches: CacheDirectories, *, owner: int, ids: int, scope: str
    ) -> None:
        self._sandbox = sandbox
        self._caches = caches
        self._owner = owner
        self._ids = ids
        self._scope = scope
        self._directory = os.path.join(sandbox.directory, "mounts")
        self._above: list[Layer] = []
        self._below: list[Layer] = []
        self._held: list[tuple[str, str]] = []
        # Before the directory of the sandbox is removed, with its upper layers in it.
        sandbox.on_end(self.give_back)
        self.hidden: list[str] = []
        self.variables: dict[str, str] = {}

    @contextlib.asynccontextmanager
    async def apply(
        self,
        placed: list[PlacedMount],
        sources: Mapping[str, Source],
        secrets: Mapping[str, bytes],
    ) -> AsyncIterator[None]:
        """Set up mounts, and hold their caches inside the block, which holds the sandbox.

        Args:
            placed: The mounts.
            sources: What bind mounts read, by stage.
            secrets: The secrets of the build, by id.

        Raises:
            InvalidOption: A required secret was not passed, or a target is not possible.
            PathNotFound: The source of a bind mount does not exist.
        """
        os.makedirs(self._directory, mode=0o711)
        os.chmod(self._directory, 0o711)
        async with contextlib.AsyncExitStack() as stack:
            caches: list[tuple[str, str]] = []
            for number, one in enumerate(placed):
                if one.mount.target:
                    _check_target(one.path)
                match one.mount.kind:
                    case "cache":
                        id = one.mount.id
                        path = await stack.enter_async_context(self._caches.use(self._scope, id))
                        caches.append((path, self._add_directory(number, one)))
                        _make_cache(path, one.mount, self._owner if self._ids > 1 else None)
                    case "tmpfs":
                        self._add_directory(number, one)
                    case "secret":
                        self._add_secret(one, secrets)
                    case "bind":
                        work = self._add_bind
                        await asyncio.to_thread(work, number, one, sources[one.mount.stage])
            self._sandbox.add_layers(above=self._above, below=self._below)
            self._sandbox.make_directories()
            uppers = {target: path for path, target in self._sandbox.uppers()}
            for path, target in caches:
                os.rmdir(uppers[target])
                os.rename(path, uppers[target])
                self._held.append((uppers[target], path))
            yield

    def give_back(self) -> None:
        """Move caches to their places. The sandbox has ended."""
        while self._held:
            upper, path = self._held.pop()
            with contextlib.suppress(FileNotFoundError):
                os.rename(upper, path)

    def cached_bytes(self) -> int:
        """Return the bytes of the caches that are in the sandbox. Blocks."""
        return sum(measure(upper).bytes for upper, _ in self._held)

    def _add_directory(self, number: int, one: PlacedMount) -> str:
        """Add an empty directory as a layer at the target, which is made if it is missing."""
        path = os.path.join(self._directory, str(number))
        os.mkdir(path)
        os.chmod(path, one.mount.mode if one.mount.mode is not None else 0o755)
        self._own(path, one.mount)
        self._make_point(one.path)
        self._above.append(Layer(path=path, target=one.path, owner=self._owner))
        return one.path

    def _make_point(self, target: str) -> None:
        """Make the target in a layer below the image, so that the image's own one is preferred."""
        base = self._base_target(target)
        points = self._shared_layer("points", base, self._below)
        path = points
        for name in _relative(target, base).split("/"):
            path = os.path.join(path, name)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
                os.chmod(path, 0o755)

    def _base_target(self, path: str) -> str:
        """Return the target of the image's layers that a path is in."""
        targets = {layer.target for layer in self._sandbox.image.layers} - {"/"}
        inside = [one for one in targets if path.startswith(f"{one}/")]
        return max(inside, key=len, default="/")

    def _shared_layer(self, name: str, target: str, layers: list[Layer]) -> str:
        """Return the directory of a layer that several mounts share, made on first use."""
        path = os.path.join(self._directory, f"{name}{target.replace('/', '-')}")
        if not os.path.isdir(path):
            os.mkdir(path)
            os.chmod(path, 0o755)
            layers.append(Layer(path=path, target=target, owner=self._owner))
        return path

    def _add_secret(self, one: PlacedMount, secrets: Mapping[str, bytes]) -> None:
        mount = one.mount
        if mount.id not in secrets:
            if mount.required:
                raise InvalidOption(
                    f"the secret {mount.id!r} is required, and was not passed.",
                    hint=f"Pass it: --secret id={mount.id},src=FILE or "
                    f"--secret id={mount.id},env=NAME.",
                    option="secrets",
                    value=mount.id,
                )
            return
        if mount.env:
            self.variables[mount.env] = secrets[mount.id].decode(errors="surrogateescape")
        if mount.target:
            path = self._file_place(one)
            mode = 0o400 if mount.mode is None else mount.mode
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(secrets[mount.id])
                os.fchmod(fd, mode)
            self._own(path, mount)

    def _add_bind(self, number: int, one: PlacedMount, source: Source) -> None:
        place = follow(source, clean(one.mount.source))
        entry = None if place is None else source.entry(place)
        if place is None or entry is None:
            raise PathNotFound(
                one.mount.source,
                f"the source {one.mount.source!r} of the mount at {one.path} does not exist",
                hint="Check the path, and that .dockerignore does not exclude it.",
            )
        if entry.is_directory:
            path = os.path.join(self._directory, str(number))
            os.mkdir(path)
            os.chmod(path, 0o755)
            self._make_point(one.path)
            self._above.append(Layer(path=path, target=one.path, owner=self._owner))
            self._copy_into(path, source, place, "/")
        else:
            path = self._file_place(one)
            self._copy_into(os.path.dirname(path), source, place, f"/{os.path.basename(path)}")

    def _copy_into(self, directory: str, source: Source, place: str, destination: str) -> None:
        root = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        with closing(root):
            owner = Owner(uid=self._owner, gid=self._owner, count=self._ids)
            files = RootedFiles(root, owner)
            Copier(files, CopyOptions(keep_owner=True)).copy(source, [place], destination)

    def _file_place(self, one: PlacedMount) -> str:
        """Return the path for a file in the layer above the image, with its parents made.

        Its parents have the status of those in the image, which they are merged with.
        """
        base = self._base_target(one.path)
        path = self._shared_layer("files", base, self._above)
        inside = base.rstrip("/")
        self._copy_status(path, one.parents.get(base))
        for name in _relative(one.path, base).split("/")[:-1]:
            path, inside = os.path.join(path, name), f"{inside}/{name}"
            if not os.path.isdir(path):
                os.mkdir(path)
                self._copy_status(path, one.parents.get(inside))
        self.hidden.append(one.path.strip("/"))
        return os.path.join(path, posixpath.basename(one.path))

    def _copy_status(self, path: str, status: tuple[int, int, int] | None) -> None:
        mode, uid, gid = status or (0o755, 0, 0)
        if self._ids > 1:
            os.chown(path, self._owner + uid, self._owner + gid)
        os.chmod(path, mode)

    def _own(self, path: str, mount: MountOption) -> None:
        if self._ids > 1:
            os.chown(path, self._owner + mount.uid, self._owner + mount.gid)


def _make_cache(path: str, mount: MountOption, owner: int | None) -> None:
    if os.path.isdir(path):
        return
    os.mkdir(path)
    if owner is not None:
        os.chown(path, owner + mount.uid, owner + mount.gid)
    os.chmod(path, 0o755 if mount.mode is None else mount.mode)


def _relative(path: str, base: str) -> str:
    return path[len(base.rstrip("/")) + 1 :]


def _check_target(path: str) -> None:
    if path in _REFUSED or any(path.startswith(f"{one}/") for one in _REFUSED[1:]):
        raise InvalidOption(
            f"nothing can be mounted at {path}.",
            hint="Choose another target.",
            option="mount",
            value=path,
        )


def place_mounts(files: RootedFiles, mounts: list[MountOption], cwd: str) -> list[PlacedMount]:
    """Resolve the targets of mounts inside an image, whose root is in `files`."""
    return [_place(files, mount, cwd) for mount in mounts]


def _place(files: RootedFiles, mount: MountOption, cwd: str) -> PlacedMount:
    path = posixpath.normpath(posixpath.join("/", cwd, mount.target))
    done, status = "", {"/": _status(files, "/")}
    waiting, links = [part for part in path.split("/") if part], 0
    while waiting and links < 40:
        name = waiting.pop(0)
        if name == "..":
            done = posixpath.dirname(done) if done else ""
            continue
        inside = f"{done}/{name}"
        try:
            with closing(files.open(inside, os.O_PATH | os.O_NOFOLLOW)) as fd:
                is_link = stat_bits.S_ISLNK(os.fstat(fd).st_mode)
                target = os.readlink("", dir_fd=fd) if is_link else ""
        except OSError:
            done = inside
            continue
        if is_link:
            links += 1
            done = "" if target.startswith("/") else done
            waiting = [one for one in target.split("/") if one not in ("", ".")] + waiting
            continue
        done = inside
        status[inside] = _status(files, inside)
    return PlacedMount(
        mount=mount,
        path=done or "/",
        parents={key: value for key, value in status.items() if value is not None},
    )


def _status(files: RootedFiles, path: str) -> tuple[int, int, int] | None:
    try:
        with closing(files.open(path, os.O_PATH | os.O_NOFOLLOW)) as fd:
            found = os.fstat(fd)
    except OSError:
        return None
    ids = Ids(uid=found.st_uid - files.owner.uid, gid=found.st_gid - files.owner.gid)
    return stat_bits.S_IMODE(found.st_mode), max(0, ids.uid), max(0, ids.gid)
