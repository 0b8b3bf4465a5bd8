"""The sandbox of one step of a build: a jail that is in no record and ends with its step.

If the engine is killed, the jail ends by itself, and the next engine removes its files.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Self, TypeVar

from smokebox.egress.handler import HandlerRegistry
from smokebox.egress.layers import EgressLayers
from smokebox.engine import startup
from smokebox.engine.disk import measure
from smokebox.engine.disk_ledger import DiskBudget, DiskLedger
from smokebox.engine.egress.proxy import EgressProxy
from smokebox.engine.egress.trust import VARIABLES
from smokebox.engine.files.executor import RootExecutor
from smokebox.engine.files.rooted_files import RootedFiles
from smokebox.engine.jail.jail import make_directories
from smokebox.engine.options import CheckedOptions
from smokebox.errors import LimitReached, SandboxGone, SmokeboxError
from smokebox.limits import Limits
from smokebox.runtime.stream import Chunk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from smokebox.engine.context import EngineContext
    from smokebox.engine.images.image import Image, Layer
    from smokebox.engine.jail.jail import Jail
    from smokebox.engine.jail.spec import Owner
    from smokebox.engine.record.rows import StopCause
    from smokebox.engine.run import Run
    from smokebox.types import ExecResult

P = ParamSpec("P")
R = TypeVar("R")

# A jail without its engine ends after this time.
_ORPHAN_SECONDS = 1.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


async def _measure_nothing(*, only_if_due: bool = False) -> None:
    """Measure nothing: only the engine writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Settings of all steps of a build. `variables` are added to each command's environment.

    Their sandboxes share the CPU weight of `group`, as in `RunSettings`.
    """

    limits: Limits = field(default_factory=Limits)
    egress: EgressLayers = field(default_factory=EgressLayers)
    hostname: str = "buildkitsandbox"
    variables: dict[str, str] = field(default_factory=dict)
    group: str = ""


class StepSandbox:
    """A jail on the layers of an image, with an upper layer that can be kept.

    Use it as `async with`. Without `commands` it is only mounted: its files are read and written,
    and it ends with the engine.
    """

    def __init__(
        self,
        context: EngineContext,
        image: Image,
        settings: StepSettings,
        *,
        commands: bool = False,
        network: bool = False,
    ) -> None:
        self.key = context.key()
        # Not in a storage pool: its upper layer is moved to the other layers.
        self.directory = os.path.join(context.storage.plain, self.key)
        self._context = context
        self.base = image
        self._image = image
        self._settings = settings
        self._commands = commands
        egress = settings.egress if network else EgressLayers()
        self._egress = egress
        self._proxy = EgressProxy(
            self.key,
            layers=lambda: egress,
            share=lambda: context.shares.share(settings.group),
            handlers=HandlerRegistry(),
            workers=context.workers,
            traffic=context.traffic,
        )
        self._run: Run | None = None
        self._jail: Jail | None = None
        self._executor = RootExecutor(self._root, context.workers)
        self._on_end: list[Callable[[], None]] = []
        self._stopped = ""
        self.full = False
        """True once it was stopped for what it wrote."""
        self._stopping: asyncio.Task[None] | None = None

    @property
    def image(self) -> Image:
        """The image that it runs on."""
        return self._image

    @property
    def owner(self) -> int:
        """Id on the host of root in the upper layer on disk."""
        # With a range of ids, the upper layer is mounted with its ids mapped.
        return self.jail.owner.uid if self.jail.owner.count == 1 else 0

    @property
    def jail(self) -> Jail:
        """The jail, inside `async with`."""
        assert self._jail is not None
        return self._jail

    @property
    def authority(self) -> bytes:
        """The certificate that the egress proxy added to the files, if it did."""
        return b"" if self._egress.egress().closed else self._proxy.authority.pem

    def uppers(self) -> list[tuple[str, str]]:
        """Return the directories of the upper layers with their targets."""
        targets = sorted({layer.target for layer in self._image.layers})
        return [
            (os.path.join(self.directory, "data", "upper", str(number)), target)
            for number, target in enumerate(targets)
        ]

    def add_layers(self, *, above: list[Layer], below: list[Layer]) -> None:
        """Add layers before the jail is created. Those above hide files of the image."""
        layers = (*above, *self._image.layers, *below)
        self._image = replace(self._image, layers=layers)

    def bound_disk(self, size: int) -> None:
        """Lower the disk limit to so many bytes. Call it before the sandbox is started."""
        limits = self._settings.limits
        disk = size if limits.disk is None else min(limits.disk, size)
        self._settings = replace(self._settings, limits=replace(limits, disk=disk))

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call a function once all processes have ended, before the files are removed."""
        self._on_end.append(callback)

    def make_directories(self) -> None:
        """Create the directories of the jail, so that some can be filled before it."""
        make_directories(self.directory, len({layer.target for layer in self._image.layers}))

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def stream(
        self,
        argv: tuple[str, ...],
        *,
        cwd: str,
        env: dict[str, str],
        user: str,
        timeout: float | None = None,
    ) -> AsyncGenerator[Chunk | ExecResult, None]:
        """Run a command, and yield its output and then its result."""
        run = self._started()
        program = await run.program(list(argv), cwd=cwd, env=env, user=user)
        # Only what the image and the step set, besides what a login sets.
        defaults = {"PATH": _PATH, "HOME": program.user.home}
        variables = {**defaults, **self._trust(), **self._settings.variables, **env}
        program = replace(program, env=variables)
        try:
            async with contextlib.aclosing(run.stream(program, timeout=timeout)) as items:
                async for item in items:
                    if not isinstance(item, Chunk) and self._stopped:
                        break
                    yield item
        except SmokeboxError:
            # Its processes were killed with it.
            if not self._stopped:
                raise
        if self._stopped:
            raise LimitReached(f"the step was stopped: {self._stopped}.", limit="resources")

    async def files(
        self, work: Callable[Concatenate[RootedFiles, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call blocking work with the files of the jail, as its root."""
        return await self._executor.run(work, *args, **kwargs)

    def written_bytes(self) -> int:
        """Return the bytes of its upper layers. Blocks."""
        return measure(os.path.join(self.directory, "data")).bytes

    def rooted_files(self) -> RootedFiles:
        """Return the files of the jail, to read them while it is open."""
        return RootedFiles(self.jail.root, self.jail.owner)

    def budget(self) -> DiskBudget:
        """Return a budget for what the engine writes into the new layer."""
        ledger = DiskLedger()
        ledger.limit, ledger.measured = self._settings.limits.disk, 0
        return DiskBudget(self.key, ledger, _measure_nothing)

    def stop(self, reason: str, *, cause: StopCause | None = None) -> None:
        """End the jail, because it exceeded a limit."""
        self._stopped = reason
        self.full = cause == "disk"
        if self._jail is not None:
            self._stopping = asyncio.create_task(self._jail.kill())

    async def kill(self) -> None:
        """End all processes. The upper layers are complete then."""
        if self._run is not None:
            self._context.guard.forget(self._run)
        await self._executor.release()
        if self._jail is not None:
            await self._jail.kill()
        await self._proxy.aclose()

    async def _start(self) -> None:
        context, settings = self._context, self._settings
        jailer = context.jailer(context.tier)
        spec = context.spec(self.key, self._image, settings.limits, group=settings.group)
        spec = replace(spec, directory=self.directory)
        self._jail = await jailer.make(spec)
        context.limit_group(settings.group)
        if not self._commands:
            return
        await self._jail.enter(settings.hostname, settings.limits, orphan_timeout=_ORPHAN_SECONDS)
        options = CheckedOptions(limits=settings.limits, cwd="/", user="root")
        row = options.row(self.key, key=self.key, image=self._image, tier=context.tier, user="root")
        row = replace(row, egress=self._egress, generation=1)
        self._run = await startup.as_run(context, row, self._jail, self._image)
        context.guard.watch(self, self._run)
        if not self._egress.egress().closed:
            await self._proxy.begin(self._run)

    async def _end(self) -> None:
        try:
            await self.kill()
        finally:
            if self._stopping is not None:
                await asyncio.wait([self._stopping])
            for callback in self._on_end:
                callback()
            await self._context.remove(self.key)

    async def _root(self) -> tuple[int, Owner]:
        if self._jail is None or not self._jail.alive:
            raise SandboxGone(
                f"the sandbox of the step ended ({self._stopped or 'it was killed'}).",
                hint="Build again.",
                reason=self._stopped or "jail ended",
            )
        return self._jail.root, self._jail.owner

    def _started(self) -> Run:
        assert self._run is not None
        return self._run

    def _trust(self) -> dict[str, str]:
        return {} if self._egress.egress().closed else dict(VARIABLES)
