"""S3 signatures: the examples of AWS, and a real server that checks them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from yarl import URL

from smokebox.egress import Request, sign_s3
from smokebox.egress.handler import run_handler
from smokebox.egress.message import MessageBody

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.testing import SeaweedServer

# From "Signature Calculations for the Authorization Header" of the Amazon S3 API reference.
KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
BUCKET = "https://examplebucket.s3.amazonaws.com"
TIMESTAMP = "20130524T000000Z"
NO_CONTEXT: Any = None


@pytest.mark.parametrize(
    ("method", "target", "headers", "body", "signature"),
    [
        (
            "GET",
            "/test.txt",
            {"Range": "bytes=0-9"},
            b"",
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (
            "PUT",
            "/test%24file.text",
            {
                "Date": "Fri, 24 May 2013 00:00:00 GMT",
                "x-amz-storage-class": "REDUCED_REDUNDANCY",
            },
            b"Welcome to Amazon S3.",
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        ),
        (
            "GET",
            "/?lifecycle",
            {},
            b"",
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
        ),
        (
            "GET",
            "/?max-keys=2&prefix=J",
            {},
            b"",
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
    ],
)
def test_examples_of_aws_have_the_documented_signatures(
    method: str, target: str, headers: dict[str, str], body: bytes, signature: str
) -> None:
    request = Request(method, BUCKET + target, headers, body)
    signer: Any = sign_s3(KEY, SECRET, "us-east-1")
    signer.sign(request, hashlib.sha256(body).hexdigest(), TIMESTAMP)
    assert request.headers["authorization"].endswith(f"Signature={signature}")
    assert (
        f"Credential={KEY}/20130524/us-east-1/s3/aws4_request" in request.headers["authorization"]
    )


async def sign(request: Request, **options: Any) -> Request:
    handler = sign_s3(KEY, SECRET, "us-east-1", **options)
    signed = await run_handler(handler, request, None, NO_CONTEXT)
    assert isinstance(signed, Request)
    return signed


async def stream(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def test_placeholder_signature_is_replaced() -> None:
    request = Request(
        "GET",
        f"{BUCKET}/a?X-Amz-Algorithm=x&X-Amz-Credential=y&X-Amz-Signature=z&versionId=3",
        {"authorization": "AWS4 placeholder", "x-amz-security-token": "old", "x-amz-date": "1"},
    )
    signed = await sign(request, session_token="the-session")
    assert signed.url == f"{BUCKET}/a?versionId=3"
    assert signed.headers.getall("x-amz-security-token") == ["the-session"]
    assert len(signed.headers.getall("x-amz-date")) == 1
    assert "x-amz-security-token" in signed.headers["authorization"]


async def test_content_hash_of_the_sender_is_kept_and_the_body_not_read() -> None:
    digest = hashlib.sha256(b"data").hexdigest()
    request = Request("PUT", f"{BUCKET}/a", {"x-amz-content-sha256": digest}, stream(b"data"))
    signed = await sign(request)
    assert signed.headers["x-amz-content-sha256"] == digest
    assert signed.body.unread


async def test_stream_is_unsigned_over_tls_and_hashed_over_http() -> None:
    signed = await sign(Request("PUT", f"{BUCKET}/a", {}, stream(b"da", b"ta")))
    assert signed.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert signed.body.unread
    plain = await sign(Request("PUT", "http://s3.test/a", {}, stream(b"da", b"ta")))
    assert plain.headers["x-amz-content-sha256"] == hashlib.sha256(b"data").hexdigest()
    assert plain.body.data == b"data"


CHUNKED = (
    b"5;chunk-signature=abc\r\nhello\r\n6;chunk-signature=def\r\n world\r\n0;chunk-signature=0"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_aws_chunked_body_is_decoded(size: int) -> None:
    data = CHUNKED + b"\r\nx-amz-checksum-crc32:AAAA\r\n\r\n"
    request = Request(
        "PUT",
        f"{BUCKET}/a",
        {
            "x-amz-content-sha256": "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
            "content-encoding": "aws-chunked,gzip",
            "x-amz-decoded-content-length": "11",
            "content-length": str(len(data)),
            "x-amz-trailer": "x-amz-checksum-crc32",
        },
        stream(*(data[start : start + size] for start in range(0, len(data), size))),
    )
    signed = await sign(request)
    assert await signed.read() == b"hello world"
    assert signed.headers["content-length"] == "11"
    assert signed.headers["content-encoding"] == "gzip"
    assert "x-amz-trailer" not in signed.headers


@pytest.mark.parametrize("data", [b"zz\r\nhello", b"5\r\nhel", b"x" * 9000])
async def test_malformed_chunks_raise_value_error(data: bytes) -> None:
    headers = {"x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER"}
    signed = await sign(Request("PUT", f"{BUCKET}/a", headers, stream(data)))
    with pytest.raises(ValueError, match="chunks"):
        await signed.read()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def send(
    session: aiohttp.ClientSession, seaweed: SeaweedServer, request: Request, secret: str = ""
) -> tuple[int, bytes]:
    handler = sign_s3(seaweed.access_key, secret or seaweed.secret_key, seaweed.region)
    signed = await run_handler(handler, request, None, NO_CONTEXT)
    assert isinstance(signed, Request)
    async with session.request(
        signed.method,
        URL(signed.url, encoded=True),
        headers=signed.headers,
        data=signed.body.data or signed.body,
    ) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("name", ["plain.txt", "a%20b%2Bc.txt", "d%C3%A9j%C3%A0/(vu)'!*.txt"])
async def test_real_server_accepts_the_signature(
    seaweed: SeaweedServer, bucket_name: str, session: aiohttp.ClientSession, name: str
) -> None:
    url = f"{seaweed.endpoint}/{bucket_name}/{name}"
    put = Request("PUT", url, {"content-type": "text/plain"}, b"data")
    assert (await send(session, seaweed, put))[0] == 200
    assert await send(session, seaweed, Request("GET", url)) == (200, b"data")
    listing = f"{seaweed.endpoint}/{bucket_name}?list-type=2&prefix=&max-keys=5"
    status, text = await send(session, seaweed, Request("GET", listing))
    assert (status, b"<Key>" in text) == (200, True)


async def test_real_server_refuses_a_wrong_secret(
    seaweed: SeaweedServer, bucket_name: str, session: aiohttp.ClientSession
) -> None:
    request = Request("GET", f"{seaweed.endpoint}/{bucket_name}/a")
    assert (await send(session, seaweed, request, secret="wrong"))[0] == 403


async def test_request_shares_the_body_of_another() -> None:
    first = Request("PUT", BUCKET, {}, stream(b"data"))
    second = Request("PUT", BUCKET, {}, first.body)
    assert second.body is first.body
    assert isinstance(second.body, MessageBody)
