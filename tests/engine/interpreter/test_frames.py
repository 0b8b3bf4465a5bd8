"""Parsing of frames from inside a sandbox, most of them invalid."""

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
)
from smokebox.engine.jail.log_pump import KEEP
from smokebox.types import CodeExecution, CodeResult

if TYPE_CHECKING:
    from pathlib import Path

END_FRAME = KernelEnd(id="a", count=1, size=33)
END = b'{"type":"end","id":"a","count":1}\n'


async def read_all(reader: FrameReader) -> list[frames.KernelFrame]:
    found = []
    with reader.listen() as listener:
        while more := await reader.read(listener):
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
def test_invalid_lines_are_dropped_and_counted(line: bytes) -> None:
    assert parse(line) == KernelDropped(count=len(line))


def test_valid_frames_can_be_encoded_again() -> None:
    huge = [b"[" * depth + b"]" * depth for depth in (10, 500, 850, 900, 950, 985, 990)]
    for value in (*huge, b"1" * 40, b"-" + b"9" * 25, b"1e999", b'{"a":[1' + b"0" * 30 + b"]}"):
        line = b'{"type":"result","id":"a","data":{"text/plain":"t","application/json":%s}}' % value
        frame = parse(line)
        if isinstance(frame, KernelResult):
            execution = CodeExecution(context="c", language="python", results=(frame.to_result(),))
            assert msgspec.json.encode([execution])
            assert execution.text is None
            assert execution.results[0].text == "t"
    for count in (10**30, -(10**30)):
        assert msgspec.json.encode(parse(b'{"type":"end","id":"a","count":%d}' % count))


def test_size_field_of_a_frame_is_ignored() -> None:
    line = b'{"type":"result","id":"a","data":{},"size":-1000000}'
    assert parse(line).size == len(line)


def test_bundle_is_converted_to_a_result() -> None:
    image = base64.b64encode(b"\x89PNG").decode()
    frame = KernelResult(
        data={
            "text/plain": "t",
            "text/html": "<b>",
            "text/markdown": "*m*",
            "image/svg+xml": "<svg/>",
            "text/latex": "$x$",
            "application/javascript": "1",
            "image/png": image,
            "image/jpeg": image,
            "application/pdf": image,
            "application/json": {"a": 1},
            CHART: {"type": "line"},
            "application/vnd.plotly.v1+json": {"data": []},
        },
        main=True,
    )
    result = frame.to_result()
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


def test_fields_of_the_wrong_type_are_left_out() -> None:
    frame = KernelResult(data={"text/plain": 5, "image/png": "!", "image/jpeg": [], CHART: "x"})
    result = frame.to_result()
    assert (result.text, result.jpeg, result.chart) == (None, None, None)


async def test_reading_continues_after_the_last_frame(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(END + END[:10])
    reader = FrameReader(str(log))
    assert await read_all(reader) == [END_FRAME]
    with open(log, "ab") as file:
        file.write(END[10:] + b"junk\n" + END)
    end = END_FRAME
    assert await read_all(reader) == [end, KernelDropped(count=4), end]


async def test_endless_line_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "LONGEST_LINE", 1000)
    log = tmp_path / "log"
    log.write_bytes(b"x" * 1_000_000 + b"\n" + END)
    reader = FrameReader(str(log))
    assert await read_all(reader) == [KernelDropped(count=1_000_000), END_FRAME]


async def test_dropped_part_of_a_long_log_is_a_gap(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open(log, "wb") as file:
        file.truncate(KEEP + (8 << 20))
        file.seek(0, os.SEEK_END)
        file.write(END)
    found = await read_all(FrameReader(str(log)))
    assert isinstance(found[0], KernelDropped)
    assert found[-1] == END_FRAME


async def test_listener_is_notified_of_new_frames(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    reader = FrameReader(str(log))
    with reader.listen() as listener:
        changed = listener.changed.event
        assert await reader.read(listener) == []
        log.write_bytes(json.dumps({"type": "output", "stream": "stdout", "data": "x"}).encode())
        async with asyncio.timeout(10):
            await changed.wait()
        with open(log, "ab") as file:
            file.write(b"\n")
        assert await reader.read(listener) == [KernelOutput(stream="stdout", data="x", size=51)]
        log.unlink()
        assert await reader.read(listener) == []
