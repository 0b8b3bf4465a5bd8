"""Execution of single instructions that change files: RUN, COPY, ADD and WORKDIR."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import posixpath
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.engine.egress.trust import BUNDLE, BUNDLES
from smokebox.engine.images.build.copier import Copier, CopyOptions, Ids
from smokebox.engine.images.build.mounts import CacheDirectories, MountSet, place_mounts
from smokebox.engine.images.build.step_sandbox import StepSandbox
from smokebox.engine.images.build.upper_layer import Additions, clean_upper
from smokebox.engine.images.catalog import LayerReference
from smokebox.engine.images.layer_folder import missing
from smokebox.engine.images.users import lookup
from smokebox.errors import LimitReached, NotFound, PathError, SmokeboxError
from smokebox.runtime.stream import Chunk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from smokebox.engine.context import EngineContext
    from smokebox.engine.files.rooted_files import RootedFiles
    from smokebox.engine.images.build.instructions import MountOption
    from smokebox.engine.images.build.progress import StepProgress
    from smokebox.engine.images.build.sources import Source
    from smokebox.engine.images.build.state import BuildState
    from smokebox.engine.images.build.step_sandbox import StepSettings
    from smokebox.engine.images.catalog import ImageCatalog
    from smokebox.engine.images.image import Image
    from smokebox.engine.images.layer_store import LayerStore, StoredLayer
    from smokebox.engine.images.usage import Charge


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandStep:
    """A RUN with everything expanded. `script` is the content of a file that it runs."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    user: str
    mounts: tuple[MountOption, ...] = ()
    offline: bool = False
    script: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyStep:
    """A COPY or ADD with everything expanded. `documents` are files by name."""

    sources: tuple[str, ...]
    destination: str
    owner: str = ""
    mode: int | None = None
    keep_owner: bool = False
    parents: bool = False
    excludes: tuple[str, ...] = ()
    documents: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The end of a RUN: its exit code, and the layers that it made."""

    exit_code: int
    layers: tuple[LayerReference, ...]


SCRIPT = "/run/smokebox/script"
# More than what Smokebox itself writes into a sandbox, which is not part of its layer.
_OWN_FILES = 1 << 20
_APT, _APT_CONFIG = "/run/smokebox/apt.conf", b'APT::Sandbox::User "root";\n'


class StepRunner:
    """Runs steps of one build in sandboxes of their own, and keeps their upper layers."""

    def __init__(
        self,
        context: EngineContext,
        catalog: ImageCatalog,
        layer_store: LayerStore,
        caches: CacheDirectories,
        *,
        settings: StepSettings,
        secrets: Mapping[str, bytes],
        scope: str,
        single_id: bool,
        charge: Charge | None = None,
    ) -> None:
        self._context = context
        self._catalog = catalog
        self._layer_store = layer_store
        self._caches = caches
        self._settings = settings
        self._secrets = secrets
        self._scope = scope
        self.single_id = single_id
        self._charge = charge

    async def image(self, state: BuildState) -> Image:
        """Return a state as an image that a sandbox starts from."""
        return await self._catalog.load(state.image(), state.key)

    async def measure(self, layer: LayerReference) -> StoredLayer:
        """Return a layer that a step made, with its size."""
        stored = self._layer_store.get(layer.id)
        if stored is None:
            raise missing(layer.id)
        return await self._layer_store.measure(stored)

    async def cache_usage(self) -> int:
        """Return the bytes that the caches of the build's scope take."""
        return await asyncio.to_thread(self._caches.usage, self._scope)

    @contextlib.asynccontextmanager
    async def reading(self, state: BuildState) -> AsyncIterator[StepSandbox]:
        """Open a sandbox to read the files of a state."""
        sandbox = StepSandbox(self._context, await self.image(state), self._settings)
        async with sandbox:
            yield sandbox

    async def run(
        self,
        state: BuildState,
        step: CommandStep,
        sources: Mapping[str, Source],
        progress: StepProgress,
        *,
        timeout: float | None,
        keep_failed: bool,
    ) -> StepOutcome:
        """Run a command. Its layers are kept if it succeeds, or with `keep_failed`."""
        sandbox = StepSandbox(
            self._context,
            await self.image(state),
            self._settings,
            commands=True,
            network=not step.offline,
        )
        mounts = MountSet(
            sandbox,
            self._caches,
            owner=os.geteuid() if self.single_id else 0,
            ids=1 if self.single_id else 1 << 16,
            scope=self._scope,
        )
        async with contextlib.AsyncExitStack() as stack:
            if step.mounts:
                async with self.reading(state) as reader:
                    placed = await reader.files(place_mounts, list(step.mounts), step.cwd)
                await stack.enter_async_context(mounts.apply(placed, sources, self._secrets))
            cached = 0
            if self._charge is not None:
                # Files of caches are counted already.
                cached = await asyncio.to_thread(mounts.cached_bytes)
                sandbox.bound_disk(self._charge.left + cached + _OWN_FILES)
            await stack.enter_async_context(sandbox)
            if step.script is not None:
                await asyncio.to_thread(_write_shown, sandbox.directory, SCRIPT, step.script)
            if self.single_id:
                # apt drops to a user that a sandbox with one id does not have.
                await asyncio.to_thread(_write_shown, sandbox.directory, _APT, _APT_CONFIG)
                mounts.variables.setdefault("APT_CONFIG", _APT)
            try:
                exit_code = await self._execute(sandbox, step, mounts.variables, progress, timeout)
            except LimitReached:
                if self._charge is not None and sandbox.full:
                    # The quota is the reason, unless the limit of the step is lower.
                    self._charge.add(await asyncio.to_thread(sandbox.written_bytes) - cached)
                raise
            if exit_code and not keep_failed:
                return StepOutcome(exit_code=exit_code, layers=())
            additions = Additions(paths=tuple(mounts.hidden), authority=sandbox.authority)
            layers = await self._commit(sandbox, additions)
            return StepOutcome(exit_code=exit_code, layers=layers)

    async def copy(
        self, state: BuildState, step: CopyStep, source: Source | None
    ) -> tuple[LayerReference, ...]:
        """Copy files into a new layer."""
        return await self.change(state, functools.partial(_copy, step=step, source=source))

    async def change(
        self, state: BuildState, work: Callable[[RootedFiles, Callable[[int], None]], None]
    ) -> tuple[LayerReference, ...]:
        """Change files by blocking work, and return the layers that it made."""
        async with StepSandbox(self._context, await self.image(state), self._settings) as sandbox:
            await sandbox.files(work, self._taking(sandbox))
            return await self._commit(sandbox, Additions(), generated=False)

    def _taking(self, sandbox: StepSandbox) -> Callable[[int], None]:
        """Return what is called with the size of each file before it is written."""
        budget, charge, total = sandbox.budget(), self._charge, 0

        def take(size: int) -> None:
            nonlocal total
            total += size
            if charge is not None and total > charge.left:
                # Raises, as the layer would when it is counted.
                charge.add(total)
            budget.take_file(size)

        return take

    async def make_directory(
        self, state: BuildState, path: str, user: str
    ) -> tuple[LayerReference, ...]:
        """Create a working directory, which belongs to the current user if it is missing."""
        return await self.change(state, functools.partial(_make_directory, path=path, user=user))

    async def _execute(
        self,
        sandbox: StepSandbox,
        step: CommandStep,
        variables: dict[str, str],
        progress: StepProgress,
        timeout: float | None,
    ) -> int:
        user = step.user
        if self.single_id and user not in ("", "0", "root", "0:0", "root:root"):
            await progress.warn(f"the engine has one user id: {user} is root of this step")
            user = "root"
        items = sandbox.stream(
            step.argv,
            cwd=step.cwd,
            env={**step.env, **variables},
            user=user or "root",
            timeout=timeout,
        )
        exit_code = 0
        async with contextlib.aclosing(items):
            async for item in items:
                if isinstance(item, Chunk):
                    await progress.write(item)
                else:
                    exit_code = item.exit_code
        return exit_code

    async def _commit(
        self, sandbox: StepSandbox, additions: Additions, *, generated: bool = True
    ) -> tuple[LayerReference, ...]:
        """Keep what a step wrote as layers, the uppermost first. Its processes end first."""
        below: dict[str, bytes | None] = {}
        if additions.authority:
            below = await self._read_bundles(sandbox)
        owner, targets = sandbox.owner, {layer.target for layer in sandbox.base.layers}
        await sandbox.kill()
        layers = []
        for directory, target in sandbox.uppers():
            if target not in targets:
                # The place of a mount.
                continue
            found = additions if target == "/" else Additions()
            clean = functools.partial(clean_upper, generated=generated and target == "/")
            if await asyncio.to_thread(clean, directory, found, below.get):
                id = self._layer_store.new_layer_id()
                await self._layer_store.adopt(directory, id=id, owner=owner)
                layers.append(LayerReference(id=id, target=target))
        return tuple(layers)

    async def _read_bundles(self, sandbox: StepSandbox) -> dict[str, bytes | None]:
        """Read the certificates of the image without what the egress proxy added."""
        async with StepSandbox(self._context, sandbox.base, self._settings) as reader:
            return {path: await reader.files(_read_or_none, path) for path in (BUNDLE, *BUNDLES)}


def _read_or_none(files: RootedFiles, path: str) -> bytes | None:
    try:
        return files.read(path)
    except PathError:
        return None


def _write_shown(directory: str, path: str, data: bytes) -> None:
    """Write a file that a sandbox sees below /run/smokebox."""
    with open(os.path.join(directory, "run", "io", posixpath.basename(path)), "xb") as file:
        file.write(data)
        os.fchmod(file.fileno(), 0o755)


def _copy(
    files: RootedFiles,
    take: Callable[[int], None],
    *,
    step: CopyStep,
    source: Source | None,
) -> None:
    owner = find_ids(files, step.owner) if step.owner else None
    copier = Copier(
        files,
        CopyOptions(
            owner=owner,
            mode=step.mode,
            keep_owner=step.keep_owner,
            parents=step.parents,
            excludes=step.excludes,
            take=take,
        ),
    )
    if source is not None and step.sources:
        copier.copy(source, step.sources, step.destination)
    for name, data in step.documents.items():
        copier.write(step.destination, name, data)


def _make_directory(
    files: RootedFiles, take: Callable[[int], None], *, path: str, user: str
) -> None:
    owner = find_ids(files, user) if user else Ids()
    Copier(files, CopyOptions(take=take)).make_directory(path, owner)


def find_ids(files: RootedFiles, text: str) -> Ids:
    """Return the ids for `user`, `user:group` or numbers. A number alone is the group too."""
    name, colon, group = text.partition(":")
    if name.isdigit() and not colon:
        return Ids(uid=int(name), gid=int(name))
    if name.isdigit() and group.isdigit():
        return Ids(uid=int(name), gid=int(group))
    try:
        found = lookup(
            text,
            _read_or_none(files, "/etc/passwd") or b"",
            _read_or_none(files, "/etc/group") or b"",
        )
    except NotFound as error:
        raise SmokeboxError(error.message, hint=error.hint) from None
    return Ids(uid=found.uid, gid=found.gid)
