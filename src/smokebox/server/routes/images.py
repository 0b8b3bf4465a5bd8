"""Images of the server: list, inspect, pull, load, push, remove and prune.

Names of images have slashes, so they are in the query or the body, and not in the path.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING

from smokebox.engine.images.registry.reference import is_reference
from smokebox.engine.images.uploaded_images import ImageUpload
from smokebox.engine.names import check_image_name
from smokebox.errors import (
    Conflict,
    DeadlineExceeded,
    Forbidden,
    ImageError,
    InvalidOption,
    LimitReached,
    NotFound,
    PathError,
    RegistryError,
    Unsupported,
)
from smokebox.foundation import sse
from smokebox.server.endpoint import ApiCall, endpoint
from smokebox.server.responses import EventResponse, event
from smokebox.server.tenancy.ceilings import check_image
from smokebox.server.tenancy.registry_access import registry_access
from smokebox.types import ImageDetails, ImageInfo, LayerProgress, PrunedImages, PulledImage
from smokebox.wire.requests import ImageName, LoadImage, PruneImages, PullImage, PushImage
from smokebox.wire.responses import Images, MissingContents

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from smokebox.engine.images.images import ImageInfo as EngineImage

_PULL_ERRORS = (
    InvalidOption,
    NotFound,
    RegistryError,
    ImageError,
    Forbidden,
    LimitReached,
    DeadlineExceeded,
    PathError,
)
# As the command line shows digests.
_SHORT_DIGEST = re.compile(r"sha256:[0-9a-f]{8,63}")
_LOAD_ERRORS = (InvalidOption, NotFound, ImageError, Forbidden, LimitReached, PathError)
# At most so often the progress of a layer is sent.
_INTERVAL = 0.2


@endpoint("GET", "/images")
async def list_all(call: ApiCall) -> Images:
    """List the images that the key may use, the oldest first."""
    found = await call.host.images.list(scope=_scope(call))
    return Images([_info(one) for one in found])


@endpoint("GET", "/images/inspect", errors=(InvalidOption, NotFound))
async def inspect(call: ApiCall, query: ImageName) -> ImageDetails:
    """Return an image with its configuration, by name or digest."""
    name = await _known_name(call, query.image)
    found = await call.host.images.inspect(name, scope=_scope(call))
    info = _info(found)
    return ImageDetails(
        digest=info.digest,
        names=info.names,
        source=info.source,
        size=info.size,
        layers=info.layers,
        created_at=info.created_at,
        used_at=info.used_at,
        config=found.config.to_oci(found.diff_ids),
    )


@endpoint("POST", "/images/pull", errors=_PULL_ERRORS, returns=sse.MEDIA)
async def pull(call: ApiCall, body: PullImage) -> EventResponse:
    """Pull an image from a registry, so that sandboxes can start from it.

    Events: `layer` with the progress of one layer, and last `pulled` or `error`. Closing the
    connection cancels the pull, and complete layers are kept for the next one. The credentials
    are used for this pull and not stored.
    """
    check_image(call.principal, body.image, call.state.settings)
    if body.share:
        call.principal.check_admin()
    return EventResponse(call, _events(lambda report: _pull(call, body, report), "pulled"))


@endpoint("POST", "/images/load", errors=_LOAD_ERRORS, returns=sse.MEDIA)
async def load(call: ApiCall, body: LoadImage) -> EventResponse:
    """Load an image from files of the client: an OCI layout, or an archive of `docker save`.

    Events: `missing` with the digests to upload by `PUT /builds/contents` before the same request
    is sent again; else `layer` with the progress of one layer, and last `loaded` or `error`.
    """
    if body.share:
        call.principal.check_admin()
    for name in body.names or ():
        check_image_name(name)
    upload = ImageUpload(
        path=body.image,
        documents=body.documents,
        contents=body.contents,
        reference=body.reference,
        names=None if body.names is None else tuple(body.names),
        scope=call.principal.image_scope,
        share=body.share,
        charging=call.state.quotas.images(call.principal),
    )
    return EventResponse(call, _load(call, upload))


@endpoint("POST", "/images/push", errors=(*_PULL_ERRORS, Unsupported), returns=sse.MEDIA)
async def push(call: ApiCall, body: PushImage) -> EventResponse:
    """Push an image to a registry.

    Events: `layer` with the progress of one layer, and last `pushed` or `error`. Layers that the
    repository has are not sent.
    """
    host, target = call.host, body.target or body.image
    check_image(call.principal, target, call.state.settings)
    name = await _known_name(call, body.image)
    image = await host.images.find(name, scope=_scope(call))
    access = registry_access(call.principal, target, call.state.settings, body.credentials)
    limit = {} if body.timeout is None else {"timeout": body.timeout}

    def work(report: Callable[[LayerProgress], None]) -> Awaitable[object]:
        return host.pusher.push(image, target, access, progress=report, **limit)

    return EventResponse(call, _events(work, "pushed"))


@endpoint("DELETE", "/images", errors=(InvalidOption, NotFound, Conflict))
async def remove(call: ApiCall, query: ImageName) -> None:
    """Remove a name, or the image of a digest. Layers go with the next prune."""
    name = await _known_name(call, query.image)
    await call.host.images.remove(name, scope=_scope(call))
    call.host.builds.usage.forget()


@endpoint("POST", "/images/prune", admin=True, slow=True)
async def prune(call: ApiCall, body: PruneImages) -> PrunedImages:
    """Remove images without a name that nothing refers to, and layers of no image."""
    found = await call.host.images.prune(unused_for=body.unused_for)
    call.host.builds.usage.forget()
    return PrunedImages(layers=found.layers, bytes=found.bytes)


async def _pull(
    call: ApiCall, body: PullImage, report: Callable[[LayerProgress], None]
) -> PulledImage:
    host, settings = call.host, call.state.settings
    charging = call.state.quotas.images(call.principal)
    access = registry_access(
        call.principal, body.image, settings, body.credentials, charging=charging
    )
    limit = {} if body.timeout is None else {"timeout": body.timeout}
    result = await host.registries.pull(
        body.image, access, policy=body.policy, share=body.share, progress=report, **limit
    )
    found = await host.images.inspect(result.image.digest, scope=_scope(call))
    return PulledImage(
        image=_info(found), reference=result.reference, pulled=result.pulled, note=result.note
    )


async def _load(call: ApiCall, upload: ImageUpload) -> AsyncGenerator[bytes, None]:
    missing: list[str] = []

    async def work(report: Callable[[LayerProgress], None]) -> object:
        found = await call.host.uploads.load(upload, progress=report)
        if found.image is None:
            missing.extend(found.missing)
            return None
        return _info(await call.host.images.inspect(found.image.digest, scope=_scope(call)))

    async with contextlib.aclosing(_events(work, "loaded")) as events:
        async for one in events:
            yield event("missing", MissingContents(missing)) if missing else one


async def _events(
    work: Callable[[Callable[[LayerProgress], None]], Awaitable[object]], last: str
) -> AsyncGenerator[bytes, None]:
    """Yield the progress of layers, the latest of each, and the result as the event `last`."""
    changed: dict[str, LayerProgress] = {}

    def report(progress: LayerProgress) -> None:
        changed[progress.digest] = progress

    task = asyncio.ensure_future(work(report))
    try:
        while not task.done():
            await asyncio.wait((task,), timeout=_INTERVAL)
            sent = list(changed.values())
            changed.clear()
            for progress in sent:
                yield event("layer", progress)
        yield event(last, task.result())
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _scope(call: ApiCall) -> str | None:
    """Return the owner whose images the request may use; None for all."""
    return None if call.principal.admin else call.principal.image_scope


async def _known_name(call: ApiCall, name: str) -> str:
    """Return the name of an image in the catalog: whole, where a reference or digest is short."""
    if _SHORT_DIGEST.fullmatch(name):
        images = await call.host.images.catalog.list(scope=_scope(call))
        found = [one.digest for one in images if one.digest.startswith(name)]
        return found[0] if len(found) == 1 else name
    with contextlib.suppress(NotFound):
        await call.host.images.find(name, scope=_scope(call))
        return name
    return call.host.registries.catalog_name(name) if is_reference(name) else name


def _info(image: EngineImage) -> ImageInfo:
    return ImageInfo(
        digest=image.digest,
        names=list(image.names),
        source=image.source,
        size=image.size,
        layers=image.layers,
        created_at=image.created_at,
        used_at=image.used_at,
    )


ENDPOINTS = [list_all, inspect, pull, load, push, remove, prune]
