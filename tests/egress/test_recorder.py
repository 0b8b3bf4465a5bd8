"""Answers that are recorded once, and replayed."""

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


class Server:
    """A context whose server counts, and echoes what it was sent."""

    sandbox_id, rule = "box", "outbound"

    def __init__(self) -> None:
        self.count = 0

    async def forward(self, request: Request, *, to: str | None = None) -> Response:
        self.count += 1
        told = request.headers.get("authorization", "")
        headers = {"x-echo": told, "set-cookie": SECRET, "content-type": "text/plain"}
        body = f"{self.count}: {told} ".encode() + await request.read()
        return Response(body, 200 + self.count, headers)


def asking(path: str = "/a", body: bytes = b"", method: str = "GET") -> Request:
    return Request(method, f"https://api.test{path}", {"accept": "*/*"}, body)


async def run(handler: Handler, request: Request, server: Server | None = None) -> Response:
    context: Any = server or Server()
    made = await run_handler(handler, request, None, context)
    assert isinstance(made, Response)
    return made


async def test_what_was_recorded_is_replayed_in_its_order(tmp_path: Path) -> None:
    path, server = tmp_path / "calls.jsonl", Server()
    recorder = record(path)
    for _ in range(2):
        await run(recorder, asking(), server)
    await run(recorder, asking("/a", b"body", "POST"), server)
    player = replay(path)
    got = [await run(player, asking()) for _ in range(3)]
    assert [one.status for one in got] == [201, 202, 202]
    assert await got[0].text() == "1:  "
    assert got[0].headers["content-type"] == "text/plain"
    posted = await run(player, asking("/a", b"body", "POST"))
    assert await posted.text() == "3:  body"


async def test_what_was_not_recorded_is_refused_and_nothing_is_sent(tmp_path: Path) -> None:
    path, server = tmp_path / "calls.jsonl", Server()
    await run(record(path), asking("/a", b"body", "POST"))
    player = replay(path)
    for other in (asking(), asking("/b", b"body", "POST"), asking("/a", b"other", "POST")):
        with pytest.raises(Refused, match=r"is not in calls\.jsonl"):
            await run(player, other, server)
    assert server.count == 0


async def test_secrets_are_in_no_recording(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    handler = chain(bearer(SECRET), record(path))
    answer = await run(handler, asking(f"/a?api_key={SECRET}&page=2"))
    assert SECRET in await answer.text()
    text = path.read_text()
    assert SECRET not in text
    assert "page=2" in text
    again = await run(replay(path), asking("/a?api_key=another&page=2"))
    assert again.status == 201


async def test_bytes_that_are_no_text_come_back(tmp_path: Path) -> None:
    path, data = tmp_path / "calls.jsonl", bytes(range(256))

    class Binary(Server):
        async def forward(self, request: Request, *, to: str | None = None) -> Response:
            return Response(data)

    await run(record(path), asking(), Binary())
    assert await (await run(replay(path), asking())).read() == data


@pytest.mark.parametrize("path", ["", "missing/directory/x.jsonl", None])
def test_a_file_that_cannot_be_is_refused_at_definition(path: Any) -> None:
    for make in (record, replay):
        with pytest.raises(InvalidOption, match="is not a file"):
            make(path)


def test_a_file_that_is_missing_or_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="cannot be read"):
        replay(tmp_path / "missing.jsonl")
    (tmp_path / "wrong.jsonl").write_text('{"method": "GET"}\n')
    with pytest.raises(InvalidOption, match=r"wrong\.jsonl, line 1"):
        replay(tmp_path / "wrong.jsonl")


def test_nothing_comes_after_what_answers_by_itself(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="nothing can come after record"):
        chain(record(tmp_path / "x"), bearer(SECRET))
    with pytest.raises(InvalidOption, match="nothing can come after chain"):
        chain(chain(record(tmp_path / "x")), bearer(SECRET))
