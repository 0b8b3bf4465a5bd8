"""Image references, as users of Docker write them: `python:3.12-slim`, `host/x/y@sha256:...`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from smokebox.errors import InvalidOption
from smokebox.foundation.registry_names import (
    DOCKER_HUB,
    DOCKER_HUB_HOST,
    DOCKER_HUB_NAMESPACE,
    explicit_registry,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

LATEST = "latest"

# `image=` strings with these are of other sources.
_OTHER_PREFIXES = ("./", "../", "/", "oci:", "archive:", "snapshot:", "recipe:", "dir:")
_OTHER_NAMES = frozenset(("", "host", ".", ".."))

_REGISTRY = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
    r"(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?"
)
_COMPONENT = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_CLOUDFLARE = re.compile(
    r"(?:docker\.io/)?cloudflare/sandbox(?::[\w.]+(?:-(?P<flavour>\w[\w.-]*))?)?(?:@sha256:[0-9a-f]+)?"
)
_MAX_REPOSITORY = 255
_MAX_REFERENCE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """An image in a registry. `digest`, if there is one, decides, and `tag` is for people."""

    registry: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    @property
    def host(self) -> str:
        """Host and port of the registry's API."""
        return DOCKER_HUB_HOST if self.registry == DOCKER_HUB else self.registry

    @property
    def name(self) -> str:
        """Registry and repository."""
        return f"{self.registry}/{self.repository}"

    @property
    def target(self) -> str:
        """The digest or tag to request from the registry."""
        return self.digest or self.tag or LATEST

    def pinned(self, digest: str) -> Reference:
        """Return the reference to that digest of the same repository."""
        return replace(self, digest=digest)

    def spellings(self, default: str = DOCKER_HUB) -> Iterator[str]:
        """Yield the texts that mean this image, such as a list of allowed images has them."""
        names = [self.name]
        if self.registry == default:
            names.append(self.repository)
        if self.registry == DOCKER_HUB and self.repository.startswith(f"{DOCKER_HUB_NAMESPACE}/"):
            short = self.repository.removeprefix(f"{DOCKER_HUB_NAMESPACE}/")
            names += [f"{DOCKER_HUB}/{short}", *([short] if self.registry == default else [])]
        tag = f":{self.tag}" if self.tag is not None else ""
        digest = f"@{self.digest}" if self.digest is not None else ""
        ends = {f"{tag}{digest}"}
        if not digest:
            ends |= {f":{self.tag or LATEST}"} | ({""} if self.tag in (None, LATEST) else set())
        for name in names:
            for end in sorted(ends):
                yield f"{name}{end}"

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag is not None or self.digest is None else ""
        tag = f":{LATEST}" if tag == ":None" else tag
        return f"{self.name}{tag}{f'@{self.digest}' if self.digest else ''}"


def recipe_in_place_of(image: str) -> str | None:
    """Return the recipe that replaces an image of Cloudflare's sandboxes, which need their server.

    Such as `recipe:python` for `docker.io/cloudflare/sandbox:0.9.2-python`; None for other images.
    """
    match = _CLOUDFLARE.fullmatch(image)
    if match is None:
        return None
    return "recipe:python" if match["flavour"] == "python" else "recipe:base"


def is_reference(image: str) -> bool:
    """Tell whether an image is to be looked for in a registry; it may still be badly written."""
    if image in _OTHER_NAMES or image.startswith(_OTHER_PREFIXES):
        return False
    # The digest of an image of the catalog, and of no repository.
    return not _DIGEST.fullmatch(image)


def parse_reference(text: str, default: str = DOCKER_HUB) -> Reference:
    """Parse a reference.

    Args:
        text: The reference, with or without a registry, tag and digest.
        default: Registry of references that name none.

    Raises:
        InvalidOption: A part of it is not valid. The message names the part.
    """
    if not is_reference(text) or len(text) > _MAX_REFERENCE:
        _refuse(text, text, "it is not the name of an image in a registry")
    name, at, digest = text.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        _refuse(text, digest, "its digest is not 'sha256:' and 64 digits of 0-9 a-f")
    registry = explicit_registry(name)
    path = name.partition("/")[2] if registry is not None else name
    path, colon, tag = path.partition(":")
    if colon and not _TAG.fullmatch(tag):
        _refuse(text, tag, "its tag is not at most 128 letters, digits, '_', '.' and '-'")
    registry = _check_registry(text, registry) if registry is not None else default
    for component in path.split("/"):
        if not _COMPONENT.fullmatch(component):
            _refuse(text, component, _component_problem(component))
    if registry == DOCKER_HUB and "/" not in path:
        path = f"{DOCKER_HUB_NAMESPACE}/{path}"
    if len(path) > _MAX_REPOSITORY:
        _refuse(text, path, f"its repository is longer than {_MAX_REPOSITORY} characters")
    return Reference(
        registry=registry,
        repository=path,
        tag=(tag if colon else None) if digest else (tag or LATEST),
        digest=digest or None,
    )


def check_registry(option: str, text: str) -> str:
    """Return the name of a registry, such as `docker.io` or `localhost:5000`.

    Raises:
        InvalidOption: It is not a host with an optional port. `option` names it.
    """
    match = _REGISTRY.fullmatch(text)
    if match is None or not _is_port(match[1]):
        raise InvalidOption(
            f"{option}: {text!r:.200} is not the name of a registry.",
            hint="Write its host and, if it has one, its port: 'images.example.com:5000'.",
            option=option,
            value=text,
        )
    return text.lower()


def _check_registry(text: str, registry: str) -> str:
    match = _REGISTRY.fullmatch(registry)
    if match is None or not _is_port(match[1]):
        _refuse(text, registry, "its registry is not a host name with an optional port")
    return registry


def _is_port(digits: str | None) -> bool:
    return digits is None or 0 < int(digits) < 1 << 16


def _component_problem(component: str) -> str:
    if not component:
        return "a part of its repository is empty"
    if component != component.lower():
        return "its repository has upper-case letters"
    return (
        "a part of its repository is not lower-case letters and digits with '.', '_' or '-' "
        "between them"
    )


def _refuse(text: str, part: str, problem: str) -> NoReturn:
    shown = "" if part == text else f" ({part!r:.80})"
    raise InvalidOption(
        f"{text!r:.200} is not an image reference: {problem}{shown}.",
        hint="Write it as `docker pull` takes it: 'python:3.12-slim', "
        "'images.example.com:5000/team/app@sha256:...'.",
        option="image",
        value=text,
    )
