"""Names of container registries, as image references and Docker's configuration spell them."""

from __future__ import annotations

import re

DOCKER_HUB = "docker.io"
"""The registry of short names such as `python:3.12-slim`, unless the operator sets another."""

DOCKER_HUB_HOST = "registry-1.docker.io"
"""Where the API of Docker Hub is served."""

DOCKER_HUB_CONFIG_KEY = "https://index.docker.io/v1/"
"""The key that `docker login` stores the credentials of Docker Hub under."""

DOCKER_HUB_NAMESPACE = "library"
"""The namespace of Docker Hub's official images, which references leave out."""

_ALIASES = {"index.docker.io": DOCKER_HUB, DOCKER_HUB_HOST: DOCKER_HUB}
_SCHEME = re.compile(r"https?://")


def normal_registry(name: str) -> str:
    """Return the one name of a registry: `docker.io` for all of Docker Hub's."""
    name = name.lower()
    return _ALIASES.get(name, name)


def registry_of_key(key: str) -> str:
    """Return the registry of a key in Docker's configuration, which may be a URL."""
    return normal_registry(_SCHEME.sub("", key).partition("/")[0])


def explicit_registry(reference: str) -> str | None:
    """Return the registry that a reference names; None for a short name such as `python:3.12`.

    Only a first part with a dot, a colon or an upper-case letter, or `localhost`, is a registry.
    """
    first, slash, _ = reference.partition("/")
    is_host = "." in first or ":" in first or first == "localhost" or first != first.lower()
    if not slash or not is_host:
        return None
    return normal_registry(first)
