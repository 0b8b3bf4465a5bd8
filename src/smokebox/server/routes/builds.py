"""Builds of images: upload of the context by digest, and the build with its progress."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING

from smokebox.egress.layers import EgressLayers, split_handlers
from smokebox.engine.images.build.builds import BuildRequest
from smokebox.engine.images.build.mirrors import Mirrors, read_mirrors
from smokebox.engine.images.recipe_images import check_recipe
from smokebox.engine.names import check_image_name
from smokebox.errors import (
    BuildFailed,
    DeadlineExceeded,
    Forbidden,
    InvalidDockerfile,
    InvalidOption,
    LimitReached,
    NotFound,
    PathError,
    RequestTooLarge,
    ServiceUnavailable,
    Unsupported,
)
from smokebox.foundation import sse
from smokebox.limits import Limits, parse_limits
from smokebox.server.endpoint import BYTES, ApiCall, endpoint
from smokebox.server.responses import EventResponse, event, read_batches
from smokebox.server.routes.network import allowed_egress
from smokebox.server.tenancy.ceilings import check_options
from smokebox.wire.build_requests import BuildImage, BuildRecipe, FindContents, PutContent
from smokebox.wire.responses import MissingContents

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from smokebox.wire.builds import BuildEvent

_ERRORS = (
    InvalidDockerfile,
    InvalidOption,
    BuildFailed,
    DeadlineExceeded,
    Forbidden,
    LimitReached,
    NotFound,
    RequestTooLarge,
    ServiceUnavailable,
    Unsupported,
)


@endpoint("POST", "/builds/contents", errors=(InvalidOption,))
async def find_contents(call: ApiCall, body: FindContents) -> MissingContents:
    """Return the digests whose content has to be uploaded for a build.

    Each key has contents of its own. Those that no build used for a week are removed.
    """
    content = call.host.builds.content
    return MissingContents(content.missing(body.digests, scope=call.principal.image_scope))


@endpoint(
    "PUT",
    "/builds/contents",
    errors=(InvalidOption, RequestTooLarge, LimitReached, PathError),
    accepts=BYTES,
)
async def put_content(call: ApiCall, query: PutContent) -> None:
    """Upload the content of a file of a build context. Repeating it changes nothing."""
    content, charging = call.host.builds.content, call.state.quotas.images(call.principal)
    async with (
        charging() if charging else contextlib.nullcontext() as charge,
        contextlib.aclosing(read_batches(call)) as chunks,
    ):
        await content.put(query.digest, chunks, scope=call.principal.image_scope, charge=charge)


@endpoint("POST", "/builds", errors=_ERRORS, returns=sse.MEDIA)
async def build(call: ApiCall, body: BuildImage) -> EventResponse:
    """Build an image from a Dockerfile and a context, and stream the progress.

    Events: `progress` for each step and its output, and last `image`, or `error`. Closing the
    connection kills the build; finished steps stay in the cache of the key.
    """
    request = await _request(call, body)
    return EventResponse(call, _events(call.host.builds.run(request)))


@endpoint("POST", "/builds/recipes", errors=_ERRORS, returns=sse.MEDIA)
async def build_recipe(call: ApiCall, body: BuildRecipe) -> EventResponse:
    """Build a recipe that is not known yet, for all keys, and stream the progress.

    Events: those of a build. The build goes on when the connection is closed. `no_cache` is for
    administrators.
    """
    check_recipe(body.recipe)
    await call.state.quotas.allowed_image(call.principal, body.recipe)
    if body.no_cache:
        call.principal.check_admin()
    recipes = call.host.recipes
    return EventResponse(call, _events(recipes.stream(body.recipe, no_cache=body.no_cache)))


async def _events(build: AsyncGenerator[BuildEvent, None]) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(build) as events:
        async for one in events:
            yield event("image" if one.kind == "image" else "progress", one)


async def _request(call: ApiCall, body: BuildImage) -> BuildRequest:
    options = {"limits": body.limits} if body.limits is not None else {}
    checked = check_options(call.principal, {"limits": Limits(), **options}, call.state.settings)
    if body.share:
        call.principal.check_admin()
    layers, mirrors = EgressLayers(), Mirrors()
    if body.egress is not None:
        split = split_handlers(await allowed_egress(call, body.egress))
        layers = layers.with_settings(split.settings, split.granted)
    if body.mirrors:
        mirrors = await asyncio.to_thread(read_mirrors, layers.egress().allowed_hosts or ())
    for name in body.names:
        check_image_name(name)
    return BuildRequest(
        dockerfile=body.dockerfile,
        file=body.file,
        entries=body.context,
        names=tuple(body.names),
        build_args=body.build_args,
        target=body.target,
        platform=body.platform,
        secrets=body.secrets,
        no_cache=body.no_cache,
        keep=body.keep,
        timeout=body.timeout,
        limits=parse_limits(checked["limits"]),
        egress=layers,
        scope=call.principal.image_scope,
        group=call.principal.group,
        prefix=call.principal.prefix,
        shared=body.share,
        allowed_base=functools.partial(call.state.quotas.allowed_image, call.principal),
        mirrors=mirrors,
        charging=call.state.quotas.images(call.principal),
    )


ENDPOINTS = [find_contents, put_content, build, build_recipe]
