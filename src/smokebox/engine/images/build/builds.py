"""Builds of a host: one Dockerfile and its context become an image of the catalog."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from smokebox.egress.layers import EgressLayers
from smokebox.engine.images.build.bases import BaseImages
from smokebox.engine.images.build.builder import Builder, BuildServices, BuildSettings
from smokebox.engine.images.build.cache import BuildCache
from smokebox.engine.images.build.context import ContentStore, ContextTree
from smokebox.engine.images.build.fetch import fetch
from smokebox.engine.images.build.mirrors import Mirrors
from smokebox.engine.images.build.mounts import CacheDirectories
from smokebox.engine.images.build.parser import parse_dockerfile
from smokebox.engine.images.build.plan import make_plan
from smokebox.engine.images.build.sources import ContextSource
from smokebox.engine.images.build.step_sandbox import StepSettings
from smokebox.engine.images.build.steps import StepRunner
from smokebox.engine.images.catalog import SHARED
from smokebox.engine.images.usage import ImageUsage
from smokebox.engine.jail.uid_ranges import privileged
from smokebox.errors import DeadlineExceeded, InvalidOption
from smokebox.limits import Limits
from smokebox.wire.builds import BuildEvent

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from smokebox.engine.context import EngineContext
    from smokebox.engine.images.build.bases import RecipeStream
    from smokebox.engine.images.build.state import BuildState
    from smokebox.engine.images.catalog import LayerReference
    from smokebox.engine.images.usage import Charge, Charging
    from smokebox.wire.builds import ContextEntry

MAX_SECRET = 512 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """A build that a client asks for.

    Attributes:
        dockerfile: Text of the Dockerfile.
        file: Its name in errors.
        entries: The build context; contents are in the content store.
        names: Names of the image, such as `app:latest`.
        build_args: Values of ARG.
        target: Stage to build; by default the last one.
        platform: Platform of the image, which must be that of the host.
        secrets: Contents of `--mount=type=secret`, by id. They are in no layer and no record.
        no_cache: Run every step, and replace its cached layers.
        keep: Leave a sandbox with the files of a RUN that fails.
        timeout: Seconds for the whole build.
        limits: Limits of each step.
        egress: Network policy of RUN and ADD, closed by default.
        scope: Owner of the image and the cache, such as a prefix of the ids of sandboxes.
        shared: Let all sandboxes use the image, and its names.
        group: Group whose CPU weight the sandboxes of its steps share, as in `RunSettings`.
        prefix: Prefix of the id of the sandbox that `keep` leaves.
        source: Origin of the image in words.
        allowed_base: Returns the base image to use for a name, or raises for one that the build
            may not use.
        mirrors: Package mirrors of this host that commands use.
        charging: Counts what is stored against the quota of the caller.
    """

    dockerfile: str
    file: str = "Dockerfile"
    entries: Sequence[ContextEntry] = ()
    names: tuple[str, ...] = ()
    build_args: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    platform: str | None = None
    secrets: Mapping[str, bytes] = field(default_factory=dict)
    no_cache: bool = False
    keep: bool = False
    timeout: float | None = None
    limits: Limits = field(default_factory=Limits)
    egress: EgressLayers = field(default_factory=EgressLayers)
    scope: str = ""
    shared: bool = False
    group: str = ""
    prefix: str = ""
    source: str = "build"
    allowed_base: Callable[[str], Awaitable[str]] | None = None
    mirrors: Mirrors = field(default_factory=Mirrors)
    charging: Charging | None = None


class Builds:
    """Runs builds. `create_sandbox` creates a sandbox with an id from an image, for `keep`."""

    def __init__(
        self,
        context: EngineContext,
        create_sandbox: Callable[[str, str], Awaitable[None]],
    ) -> None:
        directory = os.path.join(context.home.path, "builds")
        self.content = ContentStore(os.path.join(directory, "content"))
        self._caches = CacheDirectories(os.path.join(directory, "caches"))
        self._context = context
        self.catalog = context.catalog
        self._layer_store = context.catalog.layer_store
        self.cache = BuildCache(context.record, self._layer_store)
        self.usage = ImageUsage(self.catalog, self.cache, self.content, self._caches)
        self._create_sandbox = create_sandbox
        # Set by what builds them, which builds them here.
        self.recipes: RecipeStream | None = None

    async def run(self, request: BuildRequest) -> AsyncGenerator[BuildEvent, None]:
        """Build an image, and yield the progress; the last event is of kind "image".

        Closing the generator kills the build. Finished steps stay in the cache.

        Raises:
            InvalidDockerfile: The Dockerfile is not valid; nothing ran.
            Unsupported: It uses a feature that builds do not have; nothing ran.
            BuildFailed: An instruction failed.
            DeadlineExceeded: The timeout has passed.
        """
        async with request.charging() if request.charging else contextlib.nullcontext() as charge:
            builder = self._builder(request, charge)
            async with contextlib.aclosing(self._events(builder, request)) as events:
                async for event in events:
                    yield event

    async def _events(
        self, builder: Builder, request: BuildRequest
    ) -> AsyncGenerator[BuildEvent, None]:
        work = asyncio.create_task(self._build(builder, request))
        queue = builder.progress.queue
        try:
            while True:
                event = asyncio.create_task(queue.get())
                try:
                    await asyncio.wait([event, work], return_when=asyncio.FIRST_COMPLETED)
                    if not event.done():
                        break
                    yield event.result()
                finally:
                    event.cancel()
            while not queue.empty():
                yield queue.get_nowait()
            yield work.result()
        finally:
            work.cancel()
            await asyncio.wait([work])

    async def _build(self, builder: Builder, request: BuildRequest) -> BuildEvent:
        started = time.monotonic()
        try:
            async with asyncio.timeout(request.timeout):
                with self.catalog.lease():
                    state = await builder.build()
                    image = state.image(source=request.source)
                    image = replace(image, size=await self._size(image.layers))
                    scope = SHARED if request.shared else request.scope
                    await self.catalog.put(image, names=request.names, scope=scope)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the build took longer than {request.timeout:g} seconds.",
                hint="Raise its timeout; finished steps are in the cache.",
                operation="build",
                timeout=request.timeout,
            ) from None
        return BuildEvent(
            kind="image",
            steps=builder.progress.steps,
            digest=image.digest,
            names=request.names,
            seconds=time.monotonic() - started,
        )

    async def _size(self, references: Sequence[LayerReference]) -> int:
        """Return the bytes of layers, which are measured once."""
        layers = [self._layer_store.get(one.id) for one in references]
        measured = [await self._layer_store.measure(one) for one in layers if one is not None]
        return sum(one.bytes or 0 for one in measured)

    def _builder(self, request: BuildRequest, charge: Charge | None) -> Builder:
        plan = make_plan(
            parse_dockerfile(request.dockerfile, file=request.file),
            build_args=request.build_args,
            target=request.target,
            platform=request.platform,
        )
        _check_secrets(request.secrets)
        runner = StepRunner(
            self._context,
            self.catalog,
            self._layer_store,
            self._caches,
            settings=StepSettings(
                limits=request.limits,
                egress=request.mirrors.route(request.egress),
                variables=request.mirrors.variables,
                group=request.group,
            ),
            secrets=request.secrets,
            scope=request.scope,
            single_id=not privileged(),
            charge=charge,
        )
        services = BuildServices(
            runner=runner,
            bases=BaseImages(
                self.catalog, self._context.images, request.allowed_base, self.recipes
            ),
            cache=self.cache,
            context=ContextSource(ContextTree(request.entries), self.content, request.scope),
            fetch=functools.partial(fetch, layers=request.egress),
        )
        settings = BuildSettings(
            scope=request.scope,
            use_cache=not request.no_cache,
            charge=charge,
            keep=functools.partial(self._keep, request) if request.keep else None,
        )
        return Builder(plan, services, settings)

    async def _keep(self, request: BuildRequest, state: BuildState) -> str:
        """Create a sandbox with the files of a failed step, and return its id."""
        image = state.image(source="failed build")
        await self.catalog.put(image, scope=request.scope)
        id = f"{request.prefix}build-{image.digest.rpartition(':')[2][:12]}"
        await self._create_sandbox(id, image.digest)
        return id


def _check_secrets(secrets: Mapping[str, bytes]) -> None:
    for id, value in secrets.items():
        if len(value) > MAX_SECRET:
            raise InvalidOption(
                f"the secret {id!r} is longer than {MAX_SECRET} bytes.",
                hint="Pass a token or a key, and larger files through the build context.",
                option="secrets",
                value=id,
            )
