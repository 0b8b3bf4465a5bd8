"""Builds of images on a server, as `Client.builds`: upload what it lacks, and follow the build."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, TypedDict, TypeGuard, Unpack

from smokebox.client.build_context import BuildContext, read_context
from smokebox.client.contents import LocalContent, missing_contents, upload_contents
from smokebox.client.images import image_events
from smokebox.egress.layers import split_handlers
from smokebox.egress.policy import parse_egress
from smokebox.errors import InvalidOption
from smokebox.limits import limits_to_json
from smokebox.options import refuse_unknown
from smokebox.wire.build_requests import BuildImage, BuildRecipe
from smokebox.wire.builds import BuildEvent
from smokebox.wire.codec import decode

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from smokebox.client.transport import Transport
    from smokebox.egress.policy import EgressOption
    from smokebox.limits import Limits


class BuildOptions(TypedDict, total=False):
    """Options of a build.

    Attributes:
        names: Names of the image, such as "app:latest".
        build_args: Values of ARG.
        target: Stage to build; by default the last one.
        platform: Platform of the image; only that of the server's host is possible.
        secrets: Contents of `RUN --mount=type=secret`, by id.
        no_cache: Run every step again.
        keep: Leave a sandbox with the files of a RUN that fails; the error names it.
        mirrors: Let RUN use the package mirrors that the server's host is configured for.
        share: Let every key of the server use the image. For administrators.
        timeout: Seconds for the whole build.
        limits: Limits of each step.
        egress: What RUN and ADD may reach; by default nothing.
    """

    names: Sequence[str]
    build_args: Mapping[str, str]
    target: str | None
    platform: str | None
    secrets: Mapping[str, str | bytes]
    no_cache: bool
    keep: bool
    mirrors: bool
    share: bool
    timeout: float | None
    limits: Limits | str | Mapping[str, object] | None
    egress: EgressOption | None


class ImageBuilds:
    """Builds of one server, as `Client.builds`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def build(
        self,
        path: str | os.PathLike[str] | BuildContext,
        *,
        file: str | os.PathLike[str] | None = None,
        on_event: Callable[[BuildEvent], None] | None = None,
        **options: Unpack[BuildOptions],
    ) -> str:
        """Build an image, and return its digest, which `image=` takes.

        Args:
            path: A directory with a Dockerfile, a Dockerfile, or a recipe such as "recipe:python",
                whose only option is `no_cache`.
            file: The Dockerfile, if it is not `Dockerfile` in the directory.
            on_event: Called with each event.
            **options: See `BuildOptions`.

        Raises:
            InvalidDockerfile: The Dockerfile is not valid.
            BuildFailed: An instruction failed; `output` has the end of its output.
            PathError: A file of the context cannot be read.
        """
        digest = ""
        events = self.stream(path, file=file, **options)
        async with contextlib.aclosing(events):
            async for event in events:
                if on_event is not None:
                    on_event(event)
                digest = event.digest or digest
        return digest

    async def stream(
        self,
        path: str | os.PathLike[str] | BuildContext,
        *,
        file: str | os.PathLike[str] | None = None,
        **options: Unpack[BuildOptions],
    ) -> AsyncGenerator[BuildEvent, None]:
        """Build an image, and yield its progress. Closing the generator kills the build."""
        refuse_unknown("build()", options, BuildOptions.__annotations__)
        if is_recipe(path):
            body: BuildImage | BuildRecipe = _recipe(path, {"file": file, **options})
            events = image_events(self._transport, "/builds/recipes", body)
        else:
            context = path
            if not isinstance(context, BuildContext):
                context = await asyncio.to_thread(read_context, context, file=file)
            body = _body(context, options)
            await self.upload(context)
            events = image_events(self._transport, "/builds", body)
        async with contextlib.aclosing(events):
            async for event in events:
                if event.name in ("progress", "image"):
                    yield decode(BuildEvent, event.data)
                if event.name == "image":
                    return

    async def upload(self, context: BuildContext) -> int:
        """Upload the contents that the server lacks, and return their number."""
        missing = await missing_contents(self._transport, context.contents)
        contents = {digest: LocalContent(path) for digest, path in context.contents.items()}
        await upload_contents(self._transport, contents, missing)
        return len(missing)


def is_recipe(image: object) -> TypeGuard[str]:
    """Return True for an image that the server has the recipe of."""
    return isinstance(image, str) and image.startswith("recipe:")


def _recipe(name: str, options: Mapping[str, object]) -> BuildRecipe:
    for option, value in options.items():
        if value and option != "no_cache":
            raise InvalidOption(
                f"{name} has no option {option}.",
                hint=f"Write a Dockerfile with FROM {name}, and build that.",
                option=option,
                value=value,
            )
    return BuildRecipe(recipe=name, no_cache=bool(options.get("no_cache")))


def _body(context: BuildContext, options: BuildOptions) -> BuildImage:
    passed = {name: value for name, value in options.items() if value is not None}
    secrets = options.get("secrets") or {}
    passed["secrets"] = {
        id: value.encode() if isinstance(value, str) else value for id, value in secrets.items()
    }
    passed["names"] = list(options.get("names") or ())
    passed["build_args"] = dict(options.get("build_args") or {})
    if (egress := options.get("egress")) is not None:
        passed["egress"] = dict(split_handlers(parse_egress(egress)).settings)
    if (limits := options.get("limits")) is not None:
        passed["limits"] = limits if isinstance(limits, str) else limits_to_json(limits)
    return BuildImage(
        dockerfile=context.dockerfile,
        file=context.file,
        context=list(context.entries),
        **passed,  # type: ignore[arg-type]
    )
