"""Webhooks: signed requests are accepted, each delivery once."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from app.site import ECHO, project, serve
from http_response import HttpResponse, fetch
from smokebox.app.project import load_project
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from app.site import Site

SECRET = "whsec_" + base64.b64encode(b"a secret of some length").decode()
HOOK = """
triggers = {{"webhook": {{"verify": "{preset}", "secret": "HOOK_SECRET"}}}}

async def run(ctx):
    return ctx.payload
"""


def hex_digest(key: str, data: bytes) -> str:
    return hmac.new(key.encode(), data, hashlib.sha256).hexdigest()


def github(body: bytes, at: float) -> dict[str, str]:
    return {"X-Hub-Signature-256": f"sha256={hex_digest(SECRET, body)}", "X-GitHub-Delivery": "d1"}


def slack(body: bytes, at: float) -> dict[str, str]:
    signed = hex_digest(SECRET, b"v0:%d:" % at + body)
    return {"X-Slack-Request-Timestamp": str(int(at)), "X-Slack-Signature": f"v0={signed}"}


def stripe(body: bytes, at: float) -> dict[str, str]:
    return {"Stripe-Signature": f"t={int(at)},v1=00ff,v1={hex_digest(SECRET, b'%d.' % at + body)}"}


def standard(body: bytes, at: float) -> dict[str, str]:
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    signed = hmac.new(key, b"msg_1.%d." % at + body, hashlib.sha256).digest()
    signature = f"v1,AAAA v1,{base64.b64encode(signed).decode()}"
    stamp = str(int(at))
    return {"webhook-id": "msg_1", "webhook-timestamp": stamp, "webhook-signature": signature}


def generic(body: bytes, at: float) -> dict[str, str]:
    return {"X-Signature": hex_digest(SECRET, body)}


SENDERS = {
    "github": github,
    "slack": slack,
    "stripe": stripe,
    "standard": standard,
    "hmac": generic,
}
TIMESTAMPED = ["slack", "stripe", "standard"]
BODY = json.dumps({"event": "opened"}).encode()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    hooks = {f"workflows__{name}": HOOK.format(preset=name) for name in SENDERS}
    folder = project(tmp_path / "p", agents__echo=ECHO, **hooks)
    (folder / ".env").write_text(f"HOOK_SECRET={SECRET}\nSMOKEBOX_APP_KEYS=the-key\n")
    async with serve(folder) as site:
        yield site


@pytest.mark.parametrize("preset", SENDERS)
async def test_signed_request_needs_no_key(site: Site, preset: str) -> None:
    headers = SENDERS[preset](BODY, time.time())
    done = await site.post(f"/workflows/{preset}?wait=result", data=BODY, headers=headers)
    assert (done.status, done.body["result"]) == (200, {"event": "opened"})


@pytest.mark.parametrize("preset", SENDERS)
async def test_unsigned_request_is_refused(site: Site, preset: str) -> None:
    signed = SENDERS[preset](BODY, time.time())
    for headers, body in (
        ({}, BODY),
        ({"Authorization": "Bearer the-key"}, BODY),
        (signed, BODY + b" "),
        ({name: "t=,v1=,é"[:-1] for name in signed}, BODY),
        ({name: value[:-1] for name, value in signed.items()}, BODY),
    ):
        found = await site.post(f"/workflows/{preset}", data=body, headers=headers)
        assert (found.status, found.code) == (401, "unauthorized"), headers


@pytest.mark.parametrize("preset", TIMESTAMPED)
@pytest.mark.parametrize("seconds", [-400, 400])
async def test_expired_signature_is_refused(site: Site, preset: str, seconds: float) -> None:
    headers = SENDERS[preset](BODY, time.time() + seconds)
    found = await site.post(f"/workflows/{preset}", data=BODY, headers=headers)
    assert (found.status, found.code) == (401, "unauthorized")
    assert "more than 300 seconds" in found.body["error"]["message"]


@pytest.mark.parametrize("preset", TIMESTAMPED)
@pytest.mark.parametrize("stamp", ["", "-5", "1e9", "1.5", "now", "9" * 400, "9" * 5000, "0x1"])
async def test_invalid_timestamp_is_refused(site: Site, preset: str, stamp: str) -> None:
    at = int(time.time())
    headers = {
        name: value.replace(str(at), stamp) for name, value in SENDERS[preset](BODY, at).items()
    }
    found = await site.post(f"/workflows/{preset}", data=BODY, headers=headers)
    assert (found.status, found.code) == (401, "unauthorized")
    assert "no valid timestamp" in found.body["error"]["message"]


async def test_delivery_without_an_id_is_refused(site: Site) -> None:
    stamp, key = str(int(time.time())), base64.b64decode(SECRET.removeprefix("whsec_"))
    signed = hmac.new(key, f".{stamp}.".encode() + BODY, hashlib.sha256).digest()
    signature = f"v1,{base64.b64encode(signed).decode()}"
    headers = {"webhook-timestamp": stamp, "webhook-signature": signature}
    found = await site.post("/workflows/standard", data=BODY, headers=headers)
    assert (found.status, found.code) == (401, "unauthorized")
    assert "webhook-id" in found.body["error"]["hint"]


@pytest.mark.parametrize(
    "body", [b'{"a":', b"payload=%7B%7D", b"\xff\xfe", b"[" * 100_000 + b"]" * 100_000]
)
async def test_signed_body_that_is_not_json_is_refused(site: Site, body: bytes) -> None:
    headers = github(body, time.time())
    found = await site.post("/workflows/github", data=body, headers=headers)
    assert (found.status, found.code) == (400, "invalid_option")
    # Not signed: nothing is said about it.
    found = await site.post("/workflows/github", data=body)
    assert found.status == 401


async def test_very_large_body_is_refused(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", workflows__hook=HOOK.format(preset="github"))
    (folder / ".env").write_text(f"HOOK_SECRET={SECRET}\n")
    (folder / "smokebox.toml").write_text("[app]\nmax_body = 100000\n")
    body = json.dumps({"text": "x" * 200_000}).encode()

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    async with serve(folder) as site:
        for data in (body, chunks()):
            found = await site.post("/workflows/hook", data=data, headers=github(body, 0))
            assert (found.status, found.code) == (413, "request_too_large")
            assert "max_body" in found.body["error"]["hint"]
        fits = json.dumps({"text": "x" * 90_000}).encode()
        done = await site.post("/workflows/hook", data=fits, headers=github(fits, 0))
        assert done.status == 202


@pytest.mark.parametrize("preset", ["github", *TIMESTAMPED])
async def test_repeated_delivery_is_the_same_run(site: Site, preset: str) -> None:
    """Also under another Idempotency-Key or delivery id: neither is signed."""
    headers = SENDERS[preset](BODY, time.time())
    first = await site.post(f"/workflows/{preset}", data=BODY, headers=headers)
    odd = {**headers, "Idempotency-Key": "another", "X-GitHub-Delivery": "d2"}
    again = await site.post(f"/workflows/{preset}", data=BODY, headers=odd)
    assert first.body["submission_id"] == again.body["submission_id"]


async def test_delivery_is_not_accepted_for_another_conversation(tmp_path: Path) -> None:
    """The signature does not cover the URL: a captured delivery could be sent to any other."""
    agent = f"{ECHO}\ntriggers = {{'webhook': {{'verify': 'github', 'secret': 'HOOK_SECRET'}}}}\n"
    folder = project(tmp_path / "p", agents__echo=agent, agents__other=agent)
    (folder / ".env").write_text(f"HOOK_SECRET={SECRET}\nSMOKEBOX_APP_KEYS=the-key\n")
    body = json.dumps({"message": "hello"}).encode()
    headers = github(body, time.time())
    async with serve(folder) as site:
        first = await site.post("/agents/echo/one?wait=result", data=body, headers=headers)
        again = await site.post("/agents/echo/one?wait=result", data=body, headers=headers)
        assert first.status == again.status == 200
        assert first.body["submission_id"] == again.body["submission_id"]
        refused = await site.post("/agents/echo/two", data=body, headers=headers)
        assert (refused.status, refused.code) == (409, "conflict")
        assert "one" not in refused.body["error"]["message"].split()
        key = {"Authorization": "Bearer the-key"}
        assert (await site.delete("/agents/echo/one", headers=key)).status == 200
        for id in ("one", "two"):
            refused = await site.post(f"/agents/echo/{id}", data=body, headers=headers)
            assert (refused.status, refused.code) == (409, "conflict")
        assert (await site.post("/agents/other/two", data=body, headers=headers)).status == 202


SERVER = "import sys, uvicorn; from smokebox.app import create_app\n" + (
    "uvicorn.run(create_app(sys.argv[1]), port=int(sys.argv[2]), log_level='warning')"
)


def hooked(folder: Path, preset: str) -> Path:
    """Write a project with two agents that take the same deliveries."""
    triggers = {"webhook": {"verify": preset, "secret": "HOOK_SECRET"}}
    agent = f"{ECHO}\ntriggers = {triggers}\n"
    project(folder, agents__echo=agent, agents__other=agent)
    (folder / ".env").write_text(f"HOOK_SECRET={SECRET}\n")
    return folder


async def deliver(url: str, http: aiohttp.ClientSession, id: str, **signed: Any) -> HttpResponse:
    return await fetch(http.post(f"{url}/agents/echo/{id}", **signed))


@pytest.mark.parametrize("preset", SENDERS)
async def test_delivery_is_bound_to_its_conversation_in_every_process(
    tmp_path: Path, preset: str
) -> None:
    folder = hooked(tmp_path / "p", preset)
    body = json.dumps({"message": "hello"}).encode()
    signed = {"data": body, "headers": SENDERS[preset](body, time.time())}
    async with serve(folder) as one, serve(folder) as two:
        first = await deliver(one.url, one.http, "one", **signed)
        assert first.status == 202
        sent = [deliver(site.url, site.http, "two", **signed) for site in (one, two) * 5]
        assert {found.status for found in await asyncio.gather(*sent)} == {409}
        again = await deliver(two.url, two.http, "one", **signed)
        assert again.status == 202
        repeated = again.body["submission_id"] == first.body["submission_id"]
        assert repeated == (preset != "hmac")
        other = await two.post("/agents/other/two", **signed)
        assert other.status == 202
    async with serve(folder) as site:
        assert (await deliver(site.url, site.http, "two", **signed)).status == 409
        assert (await deliver(site.url, site.http, "one", **signed)).status == 202


@pytest.mark.parametrize("preset", ["github", "hmac"])
async def test_delivery_sent_to_many_at_once_is_accepted_by_one(
    tmp_path: Path, preset: str
) -> None:
    folder = hooked(tmp_path / "p", preset)
    body = json.dumps({"message": "hello"}).encode()
    signed = {"data": body, "headers": SENDERS[preset](body, time.time())}
    async with serve(folder) as one, serve(folder) as two:
        sent = [
            deliver(site.url, site.http, f"id-{number}", **signed)
            for number in range(10)
            for site in (one, two)
        ]
        found = await asyncio.gather(*sent)
        accepted = {response.body["id"] for response in found if response.status == 202}
        assert len(accepted) == 1
        assert {response.status for response in found} == {202, 409}


async def test_replay_is_refused_after_kill_9(tmp_path: Path) -> None:
    folder = hooked(tmp_path / "p", "github")
    body = json.dumps({"message": "wait never"}).encode()
    signed = {"data": body, "headers": github(body, 0)}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVER, str(folder), str(port)]
    url, ids = f"http://127.0.0.1:{port}", []
    async with aiohttp.ClientSession() as http, asyncio.timeout(18):
        for expected in (202, 409):
            process = await asyncio.create_subprocess_exec(*command)
            try:
                while True:
                    with contextlib.suppress(aiohttp.ClientConnectionError):
                        ids.append(await deliver(url, http, "one", **signed))
                        break
                    await asyncio.sleep(0.05)
                if expected == 409:
                    assert (await deliver(url, http, "two", **signed)).status == 409
            finally:
                # At once after the response: what was accepted is durable.
                process.kill()
                await process.wait()
    assert ids[0].body["submission_id"] == ids[1].body["submission_id"]


async def test_request_without_a_key_reveals_nothing(site: Site) -> None:
    for path in ("/agents/echo/one", "/agents/unknown/one", "/workflows/unknown"):
        found = await site.post(path, {"message": "hello"})
        assert (found.status, found.code) == (401, "unauthorized")
        assert "echo" not in str(found.body)
    for path in ("/agents", "/agents/echo/one", "/submissions/x", "/runs/x"):
        assert (await site.get(path)).status == 401
    wrong = {"Authorization": "Bearer the-kez"}
    assert (await site.get("/agents", headers=wrong)).status == 401
    assert (await site.get("/health")).status == 200


async def test_request_with_the_key_is_accepted(site: Site) -> None:
    key = {"Authorization": "Bearer the-key"}
    done = await site.send("echo/one?wait=result", "hello", headers=key)
    assert done.body["result"]["text"] == "echo: hello"


async def test_closed_trigger_refuses_requests(tmp_path: Path) -> None:
    text = 'triggers = {"webhook": False}\nasync def run(ctx): ...\n'
    async with serve(project(tmp_path / "p", workflows__inner=text)) as site:
        found = await site.post("/workflows/inner")
        assert (found.status, found.code) == (403, "forbidden")


@pytest.mark.parametrize(
    ("webhook", "expected"),
    [
        ('{"verify": "githup", "secret": "HOOK_SECRET"}', "verify must be one of github"),
        ('{"verify": "github", "secret": "not a name"}', "secret must be the name of a variable"),
        ('{"verify": "github", "secret": "NOT_SET"}', "the secret NOT_SET is not set"),
        (
            '{"verify": "github", "secret": "HOOK_SECRET", "window": 9}',
            "github does not take window",
        ),
        ('{"verify": "slack", "secret": "HOOK_SECRET", "window": 0}', "window seconds"),
        ('{"verify": "standard", "secret": "ODD"}', "is not base64"),
        ("7", "webhook must be True, False or a dict"),
    ],
)
def test_invalid_trigger_is_found_at_startup(tmp_path: Path, webhook: str, expected: str) -> None:
    text = f'\ntriggers = {{"webhook": {webhook}}}\nasync def run(ctx): ...\n'
    folder = project(tmp_path / "p", workflows__hook=text)
    (folder / ".env").write_text(f"HOOK_SECRET={SECRET}\nODD=!!\n")
    with pytest.raises(InvalidOption) as caught:
        load_project(folder)
    assert "hook.py, line 2" in str(caught.value) and expected in str(caught.value)
