"""Rights and settings of a pull or push: registries of the operator, credentials of the caller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.errors import RegistryError
from smokebox.foundation.registry_names import DOCKER_HUB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from smokebox.egress.address_guard import PrivateAccess
    from smokebox.engine.images.usage import Charging

_MAX_SECRET = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Credentials for one registry: a password, an identity token, or a ready bearer token."""

    username: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)
    registry_token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryConfig:
    """One registry in the operator's configuration.

    Attributes:
        mirrors: Registries that are tried before it, each `host[:port]`.
        plain_http: Use HTTP without TLS.
        username: User of the server's own credentials.
        password_file: File with the password, read for each pull.
    """

    mirrors: tuple[str, ...] = ()
    plain_http: bool = False
    username: str | None = None
    password_file: str | None = None

    def credentials(self, registry: str) -> Credentials | None:
        """Read the server's own credentials, if it has any. Blocks."""
        if self.username is None or self.password_file is None:
            return None
        try:
            with open(self.password_file, encoding="utf-8") as file:
                password = file.read(_MAX_SECRET).strip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise RegistryError(
                f"the server's password for {registry} cannot be read.",
                hint="The operator corrects password_file in [registries] of server.toml.",
                reason="authentication",
                registry=registry,
            ) from error
        return Credentials(username=self.username, password=password)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySettings:
    """The operator's registries by name, and the one of short names such as `python:3.12`."""

    default: str = DOCKER_HUB
    registries: Mapping[str, RegistryConfig] = field(default_factory=dict)

    def of(self, registry: str) -> RegistryConfig:
        """Return the configuration of a registry, or the default one."""
        return self.registries.get(registry, _DEFAULT)

    def is_plain(self, authority: str) -> bool:
        """Return whether HTTP without TLS may be used for a host with its port."""
        return self.of(authority).plain_http


_DEFAULT = RegistryConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryAccess:
    """Rights of a caller for one pull or push.

    Attributes:
        scope: Prefix of the ids of the caller's sandboxes, which owns what it pulls.
        credentials: The caller's own, by registry. They are never stored.
        server_credentials: Allows the server's own credentials where the caller has none.
        private: Addresses that are not public and may be reached.
        check_host: Raises `Forbidden` for a host that the caller may not reach.
        charging: Counts what is stored against the quota of the caller.
    """

    scope: str = ""
    credentials: Mapping[str, Credentials] = field(default_factory=dict)
    server_credentials: bool = False
    private: PrivateAccess = False
    check_host: Callable[[str], None] | None = None
    charging: Charging | None = None
