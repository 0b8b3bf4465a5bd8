"""Images of one server, as `Client.images`, and pulls with the user's own credentials."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Literal, TypeVar

from smokebox.errors import RegistryError, ServiceUnavailable
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
from smokebox.wire.requests import PruneImages, PullImage, PushImage, RegistryCredentials

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from smokebox.client.transport import Transport

T = TypeVar("T")


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

    async def _work(
        self,
        kind: type[T],
        path: str,
        body: object,
        last: str,
        progress: Callable[[LayerProgress], None] | None,
    ) -> T:
        events = self._transport.events("POST", path, body=body)
        async with contextlib.aclosing(events):
            async for event in events:
                if event.name == last:
                    return decode(kind, event.data)
                if event.name == "layer" and progress is not None:
                    progress(decode(LayerProgress, event.data))
        raise ServiceUnavailable(
            "the server closed the connection before the image was complete.",
            hint="Try again: layers that are complete are kept.",
            service="server",
        )


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
