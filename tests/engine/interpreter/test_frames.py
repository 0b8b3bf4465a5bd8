"""Lines from inside a sandbox, most of which no kernel of ours would write."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from typing import TYPE_CHECKING

import msgspec
import pytest

from smokebox.engine.interpreter import frames
from smokebox.engine.interpreter.frames import (
    CHART,
    FrameReader,
    KernelDropped,
    KernelEnd,
    KernelOutput,
    KernelResult,
    parse,
    result_of,
)
from smokebox.engine.jail.log_pump import KEEP
from smokebox.types import CodeExecution, CodeResult

if TYPE_CHECKING:
    from pathlib import Path

END_FRAME = KernelEnd(id="a", count=1, size=33)
END = b'{"type":"end","id":"a","count":1}\n'


async def read_all(reader: FrameReader) -> list[frames.KernelFrame]:
    found = []
    with reader.watched() as ear:
        while more := await reader.read(ear):
            found += more
    return found


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b'{"type":"dropped","count":-1}',
        b'{"type":"nonsense","id":"a"}',
        b'{"type":"end","id":"a","count":"1"}',
        b'{"type":"end","id":"a","count":1e999}',
        b'{"type":"end","id":5,"count":1}',
        b'{"type":"output","id":"a","stream":"stdin","data":"x"}',
        b'{"type":"output","id":"a","stream":"stdout","data":"\\ud800"}',
        b'{"type":"result","id":"a","data":[]}',
        b'{"type":"result","id":"a","data":{"x":NaN}}',
        b'{"type":"result","id":"a","data":{"x":' + b"[" * 200_000 + b"}}",
        b'{"type":"result","id":"a","data":{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}}",
        b'{"type":"error","id":"a","name":"x"}',
        b"\0" * 100,
    ],
)
def test_what_is_no_frame_is_counted_and_no_more(line: bytes) -> None:
    assert parse(line) == KernelDropped(count=len(line))


def test_what_is_a_frame_can_be_sent_on() -> None:
    huge = [b"[" * depth + b"]" * depth for depth in (10, 500, 850, 900, 950, 985, 990)]
    for value in (*huge, b"1" * 40, b"-" + b"9" * 25, b"1e999", b'{"a":[1' + b"0" * 30 + b"]}"):
        line = b'{"type":"result","id":"a","data":{"text/plain":"t","application/json":%s}}' % value
        frame = parse(line)
        if isinstance(frame, KernelResult):
            told = CodeExecution(context="c", language="python", results=(result_of(frame),))
            assert msgspec.json.encode([told])
            assert told.text is None
            assert told.results[0].text == "t"
    for count in (10**30, -(10**30)):
        assert msgspec.json.encode(parse(b'{"type":"end","id":"a","count":%d}' % count))


def test_what_a_frame_says_of_its_size_is_not_believed() -> None:
    line = b'{"type":"result","id":"a","data":{},"size":-1000000}'
    assert parse(line).size == len(line)


def test_a_bundle_becomes_a_result_by_its_fields() -> None:
    picture = base64.b64encode(b"\x89PNG").decode()
    frame = KernelResult(
        data={
            "text/plain": "t",
            "text/html": "<b>",
            "text/markdown": "*m*",
            "image/svg+xml": "<svg/>",
            "text/latex": "$x$",
            "application/javascript": "1",
            "image/png": picture,
            "image/jpeg": picture,
            "application/pdf": picture,
            "application/json": {"a": 1},
            CHART: {"type": "line"},
            "application/vnd.plotly.v1+json": {"data": []},
        },
        main=True,
    )
    result = result_of(frame)
    assert result == CodeResult(
        text="t",
        html="<b>",
        markdown="*m*",
        svg="<svg/>",
        latex="$x$",
        javascript="1",
        png=b"\x89PNG",
        jpeg=b"\x89PNG",
        pdf=b"\x89PNG",
        json={"a": 1},
        chart={"type": "line"},
        data={"application/vnd.plotly.v1+json": {"data": []}},
        main=True,
    )
    assert result.formats()[:3] == ("text", "html", "markdown")
    assert result.formats()[-2:] == ("chart", "application/vnd.plotly.v1+json")
    assert CodeResult(text="").formats() == ("text",)


def test_fields_of_the_wrong_kind_are_left_out() -> None:
    frame = KernelResult(data={"text/plain": 5, "image/png": "!", "image/jpeg": [], CHART: "x"})
    result = result_of(frame)
    assert (result.text, result.jpeg, result.chart) == (None, None, None)


async def test_frames_are_read_on_from_where_the_last_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(END + END[:10])
    reader = FrameReader(str(log))
    assert await read_all(reader) == [END_FRAME]
    with open(log, "ab") as file:
        file.write(END[10:] + b"junk\n" + END)
    end = END_FRAME
    assert await read_all(reader) == [end, KernelDropped(count=4), end]


async def test_a_line_without_end_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "LONGEST_LINE", 1000)
    log = tmp_path / "log"
    log.write_bytes(b"x" * 1_000_000 + b"\n" + END)
    reader = FrameReader(str(log))
    assert await read_all(reader) == [KernelDropped(count=1_000_000), END_FRAME]


async def test_what_was_not_read_in_time_is_a_gap(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open(log, "wb") as file:
        file.truncate(KEEP + (8 << 20))
        file.seek(0, os.SEEK_END)
        file.write(END)
    found = await read_all(FrameReader(str(log)))
    assert isinstance(found[0], KernelDropped)
    assert found[-1] == END_FRAME


async def test_the_bell_rings_for_what_is_written(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    reader = FrameReader(str(log))
    with reader.watched() as ear:
        heard = ear.bell.listen()
        assert await reader.read(ear) == []
        log.write_bytes(json.dumps({"type": "output", "stream": "stdout", "data": "x"}).encode())
        async with asyncio.timeout(10):
            await heard.wait()
        with open(log, "ab") as file:
            file.write(b"\n")
        assert await reader.read(ear) == [KernelOutput(stream="stdout", data="x", size=51)]
        log.unlink()
        assert await reader.read(ear) == []
