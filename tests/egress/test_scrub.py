"""Secrets that flow past, in every spelling and cut anywhere."""

from __future__ import annotations

import base64
import html
import json
import random
from urllib.parse import quote

import pytest

from smokebox.egress.scrub import Scrubber, secrets_in

TOKEN = 'sk-live/9+a&b"c=VERYSECRET'


def scrubbed(text: bytes, pieces: int = 1, secrets: set[str] | None = None) -> bytes:
    scrubber = Scrubber(secrets or {TOKEN})
    size = -(-len(text) // pieces)
    shown = [scrubber.feed(text[at : at + size]) for at in range(0, len(text), size)]
    return b"".join(shown) + scrubber.finish()


@pytest.mark.parametrize(
    "spelled",
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
def test_a_secret_is_struck_in_every_spelling_and_nothing_moves(spelled: str) -> None:
    text = f"before {spelled} after".encode()
    clean = scrubbed(text)
    assert len(clean) == len(text)
    assert clean.startswith(b"before ") and clean.endswith(b" after")
    assert b"[redacted]" in clean
    assert b"VERYSECRET" not in clean


@pytest.mark.parametrize("pieces", [2, 3, 7, 20, 60])
def test_a_secret_that_is_cut_into_pieces_is_struck(pieces: int) -> None:
    text = f"{TOKEN}|{TOKEN}{TOKEN}|".encode()
    clean = scrubbed(text, pieces)
    assert len(clean) == len(text)
    assert clean.count(b"[redacted]") == 3
    assert b"SECRET" not in clean


def test_what_cannot_begin_a_secret_is_shown_at_once() -> None:
    scrubber = Scrubber({TOKEN})
    assert scrubber.feed(b"data: 1\n\n") == b"data: 1\n\n"
    assert scrubber.feed(b"data: sk-li") == b"data: "
    assert scrubber.feed(b"ne\n\n") == b"sk-line\n\n"


def test_text_without_the_secret_comes_out_as_it_went_in() -> None:
    chance = random.Random(7)
    for _ in range(200):
        text = bytes(chance.choices(b"sk-live/9+ab", k=chance.randrange(1, 300)))
        assert scrubbed(text, chance.randrange(1, 9)) == text


def test_the_parts_of_credentials_are_secrets_and_plain_headers_are_not() -> None:
    basic = "Basic " + base64.b64encode(b"me:hunter2-long").decode()
    found = secrets_in({"Authorization": basic, "Accept": "text/html-and-more"})
    assert "hunter2-long" in found
    assert "text/html-and-more" not in found
    assert "opensesame" in secrets_in([("Cookie", "a=1; session=opensesame")])
    assert secrets_in({"X-Short": "abc"}) == set()


def test_texts_are_searched_together_and_told_apart() -> None:
    scrubber = Scrubber({"s3cret-value"})
    assert scrubber.finds_in(["a", "x s3cret-value y"])
    assert not scrubber.finds_in(["s3cret", "-value"])
    assert not Scrubber(()).finds_in(["s3cret-value"])
