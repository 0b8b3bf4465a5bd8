"""Clients of test registries on loopback, which an operator has to allow."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from smokebox.engine.images.registry.access import (
    Credentials,
    RegistryAccess,
    RegistryConfig,
    RegistrySettings,
)
from smokebox.engine.images.registry.client import RegistryClient
from smokebox.engine.images.registry.reference import parse_reference
from smokebox.engine.images.registry.transport import RegistryTransport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LOOPBACK = ("127.0.0.0/8",)


def plain(*authorities: str) -> RegistrySettings:
    """Return settings that allow HTTP without TLS for these registries."""
    return RegistrySettings(
        registries={one: RegistryConfig(plain_http=True) for one in authorities}
    )


@contextlib.asynccontextmanager
async def client_of(
    authority: str,
    repository: str,
    *,
    credentials: Credentials | None = None,
    also_plain: tuple[str, ...] = (),
    silence: float = 10.0,
    access: RegistryAccess | None = None,
) -> AsyncIterator[RegistryClient]:
    """Open a client of a repository that may reach loopback addresses."""
    access = access or RegistryAccess(private=LOOPBACK)
    transport = RegistryTransport(plain(authority, *also_plain), access, silence=silence)
    reference = parse_reference(f"{authority}/{repository}:1")
    try:
        yield RegistryClient(transport, reference, credentials=credentials)
    finally:
        transport.close()
