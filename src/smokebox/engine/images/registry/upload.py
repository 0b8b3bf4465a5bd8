"""Uploads to a repository: blobs that it lacks, and manifests."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from smokebox.egress.urls import Url, parse_url
from smokebox.engine.images.registry.auth import PUSH
from smokebox.engine.images.registry.manifests import digest_of
from smokebox.engine.images.registry.transport import document_deadline
from smokebox.errors import RegistryError

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable

    from smokebox.engine.images.registry.client import RegistryClient
    from smokebox.engine.images.registry.transport import RegistryResponse

_BYTES = ("Content-Type", "application/octet-stream")


class RepositoryUpload:
    """Uploads through a client of the repository. Safe to repeat."""

    def __init__(self, client: RegistryClient) -> None:
        self._client = client

    async def has_blob(self, digest: str) -> bool:
        """Return whether the repository has a blob.

        Raises:
            RegistryError: The registry refuses or fails.
        """

        async def head() -> bool:
            path = f"/blobs/{digest}"
            async with (
                document_deadline(self._client.authority),
                self._client.request("HEAD", path, [], scope=PUSH) as response,
            ):
                if response.status not in (200, 404):
                    raise await self._client.failure(response)
                return response.status == 200

        return await self._client.retry(head)

    async def mount_blob(self, digest: str, repository: str) -> bool:
        """Take a blob over from another repository of the registry, if it allows that."""

        async def mount() -> bool:
            path = f"/blobs/uploads/?{urlencode({'mount': digest, 'from': repository})}"
            async with (
                document_deadline(self._client.authority),
                self._client.request("POST", path, [], scope=PUSH) as response,
            ):
                # 202 begins an upload instead, which the registry drops after a while.
                return response.status == 201

        return await self._client.retry(mount)

    async def put_blob(
        self, digest: str, size: int, content: Callable[[], AsyncIterable[bytes]]
    ) -> None:
        """Upload a blob.

        Args:
            content: Returns the bytes of the blob, for each attempt.

        Raises:
            RegistryError: The registry refuses or fails.
        """

        async def put() -> None:
            url = await self._begin()
            query = "&".join(part for part in (url.query, urlencode({"digest": digest})) if part)
            url = parse_url(f"{url.origin}{url.path}?{query}")
            fields = [_BYTES]
            async with self._client.request(
                "PUT", url, fields, scope=PUSH, body=content, length=size
            ) as response:
                if response.status != 201:
                    raise await self._client.failure(response)

        await self._client.retry(put)

    async def put_manifest(self, target: str, media_type: str, data: bytes) -> None:
        """Upload a manifest under a tag or digest. Its blobs come first.

        Raises:
            RegistryError: The registry refuses it, fails, or stores something else.
        """

        async def put() -> None:
            path, fields = f"/manifests/{quote(target)}", [("Content-Type", media_type)]
            async with (
                document_deadline(self._client.authority),
                self._client.request(
                    "PUT", path, fields, scope=PUSH, body=lambda: data
                ) as response,
            ):
                if response.status != 201:
                    raise await self._client.failure(response)
                stored = response.header("docker-content-digest")
            if stored and stored != digest_of(data):
                raise self._client.mismatch("the manifest", digest_of(data))

        await self._client.retry(put)

    async def _begin(self) -> Url:
        """Begin an upload, and return the URL to send the blob to."""
        async with (
            document_deadline(self._client.authority),
            self._client.request("POST", "/blobs/uploads/", [], scope=PUSH) as response,
        ):
            if response.status != 202:
                raise await self._client.failure(response)
            return self._own(response)

    def _own(self, response: RegistryResponse) -> Url:
        """Return the URL of an upload at this server: another would get the credentials."""
        url, own = response.location(), self._client.url("/")
        # A registry behind a proxy for TLS may not know its own scheme.
        if url.host != own.host:
            raise RegistryError(
                f"{self._client.registry} wants the blob to be sent to {url.authority}.",
                hint="Push to that registry by its own name.",
                reason="failed",
                registry=self._client.registry,
                image=self._client.image,
            )
        return Url(own.scheme, own.host, own.port, url.path, url.query)
