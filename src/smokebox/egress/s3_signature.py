"""Handler that signs requests to S3-compatible servers with a key that the sandbox never sees.

AWS Signature Version 4. Signatures that a program in the sandbox made with a placeholder key are
replaced, and bodies that it signed chunk by chunk are unpacked.
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
from smokebox.egress.urls import DEFAULT_PORTS
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.egress.handler import Handler, HandlerContext

UNSIGNED = "UNSIGNED-PAYLOAD"

_ALGORITHM = "AWS4-HMAC-SHA256"
_SIGNED = frozenset({"content-md5", "content-type", "date", "range"})
_HASH = re.compile(r"[0-9a-f]{64}")
_SCOPE = re.compile(r"[a-z0-9-]+")
_MAX_LINE = 4096


def sign_s3(
    access_key: str,
    secret_key: str,
    region: str,
    service: str = "s3",
    session_token: str | None = None,
) -> Handler:
    """Sign requests for a bucket: `sign_s3(env.ACCESS_KEY, env.SECRET_KEY, "eu-west-1")`.

    Programs in the sandbox sign with any placeholder. A body keeps the hash that its sender
    declared. Without one, a body in memory is hashed; any other is sent unsigned over TLS, and
    read and hashed without TLS.
    """
    for option, value in (("region", region), ("service", service)):
        if not isinstance(value, str) or not _SCOPE.fullmatch(value):
            raise InvalidOption(
                f"sign_s3(): {value!r} is not a {option}.",
                hint="Pass a name such as 'us-east-1', which most servers besides AWS accept.",
                option=option,
                value=value,
            )
    token = None
    if session_token is not None:
        token = check_secret("sign_s3()", "session_token", session_token)
    return _Signer(
        check_secret("sign_s3()", "access_key", access_key),
        check_secret("sign_s3()", "secret_key", secret_key),
        region,
        service,
        token,
    )


class _Signer(BuiltinHandler):
    def __init__(
        self, access_key: str, secret_key: str, region: str, service: str, token: str | None
    ) -> None:
        super().__init__("sign_s3")
        self._access_key = access_key
        self._secret_key = secret_key
        self._region = region
        self._service = service
        self._token = token

    async def __call__(self, request: Request, env: Any, context: HandlerContext) -> Request:
        _remove_placeholders(request)
        digest = await _payload_hash(request)
        self.sign(request, digest, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()))
        return request

    def sign(self, request: Request, digest: str, timestamp: str) -> None:
        """Add a signature for a body with that hash, as `YYYYMMDDTHHMMSSZ`."""
        headers = request.headers
        headers["x-amz-date"] = timestamp
        headers["x-amz-content-sha256"] = digest
        if self._token is not None:
            headers["x-amz-security-token"] = self._token
        signed = _signed_headers(request)
        names = ";".join(signed)
        canonical = "\n".join(
            [
                request.method,
                self._canonical_path(request),
                _canonical_query(request),
                *(f"{name}:{value}" for name, value in signed.items()),
                "",
                names,
                digest,
            ]
        )
        scope = f"{timestamp[:8]}/{self._region}/{self._service}/aws4_request"
        text = (
            f"{_ALGORITHM}\n{timestamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        )
        key = f"AWS4{self._secret_key}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        headers["authorization"] = (
            f"{_ALGORITHM} Credential={self._access_key}/{scope}, "
            f"SignedHeaders={names}, Signature={signature}"
        )

    def _canonical_path(self, request: Request) -> str:
        once = _encode(unquote_to_bytes(urlsplit(request.url).path or "/"), safe="/")
        # Only S3 takes the path encoded once; all other services take it encoded twice.
        return once if self._service == "s3" else _encode(once, safe="/")


def _remove_placeholders(request: Request) -> None:
    """Remove the signature that was made with a placeholder key."""
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


async def _payload_hash(request: Request) -> str:
    declared = request.headers.get("x-amz-content-sha256", "")
    if declared.startswith("STREAMING-"):
        _unpack(request)
        declared = ""
    if _HASH.fullmatch(declared) or declared == UNSIGNED:
        return declared
    if request.body.data is None and urlsplit(request.url).scheme == "https":
        return UNSIGNED
    return hashlib.sha256(await request.read()).hexdigest()


def _unpack(request: Request) -> None:
    """Replace a body of signed chunks, or with a checksum as trailer, by its content."""
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
    request.body = MessageBody(_unpack_chunks(request.body))


async def _unpack_chunks(body: MessageBody) -> AsyncIterator[bytes]:
    """Yield the content of chunks: SIZE;chunk-signature=..., CRLF, bytes, CRLF, ..., 0."""
    buffer, left = bytearray(), -1
    async for data in body:
        buffer += data
        while True:
            if left < 0:
                line, found, _ = buffer.partition(b"\r\n")
                if not found:
                    break
                left = _parse_size(bytes(line))
                del buffer[: len(line) + 2]
                if left == 0:
                    return
            piece = bytes(buffer[:left])
            del buffer[: len(piece)]
            left -= len(piece)
            if piece:
                yield piece
            if left or len(buffer) < 2:
                break  # The rest of the chunk, or the line break after it, has not arrived.
            del buffer[:2]
            left = -1
        if left < 0 and len(buffer) > _MAX_LINE:
            raise ValueError("the body is not in chunks as its headers say")
    raise ValueError("the body ends in the middle of its chunks")


def _parse_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise ValueError("the body is not in chunks as its headers say") from None


def _signed_headers(request: Request) -> dict[str, str]:
    parts = urlsplit(request.url)
    host = parts.netloc.rpartition("@")[2]
    if parts.port == DEFAULT_PORTS.get(parts.scheme):
        host = host.removesuffix(f":{parts.port}")
    found = {"host": host}
    for name in {name.lower() for name in request.headers}:
        if name in _SIGNED or name.startswith("x-amz-"):
            values = request.headers.getall(name)
            found[name] = ",".join(" ".join(value.split()) for value in values)
    return dict(sorted(found.items()))


def _canonical_query(request: Request) -> str:
    pairs = []
    for pair in filter(None, urlsplit(request.url).query.split("&")):
        name, _, value = pair.partition("=")
        pairs.append((_encode(unquote_to_bytes(name)), _encode(unquote_to_bytes(value))))
    return "&".join(f"{name}={value}" for name, value in sorted(pairs))


def _encode(text: str | bytes, safe: str = "") -> str:
    return quote(text, safe=f"-_.~{safe}")
