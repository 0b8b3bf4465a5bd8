"""Responses recorded to a file, and replayed from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from smokebox.egress import Refused, Request, Response, bearer, chain, record, replay
from smokebox.egress.handler import run_handler
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.egress import Handler

SECRET = "s3cret-value"


class EchoContext:
    """A `HandlerContext` whose server counts requests and echoes them."""

    sandbox_id, rule = "box", "outbound"

    def __init__(self) -> None:
        self.count = 0

    async def forward(self, request: Request, *, to: str | None = None) -> Response:
        self.count += 1
        authorization = request.headers.get("authorization", "")
        headers = {"x-echo": authorization, "set-cookie": SECRET, "content-type": "text/plain"}
        body = f"{self.count}: {authorization} ".encode() + await request.read()
        return Response(body, 200 + self.count, headers)


def make_request(path: str = "/a", body: bytes = b"", method: str = "GET") -> Request:
    return Request(method, f"https://api.test{path}", {"accept": "*/*"}, body)


async def run(handler: Handler, request: Request, context: Any = None) -> Response:
    result = await run_handler(handler, request, None, context or EchoContext())
    assert isinstance(result, Response)
    return result


async def test_responses_are_replayed_in_recorded_order(tmp_path: Path) -> None:
    path, context = tmp_path / "calls.jsonl", EchoContext()
    recorder = record(path)
    for _ in range(2):
        await run(recorder, make_request(), context)
    await run(recorder, make_request("/a", b"body", "POST"), context)
    player = replay(path)
    responses = [await run(player, make_request()) for _ in range(3)]
    assert [response.status for response in responses] == [201, 202, 202]
    assert await responses[0].text() == "1:  "
    assert responses[0].headers["content-type"] == "text/plain"
    posted = await run(player, make_request("/a", b"body", "POST"))
    assert await posted.text() == "3:  body"


async def test_unrecorded_request_is_refused_and_not_sent(tmp_path: Path) -> None:
    path, context = tmp_path / "calls.jsonl", EchoContext()
    await run(record(path), make_request("/a", b"body", "POST"))
    player = replay(path)
    for other in (
        make_request(),
        make_request("/b", b"body", "POST"),
        make_request("/a", b"other", "POST"),
    ):
        with pytest.raises(Refused, match=r"is not in calls\.jsonl"):
            await run(player, other, context)
    assert context.count == 0


async def test_recording_has_no_secrets(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    handler = chain(bearer(SECRET), record(path))
    response = await run(handler, make_request(f"/a?api_key={SECRET}&page=2"))
    assert SECRET in await response.text()
    text = path.read_text()
    assert SECRET not in text
    assert "page=2" in text
    replayed = await run(replay(path), make_request("/a?api_key=another&page=2"))
    assert replayed.status == 201


async def test_binary_body_is_replayed(tmp_path: Path) -> None:
    path, data = tmp_path / "calls.jsonl", bytes(range(256))

    class Binary(EchoContext):
        async def forward(self, request: Request, *, to: str | None = None) -> Response:
            return Response(data)

    await run(record(path), make_request(), Binary())
    assert await (await run(replay(path), make_request())).read() == data


@pytest.mark.parametrize("path", ["", "missing/directory/x.jsonl", None])
def test_invalid_path_is_refused_at_definition(path: Any) -> None:
    for make in (record, replay):
        with pytest.raises(InvalidOption, match="is not a file"):
            make(path)


def test_missing_or_invalid_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="cannot be read"):
        replay(tmp_path / "missing.jsonl")
    (tmp_path / "wrong.jsonl").write_text('{"method": "GET"}\n')
    with pytest.raises(InvalidOption, match=r"wrong\.jsonl, line 1"):
        replay(tmp_path / "wrong.jsonl")


def test_handlers_after_record_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="nothing can come after record"):
        chain(record(tmp_path / "x"), bearer(SECRET))
    with pytest.raises(InvalidOption, match="nothing can come after chain"):
        chain(chain(record(tmp_path / "x")), bearer(SECRET))
