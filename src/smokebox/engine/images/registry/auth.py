"""Authorization at a registry: challenges, and bearer tokens from its token server."""

from __future__ import annotations

import asyncio
import base64
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import msgspec

from smokebox.egress.urls import Url, parse_url
from smokebox.engine.images.registry.transport import document_deadline
from smokebox.errors import InvalidOption, RegistryError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from smokebox.engine.images.registry.access import Credentials
    from smokebox.engine.images.registry.transport import RegistryResponse, RegistryTransport

PULL = "pull"
PUSH = "pull,push"

_CLIENT_ID = "smokebox"
_MAX_TOKEN_RESPONSE = 1 << 20
_SCHEME = re.compile(r"\s*,?\s*([A-Za-z][A-Za-z0-9!#$%&'*+.^_`|~-]*)(?:\s+|(?=,)|$)")
_PARAMETER = re.compile(r'\s*,?\s*([A-Za-z][\w-]*)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s",]+))')
# Of a header; a token may be several kilobytes long.
_TOKEN = re.compile(r"[\x21-\x7e]{1,65536}")


@dataclass(frozen=True, slots=True)
class Challenge:
    """One challenge of a WWW-Authenticate header, its scheme in lower case."""

    scheme: str
    parameters: dict[str, str]


class _TokenResponse(msgspec.Struct):
    token: str = ""
    access_token: str = ""


class Authorizer:
    """Finds the Authorization header for requests to one registry. Forgets it with the pull."""

    def __init__(
        self, transport: RegistryTransport, registry: str, credentials: Credentials | None
    ) -> None:
        self._transport = transport
        self._registry = registry
        self._credentials = credentials
        self._tokens: dict[str, str] = {}
        self._basic = False
        self._lock = asyncio.Lock()

    @property
    def has_credentials(self) -> bool:
        """True if the caller or the operator has credentials for the registry."""
        return self._credentials is not None

    def header(self, scope: str) -> list[tuple[str, str]]:
        """Return the headers that are known so far to authorize requests of a scope."""
        if self._basic and self._credentials is not None:
            return [("Authorization", basic(self._credentials))]
        token = self._tokens.get(scope)
        if token is None and self._credentials is not None:
            token = self._credentials.registry_token or None
        return [] if token is None else [("Authorization", f"Bearer {token}")]

    async def answer(
        self, response: RegistryResponse, scope: str, sent: list[tuple[str, str]]
    ) -> bool:
        """Prepare for the challenge of a response with status 401; False if that is in vain.

        Args:
            sent: What `header` returned for the request.

        Raises:
            RegistryError: The token server refuses, or gives no token.
        """
        challenges = parse_challenges(response.headers("www-authenticate"))
        async with self._lock:
            # Another request may have been challenged at the same time.
            if self.header(scope) == sent:
                await self._prepare(challenges, scope)
            return self.header(scope) != sent

    async def _prepare(self, challenges: list[Challenge], scope: str) -> None:
        for challenge in challenges:
            if challenge.scheme == "bearer" and "realm" in challenge.parameters:
                self._tokens[scope] = await self._fetch(challenge.parameters, scope)
                return
            if challenge.scheme == "basic" and self._credentials is not None:
                self._basic = self._basic or bool(self._credentials.password)

    async def _fetch(self, parameters: dict[str, str], scope: str) -> str:
        realm = self._realm(parameters["realm"])
        credentials = self._credentials
        values = {"service": parameters.get("service", ""), "scope": scope}
        values = {name: value for name, value in values.items() if value}
        fields = [("Accept", "application/json")]
        method, body, url = "GET", b"", realm
        if credentials is not None and credentials.identity_token:
            form = {
                "grant_type": "refresh_token",
                "refresh_token": credentials.identity_token,
                "client_id": _CLIENT_ID,
                **values,
            }
            method, body = "POST", urlencode(form).encode()
            fields.append(("Content-Type", "application/x-www-form-urlencoded"))
        else:
            if credentials is not None and credentials.password:
                fields.append(("Authorization", basic(credentials)))
                values["account"] = credentials.username
            query = "&".join(part for part in (realm.query, urlencode(values)) if part)
            url = parse_url(f"{realm.origin}{realm.path}?{query}")
        async with (
            document_deadline(realm.authority),
            self._transport.request(method, url, fields, body=body) as response,
        ):
            if response.status != 200:
                raise self._refused(response)
            data = await response.document(_MAX_TOKEN_RESPONSE)
        return self._token(data, realm)

    def _token(self, data: bytes, realm: Url) -> str:
        try:
            found = msgspec.json.decode(data, type=_TokenResponse)
        except msgspec.MsgspecError:
            found = _TokenResponse()
        token = found.token or found.access_token
        if not _TOKEN.fullmatch(token):
            raise RegistryError(
                f"the token server {realm.authority} of {self._registry} sent no token.",
                hint="Report it to the operator of the registry.",
                reason="authentication",
                registry=self._registry,
            )
        return token

    def _realm(self, text: str) -> Url:
        try:
            return parse_url(text)
        except InvalidOption as error:
            raise RegistryError(
                f"{self._registry} names a token server that is not an http or https URL.",
                hint="Report it to the operator of the registry.",
                reason="authentication",
                registry=self._registry,
            ) from error

    def _refused(self, response: RegistryResponse) -> RegistryError:
        realm, status = response.url.authority, response.status
        if status == 429 or status >= 500:
            return RegistryError(
                f"the token server {realm} of {self._registry} failed (HTTP {status}).",
                hint="Try again later.",
                reason="rate_limit" if status == 429 else "network",
                registry=self._registry,
                retry_after=retry_after(response),
            )
        refused = "refuses these credentials" if self.has_credentials else "gives no token"
        return RegistryError(
            f"the token server {realm} of {self._registry} {refused} (HTTP {status}).",
            hint=login_hint(self._registry),
            reason="authentication",
            registry=self._registry,
        )


def parse_challenges(headers: Iterable[str]) -> list[Challenge]:
    """Parse WWW-Authenticate headers, each with one challenge or several; ignore the rest."""
    found: list[Challenge] = []
    for text in headers:
        at = 0
        while match := _SCHEME.match(text, at):
            at = match.end()
            parameters: dict[str, str] = {}
            while pair := _PARAMETER.match(text, at):
                at = pair.end()
                value = pair[3] if pair[2] is None else re.sub(r"\\(.)", r"\1", pair[2])
                parameters.setdefault(pair[1].lower(), value)
            found.append(Challenge(match[1].lower(), parameters))
    return found


def basic(credentials: Credentials) -> str:
    """Return the value of the Authorization header for a user name and a password."""
    pair = f"{credentials.username}:{credentials.password}".encode()
    return f"Basic {base64.b64encode(pair).decode()}"


def login_hint(registry: str) -> str:
    """Return the next step after missing or refused credentials."""
    return (
        f"Run `docker login {registry}` (or write ~/.docker/config.json) where the SDK or "
        "`smokebox` runs; or the operator sets username and password_file in "
        f'[registries."{registry}"] of server.toml.'
    )


def retry_after(response: RegistryResponse) -> float | None:
    """Return the seconds of a Retry-After header, if it has some."""
    text = response.header("retry-after").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 8 else None
