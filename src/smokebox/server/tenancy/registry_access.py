"""The rights of a principal at container registries: addresses, hosts and credentials."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.engine.images.registry.access import Credentials, RegistryAccess
from smokebox.engine.images.registry.reference import is_reference
from smokebox.foundation.registry_names import normal_registry
from smokebox.server.tenancy.ceilings import check_hosts, matches_image
from smokebox.tenancy.principal import current_principal

if TYPE_CHECKING:
    from smokebox.engine.images.usage import Charging
    from smokebox.server.settings import ServerSettings
    from smokebox.server.tenancy.quotas import Quotas
    from smokebox.tenancy.principal import Principal
    from smokebox.wire.requests import RegistryCredentials


def registry_access(
    principal: Principal,
    image: str,
    settings: ServerSettings,
    credentials: RegistryCredentials | None = None,
    *,
    charging: Charging | None = None,
) -> RegistryAccess:
    """Return what a principal may do for one pull or push.

    The server's own credentials are for administrators, and for images that a profile names.

    Args:
        image: The reference to pull or push.
        credentials: Credentials that came with the request.
        charging: Charges the principal for what is stored.
    """
    profile = principal.profile
    granted = () if profile is None else profile.private
    return RegistryAccess(
        scope=principal.image_scope,
        credentials={} if credentials is None else _by_registry(credentials),
        server_credentials=principal.admin or _is_named(principal, image, settings),
        private=principal.admin or (*settings.private_networks, *granted),
        check_host=lambda host: check_hosts(principal, [host]),
        charging=charging,
    )


def access_of_request(
    image: str, scope: str | None, settings: ServerSettings, quotas: Quotas
) -> RegistryAccess:
    """Return what the sender of the current request may do for a sandbox that starts.

    Without a request the server itself wakes a sandbox, with no one's credentials.
    """
    principal = current_principal.get()
    if principal is None:
        return RegistryAccess(scope=scope or "", private=settings.private_networks)
    return registry_access(principal, image, settings, charging=quotas.images(principal))


def _is_named(principal: Principal, image: str, settings: ServerSettings) -> bool:
    """Return whether the profile names the image, and not just every image."""
    profile = principal.profile
    if profile is None or not is_reference(image):
        return False
    globs = [glob for glob in profile.images if glob != "*"]
    return matches_image(image, globs, settings.registries.default)


def _by_registry(found: RegistryCredentials) -> dict[str, Credentials]:
    known = Credentials(
        username=found.username,
        password=found.password,
        identity_token=found.identity_token,
        registry_token=found.registry_token,
    )
    return {normal_registry(found.registry): known}
