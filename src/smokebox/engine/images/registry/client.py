"""The API of a registry for one repository: manifests and blobs, with authorization and retries.

A repository has several servers if the operator configured mirrors; each has a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from typing import TYPE_CHECKING

import msgspec

from smokebox.egress.urls import Url
from smokebox.engine.images.registry.auth import PULL, Authorizer, login_hint, retry_after
from smokebox.engine.images.registry.manifests import (
    ACCEPT,
    MAX_MANIFEST,
    RegistryDocument,
    digest_of,
)
from smokebox.engine.images.registry.transport import document_deadline
from smokebox.errors import NotFound, RegistryError, SmokeboxError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from typing import TypeVar

    from smokebox.engine.images.registry.access import Credentials
    from smokebox.engine.images.registry.manifests import Descriptor
    from smokebox.engine.images.registry.reference import Reference
    from smokebox.engine.images.registry.transport import RegistryResponse, RegistryTransport
    from smokebox.foundation.http1.client import RequestBody
    from smokebox.foundation.http1.head import Fields

    T = TypeVar("T")

_ATTEMPTS = 4
# A blob is continued where it broke off; a server that sends less than this each time is given up.
_BLOB_ATTEMPTS = 6
_PROGRESS_BYTES = 1 << 20
_FIRST_PAUSE = 0.2
_MAX_PAUSE = 5.0
# A registry that asks for a longer pause is not retried.
_MAX_RETRY_AFTER = 10.0
_MAX_ERROR = 64 * 1024
_CODE = re.compile(r"[A-Z][A-Z_]{1,40}")
_RANGE = re.compile(r"bytes ([0-9]{1,16})-[0-9]{1,16}/(?:[0-9]{1,16}|\*)")


class _ErrorDetail(msgspec.Struct):
    code: str = ""


class _Errors(msgspec.Struct):
    errors: list[_ErrorDetail] = []


class RegistryClient:
    """One server of a repository.

    Args:
        transport: Connections.
        reference: Image, whose name is in errors.
        authority: Host and port of the server, by default that of the reference's registry.
        credentials: Credentials for this server.
    """

    def __init__(
        self,
        transport: RegistryTransport,
        reference: Reference,
        *,
        authority: str | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self.reference = reference
        self.authority = authority or reference.host
        self.image = str(reference)
        # Errors and hints name the registry as `docker login` does.
        self.registry = reference.registry if authority is None else authority
        self._transport = transport
        self._authorizer = Authorizer(transport, self.registry, credentials)
        self._plain_http = transport.is_plain(self.registry)

    async def manifest(self, target: str, *, size: int | None = None) -> RegistryDocument:
        """Get the manifest or index of a tag or digest.

        Raises:
            NotFound: The repository has none.
            RegistryError: The registry refuses, fails, or sends other content than its digest.
        """

        async def get() -> RegistryDocument:
            path = f"/manifests/{target}"
            async with (
                document_deadline(self.authority),
                self.request("GET", path, [("Accept", ACCEPT)]) as response,
            ):
                if response.status != 200:
                    raise await self.failure(response)
                data = await response.document(MAX_MANIFEST)
                media_type = response.header("content-type").partition(";")[0].strip()
                promised = response.header("docker-content-digest") or digest_of(data)
            if target.startswith("sha256:"):
                promised = target
            if digest_of(data) != promised or size not in (None, len(data)):
                raise self.mismatch("the manifest", promised)
            return RegistryDocument(media_type, data)

        return await self.retry(get)

    async def has_manifest(self, target: str) -> bool:
        """Return whether the repository has a manifest that the caller may read.

        Raises:
            RegistryError: The registry refuses or fails.
        """

        async def head() -> bool:
            path = f"/manifests/{target}"
            async with (
                document_deadline(self.authority),
                self.request("HEAD", path, [("Accept", ACCEPT)]) as response,
            ):
                if response.status == 404:
                    return False
                if response.status != 200:
                    raise await self.failure(response)
                return True

        return await self.retry(head)

    async def blob(self, descriptor: Descriptor, limit: int) -> bytes:
        """Get a small blob, such as a config, whose digest is checked."""
        if descriptor.size > limit:
            raise self.mismatch("a blob", descriptor.digest)
        async with (
            document_deadline(self.authority),
            contextlib.aclosing(self.stream(descriptor)) as pieces,
        ):
            data = b"".join([piece async for piece in pieces])
        if digest_of(data) != descriptor.digest:
            raise self.mismatch("a blob", descriptor.digest)
        return data

    async def stream(self, descriptor: Descriptor) -> AsyncGenerator[bytes, None]:
        """Yield a blob as it arrives, and continue it after a broken connection.

        It has the size of its descriptor; the digest is to be checked by the caller.

        Raises:
            RegistryError: The registry refuses, fails again and again, or sends another size.
        """
        done, failures, mark = 0, 0, 0
        while True:
            try:
                async with self._open_blob(descriptor, done) as response:
                    skip = await self._skipped(response, done)
                    while not response.done:
                        piece = await response.read()
                        if skip:
                            piece, skip = piece[skip:], max(0, skip - len(piece))
                        done += len(piece)
                        if done > descriptor.size:
                            raise self.mismatch("a blob", descriptor.digest)
                        if piece:
                            yield piece
                if done == descriptor.size:
                    return
                if response.length is not None:
                    # The response was complete, so trying again would not bring more.
                    raise self.mismatch("a blob", descriptor.digest)
                error = self._cut_off()
            except RegistryError as found:
                error = found
            if done - mark >= _PROGRESS_BYTES:
                failures, mark = 0, done
            failures += 1
            if not error.retryable or not _is_short(error) or failures >= _BLOB_ATTEMPTS:
                raise error
            await self._pause(error, failures)

    @contextlib.asynccontextmanager
    async def request(
        self,
        method: str,
        target: str | Url,
        fields: Fields,
        *,
        scope: str = PULL,
        body: Callable[[], RequestBody] | None = None,
        length: int | None = None,
    ) -> AsyncIterator[RegistryResponse]:
        """Send a request, authorized as the registry asks.

        Args:
            target: Path below the repository, or a URL that this server returned.
            scope: Actions that the request needs.
            body: Makes the body, for each attempt.
            length: Size of a body that is not `bytes`.
        """
        url = target if isinstance(target, Url) else self.url(target)
        scope = f"repository:{self.reference.repository}:{scope}"
        for attempt in range(3):
            authorization = self._authorizer.header(scope)
            sent = [*fields, *authorization]
            content = b"" if body is None else body()
            sending = self._transport.request(method, url, sent, body=content, length=length)
            async with sending as response:
                challenged = response.status == 401 and response.url.origin == url.origin
                if (
                    challenged
                    and attempt < 2
                    and await self._authorizer.answer(response, scope, authorization)
                ):
                    continue
                yield response
                return

    def url(self, path: str) -> Url:
        """Return the URL of a path below the repository."""
        path = f"/v2/{self.reference.repository}{path}"
        return self._transport.url(self.authority, path, plain=self._plain_http)

    async def retry(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run a repeatable request until it succeeds or fails for good."""
        for attempt in range(1, _ATTEMPTS):
            try:
                return await work()
            except RegistryError as error:
                if not error.retryable or not _is_short(error):
                    raise
                await self._pause(error, attempt)
        return await work()

    async def failure(self, response: RegistryResponse) -> SmokeboxError:
        """Return the error for a response that refuses a request."""
        status, code = response.status, await _error_code(response)
        shown = f"HTTP {status}{f', {code}' if code else ''}"
        registry, image = self.registry, self.image
        if status == 401:
            known = self._authorizer.has_credentials
            return RegistryError(
                f"{registry} {'refuses the credentials' if known else 'asks for credentials'} "
                f"for {image} ({shown}).",
                hint=f"{login_hint(registry)} Some registries respond like this if the image does "
                "not exist.",
                reason="authentication",
                registry=registry,
                image=image,
            )
        if status == 403:
            return RegistryError(
                f"{registry} does not allow access to {image} ({shown}).",
                hint="Use credentials that may read (or for a push, write) this repository.",
                reason="denied",
                registry=registry,
                image=image,
            )
        if status == 404:
            return NotFound(
                f"{registry} has no image {image} ({shown}).",
                hint="Check the name and the tag. Some registries hide private images like this. "
                + login_hint(registry),
                kind="image",
                name=image,
            )
        if status == 429:
            pause = retry_after(response)
            after = f"after {pause:g} s" if pause is not None else "later"
            return RegistryError(
                f"{registry} limits the rate of pulls, and refuses {image} for the moment "
                f"({shown}).",
                hint=f"Try again {after}. Credentials raise the limit of most registries, and a "
                "mirror ([registries] in server.toml) avoids it.",
                reason="rate_limit",
                registry=registry,
                image=image,
                retry_after=pause,
            )
        return RegistryError(
            f"{response.url.authority} failed while {image} was transferred ({shown}).",
            hint="Try again later, or check the registry.",
            reason="network" if status >= 500 else "failed",
            registry=registry,
            image=image,
        )

    def mismatch(self, part: str, digest: str) -> RegistryError:
        """Return the error for content that is not what its digest or size says."""
        return RegistryError(
            f"{self.authority} sent {part} of {self.image} that is not {digest}.",
            hint="Nothing of it was used. Try again, and report it to the operator of the registry "
            "or mirror if it stays.",
            reason="digest",
            registry=self.registry,
            image=self.image,
        )

    def _open_blob(
        self, descriptor: Descriptor, start: int
    ) -> AbstractAsyncContextManager[RegistryResponse]:
        # Without a range the response can be compared with the digest as a whole.
        fields = [("Range", f"bytes={start}-")] if start else []
        return self.request("GET", f"/blobs/{descriptor.digest}", fields)

    async def _skipped(self, response: RegistryResponse, start: int) -> int:
        """Return how many bytes of a response are known already, because it ignores the range."""
        if response.status == 200:
            return start
        if response.status == 206 and start:
            found = _RANGE.fullmatch(response.header("content-range").strip())
            if found is not None and int(found[1]) == start:
                return 0
        if response.status == 404:
            raise RegistryError(
                f"{self.registry} lacks a blob of {self.image}, which its manifest names.",
                hint="The image is incomplete: push it again.",
                reason="failed",
                registry=self.registry,
                image=self.image,
            )
        raise await self.failure(response)

    def _cut_off(self) -> RegistryError:
        return RegistryError(
            f"{self.authority} cut off a blob of {self.image}.",
            hint="Try again, or check the registry.",
            reason="network",
            registry=self.registry,
            image=self.image,
        )

    async def _pause(self, error: RegistryError, attempt: int) -> None:
        pause = min(_FIRST_PAUSE * 2**attempt, _MAX_PAUSE)
        wanted = error.fields.get("retry_after")
        if isinstance(wanted, float):
            pause = max(pause, wanted)
        await asyncio.sleep(pause * (1 + random.random() / 4))


def _is_short(error: RegistryError) -> bool:
    """Return whether an error may be retried within this pull."""
    if error.fields.get("connected") is False:
        return False
    wanted = error.fields.get("retry_after")
    if isinstance(wanted, float):
        return wanted <= _MAX_RETRY_AFTER
    return error.fields.get("reason") != "rate_limit"


async def _error_code(response: RegistryResponse) -> str:
    """Return the code of an error response. Its messages are not trusted to have no secrets."""
    try:
        async with asyncio.timeout(5):
            data = await response.document(_MAX_ERROR)
        errors = msgspec.json.decode(data, type=_Errors).errors
    except (SmokeboxError, TimeoutError, msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    code = errors[0].code if errors else ""
    return code if _CODE.fullmatch(code) else ""
