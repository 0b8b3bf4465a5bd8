"""Signatures of S3: AWS's own examples, and a real server that checks them."""

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
MOMENT = "20130524T000000Z"
EMPTY = hashlib.sha256(b"").hexdigest()
NOBODY: Any = None


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
def test_the_examples_of_aws_have_the_signatures_of_aws(
    method: str, target: str, headers: dict[str, str], body: bytes, signature: str
) -> None:
    request = Request(method, BUCKET + target, headers, body)
    signer: Any = sign_s3(KEY, SECRET, "us-east-1")
    signer.sign(request, hashlib.sha256(body).hexdigest(), MOMENT)
    assert request.headers["authorization"].endswith(f"Signature={signature}")
    assert (
        f"Credential={KEY}/20130524/us-east-1/s3/aws4_request" in request.headers["authorization"]
    )


async def signed(request: Request, **options: Any) -> Request:
    handler = sign_s3(KEY, SECRET, "us-east-1", **options)
    made = await run_handler(handler, request, None, NOBODY)
    assert isinstance(made, Request)
    return made


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def test_what_was_signed_with_a_placeholder_is_signed_anew() -> None:
    request = Request(
        "GET",
        f"{BUCKET}/a?X-Amz-Algorithm=x&X-Amz-Credential=y&X-Amz-Signature=z&versionId=3",
        {"authorization": "AWS4 placeholder", "x-amz-security-token": "old", "x-amz-date": "1"},
    )
    made = await signed(request, session_token="the-session")
    assert made.url == f"{BUCKET}/a?versionId=3"
    assert made.headers.getall("x-amz-security-token") == ["the-session"]
    assert len(made.headers.getall("x-amz-date")) == 1
    assert "x-amz-security-token" in made.headers["authorization"]


async def test_a_hash_that_the_sender_told_is_kept_and_the_body_not_read() -> None:
    digest = hashlib.sha256(b"data").hexdigest()
    request = Request("PUT", f"{BUCKET}/a", {"x-amz-content-sha256": digest}, pieces(b"data"))
    made = await signed(request)
    assert made.headers["x-amz-content-sha256"] == digest
    assert made.body.unread


async def test_a_stream_goes_unsigned_over_tls_and_is_read_without() -> None:
    made = await signed(Request("PUT", f"{BUCKET}/a", {}, pieces(b"da", b"ta")))
    assert made.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert made.body.unread
    plain = await signed(Request("PUT", "http://s3.test/a", {}, pieces(b"da", b"ta")))
    assert plain.headers["x-amz-content-sha256"] == hashlib.sha256(b"data").hexdigest()
    assert plain.body.data == b"data"


CHUNKED = (
    b"5;chunk-signature=abc\r\nhello\r\n6;chunk-signature=def\r\n world\r\n0;chunk-signature=0"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_a_body_that_was_signed_in_pieces_is_unpacked(size: int) -> None:
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
        pieces(*(data[start : start + size] for start in range(0, len(data), size))),
    )
    made = await signed(request)
    assert await made.read() == b"hello world"
    assert made.headers["content-length"] == "11"
    assert made.headers["content-encoding"] == "gzip"
    assert "x-amz-trailer" not in made.headers


@pytest.mark.parametrize("data", [b"zz\r\nhello", b"5\r\nhel", b"x" * 9000])
async def test_pieces_that_are_none_are_an_error(data: bytes) -> None:
    headers = {"x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER"}
    made = await signed(Request("PUT", f"{BUCKET}/a", headers, pieces(data)))
    with pytest.raises(ValueError, match="chunks"):
        await made.read()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def send(
    session: aiohttp.ClientSession, seaweed: SeaweedServer, request: Request, secret: str = ""
) -> tuple[int, bytes]:
    handler = sign_s3(seaweed.access_key, secret or seaweed.secret_key, seaweed.region)
    made = await run_handler(handler, request, None, NOBODY)
    assert isinstance(made, Request)
    async with session.request(
        made.method,
        URL(made.url, encoded=True),
        headers=made.headers,
        data=made.body.data or made.body,
    ) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("name", ["plain.txt", "a%20b%2Bc.txt", "d%C3%A9j%C3%A0/(vu)'!*.txt"])
async def test_a_real_server_takes_the_signature(
    seaweed: SeaweedServer, bucket_name: str, session: aiohttp.ClientSession, name: str
) -> None:
    url = f"{seaweed.endpoint}/{bucket_name}/{name}"
    put = Request("PUT", url, {"content-type": "text/plain"}, b"data")
    assert (await send(session, seaweed, put))[0] == 200
    assert await send(session, seaweed, Request("GET", url)) == (200, b"data")
    listing = f"{seaweed.endpoint}/{bucket_name}?list-type=2&prefix=&max-keys=5"
    status, text = await send(session, seaweed, Request("GET", listing))
    assert (status, b"<Key>" in text) == (200, True)


async def test_a_real_server_refuses_another_key(
    seaweed: SeaweedServer, bucket_name: str, session: aiohttp.ClientSession
) -> None:
    request = Request("GET", f"{seaweed.endpoint}/{bucket_name}/a")
    assert (await send(session, seaweed, request, secret="wrong"))[0] == 403


async def test_a_body_keeps_what_it_was_when_a_request_is_made_of_another() -> None:
    first = Request("PUT", BUCKET, {}, pieces(b"data"))
    second = Request("PUT", BUCKET, {}, first.body)
    assert second.body is first.body
    assert isinstance(second.body, MessageBody)
