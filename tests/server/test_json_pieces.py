"""Large values as JSON: the same text as in one step, in pieces that keep the loop briefly."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from smokebox.server.json_pieces import PIECE_ITEMS, PIECE_LENGTH, encode_pieces, large_fields
from smokebox.types import ExecResult, FileInfo
from smokebox.wire.responses import FileList, Names

if TYPE_CHECKING:
    import aiohttp

LONG = 'a"\\\n\0é漢😀' * PIECE_LENGTH
FILE = FileInfo(path="/é", type="file", size=1, mtime=1.5, mode=0o644)


@pytest.mark.parametrize(
    "value",
    [
        ExecResult(exit_code=1, stdout=LONG, stderr="short", duration=0.5),
        ExecResult(exit_code=1, stdout=LONG[1:], stderr=LONG, stdout_file="/a"),
        FileList([FILE] * (3 * PIECE_ITEMS)),
        FileList([FILE] * (3 * PIECE_ITEMS + 1)),
        Names(["é"] * (PIECE_ITEMS + 1)),
    ],
    ids=["stdout", "both", "files", "more-files", "names"],
)
def test_pieces_are_the_json_of_the_value(value: object) -> None:
    pieces = list(encode_pieces(value, large_fields(value)))
    assert b"".join(pieces) == msgspec.json.encode(value)
    # An escaped control character takes six bytes.
    assert max(map(len, pieces)) <= 6 * PIECE_LENGTH


@pytest.mark.parametrize("value", [ExecResult(exit_code=0, stdout="x"), Names([]), None, 3])
def test_small_values_have_no_large_fields(value: object) -> None:
    assert large_fields(value) == {}


@pytest.mark.parametrize("delay", ["", "sleep 5.5;"], ids=["fast", "slow"])
async def test_large_output_arrives_whole(http: aiohttp.ClientSession, delay: str) -> None:
    """The slow response has begun with whitespace before its result is known."""
    await http.put("/api/sandboxes/box", json={})
    command = f"{delay} yes '\"' | head -c 4000000; yes é | head -c 3000000 >&2"
    async with http.post("/api/sandboxes/box/exec", json={"command": command}) as response:
        assert response.headers["content-type"] == "application/json"
        result = msgspec.json.decode(await response.read(), type=ExecResult)
    assert (result.exit_code, result.truncated) == (0, False)
    assert result.stdout == '"\n' * 2_000_000
    assert result.stderr == "é\n" * 1_000_000


async def test_large_output_does_not_keep_the_loop(http: aiohttp.ClientSession) -> None:
    """Encoding it in one step takes longer than any step of this load."""
    await http.put("/api/sandboxes/box", json={})
    value = ExecResult(exit_code=0, stdout='"\\\n' * 5_000_000)
    started = time.thread_time()
    msgspec.json.encode(value)
    whole = time.thread_time() - started
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            # CPU time of this thread: other programs of the host do not count.
            before = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)

    watching = asyncio.create_task(watch())
    async with http.post(
        "/api/sandboxes/box/exec", json={"command": "yes '\"\\' | head -c 15000000"}
    ) as response:
        async for _ in response.content.iter_chunked(1 << 16):
            pass
    watching.cancel()
    assert longest < whole / 2, (longest, whole)
