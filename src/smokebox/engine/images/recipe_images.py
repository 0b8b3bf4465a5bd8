"""The images `recipe:NAME`: Dockerfiles of Smokebox, built once on first use for all sandboxes.

Each recipe is written twice: on Debian, and on the programs of this host for where no container
registry can be reached. `recipe:base` decides which, and the other recipes are on top of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import difflib
import hashlib
import importlib.resources
import os
import re
import socket
import time
import urllib.parse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from smokebox.egress.layers import EgressLayers
from smokebox.engine.images.build.bases import RECIPE
from smokebox.engine.images.build.builds import BuildRequest
from smokebox.engine.images.build.mirrors import read_mirrors
from smokebox.engine.images.host_files import is_public, is_readable_by_all
from smokebox.engine.images.registry.pull import full_access
from smokebox.errors import Aborted, ImageError, NotFound, RegistryError
from smokebox.wire.builds import BuildEvent, ContextEntry

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable
    from importlib.resources.abc import Traversable

    from smokebox.engine.images.build.builds import Builds
    from smokebox.engine.images.catalog import CatalogImage
    from smokebox.engine.images.image import Image
    from smokebox.engine.images.registry.pull import RegistryImages

PREFIX = RECIPE
BASE = "base"
NAMES = (BASE, "python")
DEBIAN = "debian:trixie-slim"
HOST = "host"
BUILD_SECONDS = 3600.0

# Owner of the base image and of cached steps: no id of a sandbox starts with it.
_SCOPE = "recipe:"
_INSTALL = "install.sh"
_DPKG_STATUS = "/var/lib/dpkg/status"
_APT = Path("/etc/apt")
_PASSWORD = re.compile(rb"://[^/\s]*@")
_COMMENT = re.compile(rb"#[^\n]*")
_ORIGIN = re.compile(r"https?://[^\s\]/]+")
_WEB_PORTS = (None, 80, 443)


class RecipeImages:
    """Builds recipes, each at most once at a time, and gives them to all sandboxes.

    A build goes on when those who wait for it leave, and ends with the engine. `folder` has the
    Dockerfiles, as `debian/NAME.Dockerfile` and `host/NAME.Dockerfile`.
    """

    def __init__(
        self, builds: Builds, registries: RegistryImages, folder: Traversable | None = None
    ) -> None:
        self._builds = builds
        self._catalog = builds.catalog
        self._registries = registries
        self.folder = folder or self.default_folder()
        self._running: dict[str, _RecipeBuild] = {}
        builds.recipes = self.stream

    @staticmethod
    def default_folder() -> Traversable:
        """Return the folder with the recipes of Smokebox."""
        return importlib.resources.files("smokebox.engine.images") / "recipes"

    async def get(self, name: str, *, scope: str | None = None) -> Image:
        """Return the image of a recipe, built if it is not known yet.

        Raises:
            NotFound: There is no such recipe.
            BuildFailed: A step failed, for example without a package index.
        """
        async for _ in self.stream(name):
            pass
        found = await self._find(name)
        if found is None:
            raise ImageError(
                f"the image {name!r} was removed while it was built.",
                hint="Try again.",
                reason="removed",
                image=name,
            )
        return await self._catalog.load(found, name)

    async def stream(
        self, name: str, *, no_cache: bool = False
    ) -> AsyncGenerator[BuildEvent, None]:
        """Build a recipe, and yield the progress; the last event is of kind "image".

        Args:
            name: Such as `recipe:python`.
            no_cache: Build a known one again, on the present state of its base.

        Raises:
            NotFound: There is no such recipe.
        """
        check_recipe(name)
        known = None if no_cache else await self._find(name)
        if known is not None:
            yield BuildEvent(kind="image", digest=known.digest, names=(name,))
            return
        build = self._running.get(name)
        if build is None:
            build = self._running[name] = _RecipeBuild()
            # Without the context of the caller, whose rights do not matter for a recipe.
            build.task = asyncio.create_task(
                self._run(name, build, no_cache), context=contextvars.Context()
            )
            # Its error is for those who follow it, and there may be none left.
            build.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        async with contextlib.aclosing(build.events()) as events:
            async for event in events:
                yield event

    async def aclose(self) -> None:
        """Cancel the builds that run. Finished steps stay in the cache."""
        tasks = [one.task for one in self._running.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, name: str, build: _RecipeBuild, no_cache: bool) -> None:
        try:
            request = await self._request(name, build, no_cache)
            async with contextlib.aclosing(self._builds.run(request)) as events:
                async for event in events:
                    build.publish(event)
        finally:
            del self._running[name]
            build.close()

    async def _request(self, name: str, build: _RecipeBuild, no_cache: bool) -> BuildRequest:
        recipe = name.removeprefix(PREFIX)
        if recipe == BASE:
            base = await self._choose_base(build, no_cache)
        else:
            inner = self.stream(PREFIX + BASE, no_cache=no_cache)
            async for event in inner:
                if event.kind != "image":
                    build.publish(replace(event, base=PREFIX + BASE))
            found = await self._find(PREFIX + BASE)
            base = HOST if found is not None and found.base == HOST else DEBIAN
        folder = "host" if base == HOST else "debian"
        file = self.folder / folder / f"{recipe}.Dockerfile"
        mirrors = await asyncio.to_thread(read_mirrors)
        sources = _COMMENT.sub(b"", b"\n".join((await asyncio.to_thread(_apt_sources)).values()))
        urls = "\n".join([*mirrors.variables.values(), sources.decode(errors="replace")])
        return BuildRequest(
            dockerfile=await asyncio.to_thread(file.read_text, encoding="utf-8"),
            file=f"{name} ({file.name})",
            entries=await self._context() if base == HOST else (),
            names=(name,),
            no_cache=no_cache,
            timeout=BUILD_SECONDS,
            egress=await asyncio.to_thread(_egress, set(_ORIGIN.findall(urls))),
            mirrors=mirrors,
            scope=_SCOPE,
            shared=True,
            source=f"{name} on {base}",
        )

    async def _choose_base(self, build: _RecipeBuild, no_cache: bool) -> str:
        """Pull the Debian image, or choose `host` if that fails."""
        access = replace(full_access(DEBIAN, None), scope=_SCOPE)
        started, instruction = time.monotonic(), f"pull {DEBIAN}"
        build.publish(BuildEvent(kind="step", instruction=instruction))
        try:
            pulled = await self._registries.pull(
                DEBIAN, access, policy="always" if no_cache else "missing"
            )
        except (RegistryError, NotFound) as error:
            text = f"{PREFIX}{BASE} is built on the programs of this host, as {DEBIAN} cannot be "
            build.publish(BuildEvent(kind="warning", data=f"{text}pulled: {error.message}"))
            return HOST
        # So that FROM finds it without the registry, whose rights depend on who asks.
        await self._catalog.name(DEBIAN, pulled.image.digest, scope=_SCOPE)
        seconds = time.monotonic() - started
        done = BuildEvent(kind="done", instruction=instruction, seconds=seconds)
        build.publish(replace(done, cached=not pulled.pulled))
        return DEBIAN

    async def _context(self) -> list[ContextEntry]:
        """Return the files for a recipe on the host: a script, its packages and their sources."""
        script = self.folder / "host" / _INSTALL
        files = {_INSTALL: await asyncio.to_thread(script.read_bytes)}
        files |= await asyncio.to_thread(_apt_sources)
        # What is installed can be seen in /usr too.
        if await asyncio.to_thread(_is_public_file, _DPKG_STATUS):
            files["dpkg-status"] = await asyncio.to_thread(Path(_DPKG_STATUS).read_bytes)
        entries = []
        for path, data in files.items():
            digest = hashlib.sha256(data).hexdigest()
            await self._builds.content.put(digest, _once(data), scope=_SCOPE)
            entries.append(ContextEntry(path=path, type="file", size=len(data), digest=digest))
        return entries

    async def _find(self, name: str) -> CatalogImage | None:
        return await self._catalog.find(name, scope=_SCOPE)


class _RecipeBuild:
    """A running build, and its events for those who follow it. Late ones miss output of before."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self._past: list[BuildEvent] = []
        self._queues: list[asyncio.Queue[BuildEvent | None]] = []

    def publish(self, event: BuildEvent) -> None:
        """Pass an event on."""
        if event.kind != "output":
            self._past.append(event)
        for queue in self._queues:
            queue.put_nowait(event)

    def close(self) -> None:
        """Tell those who follow that nothing comes after."""
        for queue in self._queues:
            queue.put_nowait(None)

    async def events(self) -> AsyncGenerator[BuildEvent, None]:
        """Yield the events until the end of the build; raises what it failed with."""
        assert self.task is not None
        queue: asyncio.Queue[BuildEvent | None] = asyncio.Queue()
        for event in self._past:
            queue.put_nowait(event)
        self._queues.append(queue)
        try:
            while (item := await queue.get()) is not None:
                yield item
        finally:
            self._queues.remove(queue)
        await asyncio.wait([self.task])
        if self.task.cancelled():
            raise Aborted(
                "the build was cancelled, because the engine ends.",
                hint="Try again: finished steps are in the cache.",
                reason="cancelled",
            )
        self.task.result()


def _is_public_file(path: str) -> bool:
    """Return whether every user may read a file; False if there is none."""
    try:
        return is_public("/", path.lstrip("/")) and is_readable_by_all(os.lstat(path).st_mode)
    except OSError:
        return False


async def _once(data: bytes) -> AsyncGenerator[bytes, None]:
    yield data


def check_recipe(name: str) -> None:
    """Raise `NotFound` for a name that is no recipe, with the nearest one."""
    recipe = name.removeprefix(PREFIX)
    if name.startswith(PREFIX) and recipe in NAMES:
        return
    near = difflib.get_close_matches(recipe, NAMES, n=1, cutoff=0.5)
    names = ", ".join(f"{PREFIX}{one}" for one in NAMES)
    raise NotFound(
        f"there is no recipe {name!r:.200}.",
        hint=f"Did you mean '{PREFIX}{near[0]}'?" if near else f"There are: {names}.",
        kind="image",
        name=name,
    )


def _egress(origins: Iterable[str]) -> EgressLayers:
    """Return the policy of a build: public hosts, and the host's own mirrors wherever they are.

    `origins` are those of the mirrors. Only their addresses may be private: packages run scripts.
    """
    granted, tcp = set(), set()
    for origin in origins:
        try:
            parts = urllib.parse.urlsplit(origin)
            host, port = parts.hostname, parts.port
            if host is None:
                continue
            found = socket.getaddrinfo(host, port or parts.scheme, type=socket.SOCK_STREAM)
        except (OSError, ValueError):
            # The build says what is missing.
            continue
        granted |= {str(one[4][0]) for one in found}
        if port not in _WEB_PORTS:
            tcp.add(f"{host}:{port}")
    settings = {"internet": True, "tcp": sorted(tcp)}
    return EgressLayers().with_settings(settings, sorted(granted))


def _apt_sources() -> dict[str, bytes]:
    """Return the package sources of this host that all users may read, without passwords."""
    paths = [_APT / "sources.list", *sorted((_APT / "sources.list.d").glob("*"))]
    found = {}
    for path in paths:
        if _is_public_file(str(path)):
            data = path.read_bytes()
            if not _PASSWORD.search(data):
                found[f"apt/{path.relative_to(_APT)}"] = data
    return found
