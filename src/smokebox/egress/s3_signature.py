"""Requests to S3, and to what speaks like it, signed with a key that the sandbox never sees.

AWS Signature Version 4. What a program in the sandbox signed with a placeholder is signed
anew; a body that it signed in pieces is unpacked.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, unquote_to_bytes, urlsplit, urlunsplit

from smokebox.egress.builtin_handlers import BuiltinHandler, check_secret
from smokebox.egress.message import MessageBody, Request
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.egress.handler import Handler, HandlerContext

UNSIGNED = "UNSIGNED-PAYLOAD"

_ALGORITHM = "AWS4-HMAC-SHA256"
_SIGNED = frozenset({"content-md5", "content-type", "date", "range"})
_HASH = re.compile(r"[0-9a-f]{64}")
_SCOPE = re.compile(r"[a-z0-9-]+")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_LONGEST_LINE = 4096


def sign_s3(
    access_key: str,
    secret_key: str,
    region: str,
    service: str = "s3",
    session_token: str | None = None,
) -> Handler:
    """Sign requests for a bucket: `sign_s3(env.ACCESS_KEY, env.SECRET_KEY, "eu-west-1")`.

    Programs in the sandbox sign with any placeholder, and it is replaced. A body keeps the
    hash that its sender told of it; without one it is hashed where it is all here already,
    sent unsigned over TLS, and else read first.
    """
    for option, value in (("region", region), ("service", service)):
        if not isinstance(value, str) or not _SCOPE.fullmatch(value):
            raise InvalidOption(
                f"sign_s3(): {value!r} is no {option}.",
                hint="Such as 'us-east-1', which most servers besides AWS take.",
                option=option,
                value=value,
            )
    token = None
    if session_token is not None:
        token = check_secret("sign_s3()", "session_token", session_token)
    return _Signer(
        check_secret("sign_s3()", "access_key", access_key),
        check_secret("sign_s3()", "secret_key", secret_key),
        f"{region}/{service}",
        token,
    )


class _Signer(BuiltinHandler):
    def __init__(self, access_key: str, secret_key: str, place: str, token: str | None) -> None:
        super().__init__("sign_s3")
        self._access_key = access_key
        self._secret_key = secret_key
        self._region, _, self._service = place.partition("/")
        self._token = token

    async def __call__(self, request: Request, env: Any, context: HandlerContext) -> Request:
        _forget_placeholders(request)
        digest = await _payload(request)
        self.sign(request, digest, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()))
        return request

    def sign(self, request: Request, digest: str, moment: str) -> None:
        """Add the signature of a moment, for a body with that hash."""
        headers = request.headers
        headers["x-amz-date"] = moment
        headers["x-amz-content-sha256"] = digest
        if self._token is not None:
            headers["x-amz-security-token"] = self._token
        signed = _signed_headers(request)
        names = ";".join(signed)
        canonical = "\n".join(
            [
                request.method,
                self._path(request),
                _query(request),
                *(f"{name}:{value}" for name, value in signed.items()),
                "",
                names,
                digest,
            ]
        )
        scope = f"{moment[:8]}/{self._region}/{self._service}/aws4_request"
        text = f"{_ALGORITHM}\n{moment}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        key = f"AWS4{self._secret_key}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        headers["authorization"] = (
            f"{_ALGORITHM} Credential={self._access_key}/{scope}, "
            f"SignedHeaders={names}, Signature={signature}"
        )

    def _path(self, request: Request) -> str:
        once = _encoded(unquote_to_bytes(urlsplit(request.url).path or "/"), safe="/")
        # S3 alone takes the path as it is; all others have it encoded twice.
        return once if self._service == "s3" else _encoded(once, safe="/")


def _forget_placeholders(request: Request) -> None:
    """Take out what was signed with a key that opens nothing."""
    for name in ("authorization", "x-amz-security-token", "x-amz-date"):
        request.headers.popall(name, None)
    parts = urlsplit(request.url)
    pairs = [
        pair
        for pair in parts.query.split("&")
        if unquote(pair.partition("=")[0]).lower() not in _PRESIGNED
    ]
    request.url = urlunsplit(parts._replace(query="&".join(pairs)))


_PRESIGNED = frozenset(
    f"x-amz-{name}"
    for name in (
        "algorithm",
        "credential",
        "date",
        "expires",
        "signedheaders",
        "signature",
        "security-token",
        "content-sha256",
    )
)


async def _payload(request: Request) -> str:
    told = request.headers.get("x-amz-content-sha256", "")
    if told.startswith("STREAMING-"):
        _unpack(request)
        told = ""
    if _HASH.fullmatch(told) or told == UNSIGNED:
        return told
    known = request.body.known
    if known is None and urlsplit(request.url).scheme == "https":
        return UNSIGNED
    return hashlib.sha256(await request.read() if known is None else known).hexdigest()


def _unpack(request: Request) -> None:
    """Take a body out of the pieces that were signed, or have a sum after the last."""
    headers = request.headers
    encodings = [one.strip() for one in headers.get("content-encoding", "").split(",")]
    rest = ", ".join(one for one in encodings if one and one != "aws-chunked")
    for name in ("content-encoding", "x-amz-trailer", "x-amz-sdk-checksum-algorithm"):
        headers.popall(name, None)
    if rest:
        headers["content-encoding"] = rest
    size = headers.pop("x-amz-decoded-content-length", None)
    if size is not None:
        headers["content-length"] = size
    request.body = MessageBody(_pieces(request.body))


async def _pieces(body: MessageBody) -> AsyncIterator[bytes]:
    """What is in the pieces of a body: SIZE;chunk-signature=..., CRLF, bytes, CRLF, ..., 0."""
    held, left = bytearray(), -1
    async for data in body:
        held += data
        while True:
            if left < 0:
                line, found, _ = held.partition(b"\r\n")
                if not found:
                    break
                left = _size(bytes(line))
                del held[: len(line) + 2]
                if left == 0:
                    return
            taken = bytes(held[:left])
            del held[: len(taken)]
            left -= len(taken)
            if taken:
                yield taken
            if left or len(held) < 2:
                break  # More of this piece is to come, or the line break after it.
            del held[:2]
            left = -1
        if left < 0 and len(held) > _LONGEST_LINE:
            raise ValueError("the body is not in the pieces that its headers tell of")
    raise ValueError("the body ends within its pieces")


def _size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise ValueError("the body is not in the pieces that its headers tell of") from None


def _signed_headers(request: Request) -> dict[str, str]:
    parts = urlsplit(request.url)
    host = parts.netloc.rpartition("@")[2]
    if parts.port == _DEFAULT_PORTS.get(parts.scheme):
        host = host.removesuffix(f":{parts.port}")
    found = {"host": host}
    for name in {name.lower() for name in request.headers}:
        if name in _SIGNED or name.startswith("x-amz-"):
            values = request.headers.getall(name)
            found[name] = ",".join(" ".join(value.split()) for value in values)
    return dict(sorted(found.items()))


def _query(request: Request) -> str:
    pairs = []
    for pair in filter(None, urlsplit(request.url).query.split("&")):
        name, _, value = pair.partition("=")
        pairs.append((_encoded(unquote_to_bytes(name)), _encoded(unquote_to_bytes(value))))
    return "&".join(f"{name}={value}" for name, value in sorted(pairs))


def _encoded(text: str | bytes, safe: str = "") -> str:
    return quote(text, safe=f"-_.~{safe}")
