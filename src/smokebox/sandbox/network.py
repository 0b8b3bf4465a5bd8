"""Which URLs a sandbox may reach, with what methods, and what is added on the wire.

Policy only: it names URLs and judges them. Making requests belongs to who holds it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from smokebox.egress.policy import Egress
from smokebox.errors import InvalidOption
from smokebox.options import strict_fields
from smokebox.sandbox.urls import Url, parse_url

DEFAULT_METHODS = ("GET", "HEAD")

_METHOD = re.compile(r"[A-Z]{1,32}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
# Printable, and no line break that would start another header.
_HEADER_VALUE = re.compile(r"[\x20-\x7e\t]*")
_FRAMING = frozenset({"host", "connection", "content-length", "transfer-encoding", "te", "upgrade"})

Resolver: TypeAlias = Callable[[str, int], Sequence[str]]


@strict_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Allow:
    """One entry of the allow-list.

    `url` is an origin and the beginning of a path, whole segments only:
    `https://api.example.com/v1` covers `/v1` and `/v1/users` but not `/v10`. The host may
    be `*.example.com`, which covers every name below it and not itself. `headers` are
    added on the wire, in place of the script's own, and never shown to the script.
    `private` lets this one host be a private or loopback address.
    """

    url: str
    methods: Sequence[str] | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    private: bool = False
    _target: Url = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_target", _check_entry_url(self.url))
        if self.methods is not None:
            object.__setattr__(self, "methods", _check_methods(self.methods))
        object.__setattr__(self, "headers", _check_headers(self.headers))
        if self.private and self._target.wildcard:
            raise InvalidOption(
                f"private=True needs one host by name, and {self.url!r} covers many.",
                hint="Write an entry for each private host.",
                option="private",
                value=self.url,
            )

    def covers(self, url: Url) -> bool:
        """Whether `url` is inside this entry, whatever the method."""
        return self._target.covers(url)

    @property
    def precision(self) -> tuple[bool, int]:
        """Orders the entries that cover a URL: a name before a pattern, then the longer path."""
        return (not self._target.wildcard, len(self._target.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether one request may leave, and if so what is added to it."""

    allowed: bool
    reason: str = ""
    url: Url | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    private: bool = False


@strict_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What a sandbox may reach. Whatever no entry of `allow` covers is refused.

    `methods` holds for entries that name none. `"*"` in `allow` is every public address.
    With `scrub`, header values that were added on the wire are taken out of what comes
    back, so that a server that echoes them does not hand them to the script.

    `timeout` bounds one request with its redirects, in seconds. `resolver` replaces the
    system's name lookup, and `ca_file` adds certificate authorities.
    """

    allow: Sequence[str | Allow] = ()
    methods: Sequence[str] = DEFAULT_METHODS
    max_redirects: int = 20
    timeout: float = 30.0
    connect_timeout: float = 10.0
    max_response_bytes: int = 10 * 1024 * 1024
    max_request_bytes: int = 10 * 1024 * 1024
    scrub: bool = True
    ca_file: str | None = None
    resolver: Resolver | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", _check_methods(self.methods))
        object.__setattr__(self, "allow", _check_allow(self.allow))
        for name in ("timeout", "connect_timeout", "max_response_bytes", "max_request_bytes"):
            _check_positive(name, getattr(self, name))
        if type(self.max_redirects) is not int or self.max_redirects < 0:
            raise InvalidOption(
                f"max_redirects is a whole number from 0, not {self.max_redirects!r}.",
                hint="Pass max_redirects=0 to follow none.",
                option="max_redirects",
                value=self.max_redirects,
            )
        if self.ca_file is not None and not os.path.isfile(self.ca_file):
            raise InvalidOption(
                f"ca_file names no file: {self.ca_file!r}.",
                hint="Pass the path of a PEM file with certificates.",
                option="ca_file",
                value=self.ca_file,
            )

    @property
    def entries(self) -> tuple[Allow, ...]:
        """The allow-list with every entry spelled out."""
        return tuple(entry for entry in self.allow if isinstance(entry, Allow))

    @property
    def is_open(self) -> bool:
        """True when every public address is allowed."""
        return "*" in {entry.url for entry in self.entries}

    def decide(self, method: str, url: str) -> Decision:
        """Whether `method url` may leave. The most precise entry that covers it speaks."""
        try:
            target = parse_url(url)
        except InvalidOption as error:
            return Decision(allowed=False, reason=f"{error.message} ({url!r})")
        covering = [entry for entry in self.entries if entry.covers(target)]
        if not covering:
            return Decision(
                allowed=False,
                url=target,
                reason=f"{target.shown} is not in the network allow-list; network= would open it",
            )
        able = [entry for entry in covering if method in (entry.methods or self.methods)]
        if not able:
            known = {name for entry in covering for name in (entry.methods or self.methods)}
            return Decision(
                allowed=False,
                url=target,
                reason=f"{method} {target.shown} is not allowed (only {', '.join(sorted(known))})",
            )
        best = max(able, key=lambda entry: entry.precision)
        return Decision(allowed=True, url=target, headers=best.headers, private=best.private)


def check_network(
    network: Network | Egress | Sequence[str | Allow] | None,
) -> Network | Egress | None:
    """The policy itself: a `Network`, one made from a bare allow-list, an `Egress` as Linux
    sandboxes have it, or None for no network."""
    if network is None or isinstance(network, (Network, Egress)):
        return network
    if isinstance(network, (list, tuple)):
        return Network(allow=network)
    raise InvalidOption(
        f"network is a Network, an Egress, a list of URLs or None, not {network!r}.",
        hint="Pass network=Network(allow=['https://api.example.com/']).",
        option="network",
    )


def _check_allow(allow: Sequence[str | Allow]) -> tuple[Allow, ...]:
    if isinstance(allow, (str, Allow)) or not isinstance(allow, Iterable):
        raise InvalidOption(
            f"allow is a list of URLs, not {type(allow).__name__}.",
            hint="Pass allow=['https://api.example.com/'].",
            option="allow",
        )
    for entry in allow:
        if not isinstance(entry, (str, Allow)):
            raise InvalidOption(
                f"an entry of allow is a URL or an Allow, not {type(entry).__name__}.",
                hint="Pass Allow(url='https://api.example.com/', headers={...}).",
                option="allow",
                value=repr(entry),
            )
    return tuple(e if isinstance(e, Allow) else Allow(url=e) for e in allow)


def _check_entry_url(url: str) -> Url:
    hint = "Write scheme, host and path, such as 'https://api.example.com/v1/'."
    if not isinstance(url, str):
        raise InvalidOption(
            f"an allowed URL is a str, not {type(url).__name__}.", hint=hint, option="allow"
        )
    if url == "*":
        return Url.anywhere()
    try:
        target = parse_url(url, wildcard=True)
    except InvalidOption as error:
        raise InvalidOption(
            f"{url!r} cannot be allowed: {error.message}.", hint=hint, option="allow", value=url
        ) from None
    if target.query or "#" in url:
        raise InvalidOption(
            f"{url!r} cannot be allowed: the query and the fragment play no part.",
            hint="Leave out everything from the '?' or '#'.",
            option="allow",
            value=url,
        )
    return target


def _check_methods(methods: Sequence[str]) -> tuple[str, ...]:
    good = not isinstance(methods, str) and isinstance(methods, Iterable)
    names = tuple(methods) if good else ()
    if not names or not all(isinstance(m, str) and _METHOD.fullmatch(m) for m in names):
        raise InvalidOption(
            f"methods is a list of upper-case HTTP methods, not {methods!r}.",
            hint="Pass methods=['GET', 'POST'].",
            option="methods",
            value=repr(methods),
        )
    return names


def _check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(headers, Mapping):
        raise InvalidOption(
            "headers is a mapping of names to values.",
            hint="Pass headers={'Authorization': f'Bearer {token}'}.",
            option="headers",
        )
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise InvalidOption(
                f"{name!r} is not the name of a header.",
                hint="Use letters, digits and hyphens.",
                option="headers",
                value=name,
            )
        if name.lower() in _FRAMING:
            raise InvalidOption(
                f"the header {name} belongs to the connection and cannot be added.",
                hint="Leave it out.",
                option="headers",
                value=name,
            )
        # The value is a secret: no message may hold it.
        if not isinstance(value, str) or not value or not _HEADER_VALUE.fullmatch(value):
            raise InvalidOption(
                f"the value of the header {name} must be printable ASCII on one line.",
                hint="Strip the line break that came with the secret.",
                option="headers",
                value=name,
            )
    return dict(headers)


def _check_positive(name: str, value: object) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):  # type: ignore[operator]
        raise InvalidOption(
            f"{name} is a positive number, not {value!r}.",
            hint=f"Leave {name} out for the default.",
            option=name,
            value=value,
        )
