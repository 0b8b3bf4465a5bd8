"""Secrets in streams: redacted in every encoding, and when split between chunks."""

from __future__ import annotations

import base64
import html
import json
import random
from urllib.parse import quote

import pytest

from smokebox.egress.scrub import Scrubber, secrets_in

TOKEN = 'sk-live/9+a&b"c=VERYSECRET'


def scrub(text: bytes, chunks: int = 1, secrets: set[str] | None = None) -> bytes:
    scrubber = Scrubber(secrets or {TOKEN})
    size = -(-len(text) // chunks)
    output = [scrubber.feed(text[at : at + size]) for at in range(0, len(text), size)]
    return b"".join(output) + scrubber.finish()


@pytest.mark.parametrize(
    "encoded",
    [
        TOKEN,
        quote(TOKEN),
        quote(TOKEN, safe=""),
        json.dumps(TOKEN),
        html.escape(TOKEN),
        TOKEN.encode().hex(),
        TOKEN.encode().hex().upper(),
        base64.b64encode(TOKEN.encode()).decode(),
        base64.b64encode(f"x{TOKEN}y".encode()).decode(),
        base64.urlsafe_b64encode(f"{{'header': '{TOKEN}'}}".encode()).decode(),
    ],
)
def test_redaction_covers_every_encoding_and_keeps_the_length(encoded: str) -> None:
    text = f"before {encoded} after".encode()
    clean = scrub(text)
    assert len(clean) == len(text)
    assert clean.startswith(b"before ") and clean.endswith(b" after")
    assert b"[redacted]" in clean
    assert b"VERYSECRET" not in clean


@pytest.mark.parametrize("chunks", [2, 3, 7, 20, 60])
def test_secret_split_between_chunks_is_redacted(chunks: int) -> None:
    text = f"{TOKEN}|{TOKEN}{TOKEN}|".encode()
    clean = scrub(text, chunks)
    assert len(clean) == len(text)
    assert clean.count(b"[redacted]") == 3
    assert b"SECRET" not in clean


def test_text_that_cannot_start_a_secret_is_not_delayed() -> None:
    scrubber = Scrubber({TOKEN})
    assert scrubber.feed(b"data: 1\n\n") == b"data: 1\n\n"
    assert scrubber.feed(b"data: sk-li") == b"data: "
    assert scrubber.feed(b"ne\n\n") == b"sk-line\n\n"


def test_text_without_a_secret_is_unchanged() -> None:
    rng = random.Random(7)
    for _ in range(200):
        text = bytes(rng.choices(b"sk-live/9+ab", k=rng.randrange(1, 300)))
        assert scrub(text, rng.randrange(1, 9)) == text


def test_parts_of_credentials_are_secrets_and_plain_headers_are_not() -> None:
    basic = "Basic " + base64.b64encode(b"me:hunter2-long").decode()
    found = secrets_in({"Authorization": basic, "Accept": "text/html-and-more"})
    assert "hunter2-long" in found
    assert "text/html-and-more" not in found
    assert "opensesame" in secrets_in([("Cookie", "a=1; session=opensesame")])
    assert secrets_in({"X-Short": "abc"}) == set()


def test_texts_are_searched_separately() -> None:
    scrubber = Scrubber({"s3cret-value"})
    assert scrubber.finds_in(["a", "x s3cret-value y"])
    assert not scrubber.finds_in(["s3cret", "-value"])
    assert not Scrubber(()).finds_in(["s3cret-value"])
