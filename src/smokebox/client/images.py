"""Images of one server, as `Client.images`, and pulls with the user's own credentials."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Literal, TypeVar

from smokebox.client.contents import upload_contents
from smokebox.client.http_client import is_connection_lost
from smokebox.errors import (
    ImageError,
    InvalidOption,
    RegistryError,
    SandboxGone,
    ServiceUnavailable,
)
from smokebox.types import (
    ImageDetails,
    ImageInfo,
    LayerProgress,
    PrunedImages,
    PulledImage,
    PushedImage,
)
from smokebox.wire import responses
from smokebox.wire.codec import decode
from smokebox.wire.requests import LoadImage, PruneImages, PullImage, PushImage, RegistryCredentials

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from smokebox.client.local_image import LocalImage
    from smokebox.client.transport import Transport
    from smokebox.foundation.sse import Event

T = TypeVar("T")

# The server asks again for contents that were removed meanwhile.
_UPLOAD_ATTEMPTS = 3


class Images:
    """Images that sandboxes of one server start from, as `Client.images`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self) -> list[ImageInfo]:
        """Return the images that this key may use, the oldest first."""
        return (await self._transport.request(responses.Images, "GET", "/images")).images

    async def inspect(self, image: str) -> ImageDetails:
        """Return an image with its configuration, by name or digest.

        Raises:
            NotFound: There is no such image.
        """
        query = {"image": image}
        return await self._transport.request(ImageDetails, "GET", "/images/inspect", query=query)

    async def pull(
        self,
        image: str,
        *,
        policy: Literal["missing", "always"] = "always",
        username: str | None = None,
        password: str | None = None,
        share: bool = False,
        timeout: float | None = None,
        progress: Callable[[LayerProgress], None] | None = None,
    ) -> PulledImage:
        """Pull an image from its registry, so that sandboxes can start from it.

        Creating a sandbox pulls a missing image too. Without a password, the credentials that
        `docker login` stored on this machine are sent along; the server does not keep them.

        Args:
            image: Reference such as "python:3.12-slim" or "images.example.com/team/app:1".
            policy: "missing" does not contact the registry for an image that can be used already.
            username: User of the registry.
            password: Password or access token.
            share: Let every key of the server use it. For administrators.
            timeout: Seconds for the whole pull.
            progress: Called with the progress of each layer.

        Raises:
            InvalidOption: The reference is not valid.
            NotFound: The registry has no such image.
            RegistryError: The registry refuses or fails, or the image is not for this platform.
        """
        body = PullImage(
            image=image,
            policy=policy,
            credentials=await _credentials(image, username, password),
            share=share,
            timeout=timeout,
        )
        return await self._work(PulledImage, "/images/pull", body, "pulled", progress)

    async def load(
        self,
        image: str,
        *,
        names: Sequence[str] | None = None,
        share: bool = False,
        progress: Callable[[LayerProgress], None] | None = None,
    ) -> ImageInfo:
        """Load an image from files of this machine, so that sandboxes can start from it.

        The server opens none of these files: layers that this key does not have are uploaded.

        Args:
            image: "oci:DIR" for an OCI layout, "archive:FILE" for what `docker save` wrote; with
                ":NAME" behind it if there are several images.
            names: Names of the image, such as "app:latest"; by default those that it has there.
            share: Let every key of the server use it. For administrators.
            progress: Called with the progress of each layer.

        Raises:
            PathError: A file cannot be read.
            ImageError: The image is damaged or unsafe.
            NotFound: There is no such image in it, or none for the server's platform.
        """
        # Needs parsers that other commands do not.
        from smokebox.client.local_image import open_image

        async with contextlib.AsyncExitStack() as stack:
            local = await asyncio.to_thread(stack.enter_context, open_image(image))
            body = LoadImage(
                image=image,
                documents=local.documents,
                contents=local.contents,
                reference=local.reference,
                names=None if names is None else list(names),
                share=share,
            )
            for _ in range(_UPLOAD_ATTEMPTS):
                found = await self._load(body, progress)
                if isinstance(found, ImageInfo):
                    return found
                await self._upload(local, found, progress)
        raise ServiceUnavailable(
            f"the server does not keep what is uploaded of {image}.",
            hint="Try again; if that does not help, look at the disk of the server.",
            service="server",
        )

    async def push(
        self,
        image: str,
        target: str | None = None,
        *,
        username: str | None = None,
        password: str | None = None,
        timeout: float | None = None,
        progress: Callable[[LayerProgress], None] | None = None,
    ) -> PushedImage:
        """Push an image of the server to a registry.

        Args:
            image: Name or digest of an image of the server.
            target: Reference to push it to, by default its name.
            username: User of the registry; see `pull`.
            password: Password or access token.
            timeout: Seconds for the whole push.
            progress: Called with the progress of each layer.

        Raises:
            NotFound: There is no such image.
            RegistryError: The registry refuses or fails.
        """
        body = PushImage(
            image=image,
            target=target,
            credentials=await _credentials(target or image, username, password),
            timeout=timeout,
        )
        return await self._work(PushedImage, "/images/push", body, "pushed", progress)

    async def remove(self, image: str) -> None:
        """Remove a name of an image, or an image by its digest.

        Raises:
            NotFound: There is no such image.
            Conflict: A sandbox or another image needs the image of this digest.
        """
        await self._transport.request(type(None), "DELETE", "/images", query={"image": image})

    async def prune(self, *, unused_for: float = 0.0) -> PrunedImages:
        """Remove images without a name that nothing needs. For administrators.

        Args:
            unused_for: Keep images that were added or used within this number of seconds.
        """
        body = PruneImages(unused_for=unused_for)
        return await self._transport.request(
            PrunedImages, "POST", "/images/prune", body=body, timeout=None
        )

    async def _load(
        self, body: LoadImage, progress: Callable[[LayerProgress], None] | None
    ) -> ImageInfo | Sequence[str]:
        """Return the loaded image, or the digests that have to be uploaded first."""
        events = image_events(self._transport, "/images/load", body)
        async with contextlib.aclosing(events):
            async for event in events:
                if event.name == "missing":
                    return decode(responses.MissingContents, event.data).digests
                if event.name == "loaded":
                    break
                if event.name == "layer" and progress is not None:
                    progress(decode(LayerProgress, event.data))
        return decode(ImageInfo, event.data)

    async def _upload(
        self,
        local: LocalImage,
        digests: Sequence[str],
        progress: Callable[[LayerProgress], None] | None,
    ) -> None:
        """Upload layers."""

        def report(digest: str, done: int) -> None:
            if progress is not None:
                total = local.parts[digest].size or 0
                name = f"sha256:{digest}"
                progress(LayerProgress(digest=name, done=done, total=total, state="uploading"))

        try:
            await upload_contents(self._transport, local.parts, digests, report)
        except InvalidOption as error:
            if error.fields.get("option") != "digest":
                raise
            raise ImageError(
                f"a layer of {local.image} is damaged: {error.message}",
                hint="Copy the whole image again.",
                reason="mismatch",
                image=local.image,
            ) from error

    async def _work(
        self,
        kind: type[T],
        path: str,
        body: object,
        last: str,
        progress: Callable[[LayerProgress], None] | None,
    ) -> T:
        events = image_events(self._transport, path, body)
        async with contextlib.aclosing(events):
            async for event in events:
                if event.name == last:
                    break
                if event.name == "layer" and progress is not None:
                    progress(decode(LayerProgress, event.data))
        return decode(kind, event.data)


async def image_events(
    transport: Transport, path: str, body: object
) -> AsyncGenerator[Event, None]:
    """Send a request about an image, and yield its events. The caller stops at the last one.

    Raises:
        ServiceUnavailable: The connection ended before.
    """
    lost: SandboxGone | None = None
    try:
        async with contextlib.aclosing(transport.events("POST", path, body=body)) as events:
            async for event in events:
                yield event
    except SandboxGone as error:
        if not is_connection_lost(error):
            raise
        lost = error
    raise ServiceUnavailable(
        "the connection to the server ended before the image was complete.",
        hint="Try again: layers and steps that are complete are kept.",
        service="server",
    ) from lost


async def with_own_credentials(
    transport: Transport, image: str | None, request: Callable[[], Awaitable[T]]
) -> T:
    """Send a request that may need a private image, and if it does, pull the image first.

    Only if the registry wants credentials, those of this machine's user are looked for.
    """
    try:
        return await request()
    except RegistryError as error:
        if image is None or error.fields.get("reason") not in ("authentication", "denied"):
            raise
        if await _credentials(image, None, None) is None:
            raise
        await Images(transport).pull(image)
        return await request()


async def _credentials(
    image: str, username: str | None, password: str | None
) -> RegistryCredentials | None:
    # Needed for few requests.
    from smokebox.client.docker_credentials import find_credentials, registry_of

    registry = registry_of(image)
    if password is None:
        return await find_credentials(registry)
    return RegistryCredentials(registry=registry, username=username or "", password=password)
