"""The stream of `exec_stream`, over a scripted source."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox import ExecResult, ExecStream, OutputChunk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class Source:
    """Source of two chunks and a result, which records that it was closed."""

    closed = False

    async def run(self) -> AsyncGenerator[OutputChunk | ExecResult, None]:
        try:
            yield OutputChunk("stdout", "a")
            yield OutputChunk("stderr", "b")
            yield ExecResult(exit_code=4)
        finally:
            self.closed = True


async def test_stream_yields_chunks_then_the_result() -> None:
    stream = ExecStream(Source().run())
    assert [chunk.data async for chunk in stream] == ["a", "b"]
    assert stream.exit_code == 4


async def test_result_is_unavailable_before_the_end() -> None:
    stream = ExecStream(Source().run())
    await anext(stream)
    with pytest.raises(RuntimeError, match="still running"):
        _ = stream.result
    await stream.aclose()


async def test_leaving_the_stream_closes_the_source() -> None:
    source = Source()
    async with ExecStream(source.run()) as stream:
        await anext(stream)
    assert source.closed


async def test_exhausting_the_stream_closes_the_source() -> None:
    source = Source()
    async for _ in ExecStream(source.run()):
        pass
    assert source.closed
