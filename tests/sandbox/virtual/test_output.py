"""Output of scripts: collected, forwarded, delayed at split characters, and truncated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.sandbox.virtual.limits import MAX_OUTPUT
from smokebox.sandbox.virtual.output import CollectedOutput, StreamedOutput
from smokebox.sandbox.virtual.shell import ScriptOutcome

if TYPE_CHECKING:
    from smokebox.types import OutputChunk


def _whole(stdout: str, stderr: str = "") -> ScriptOutcome:
    return ScriptOutcome(exit_code=0, stdout=stdout, stderr=stderr)


def test_complete_streams_are_preferred_over_chunks() -> None:
    output = CollectedOutput(MAX_OUTPUT)
    output.write("a\ufffd", "")
    output.write("\ufffdb", "")
    result = output.result(_whole("aéb", "e"), 1.5)
    assert (result.stdout, result.stderr, result.duration) == ("aéb", "e", 1.5)
    assert not result.truncated


def test_chunks_are_used_when_the_result_is_lost() -> None:
    output = CollectedOutput(MAX_OUTPUT)
    output.write("out", "")
    output.write("", "err\n")
    result = output.result(ScriptOutcome(exit_code=124, timed_out=True, message="late\n"), 0)
    assert (result.stdout, result.stderr) == ("out", "err\nlate\n")
    assert (result.exit_code, result.timed_out) == (124, True)


def test_output_at_the_limit_of_the_engine_is_truncated() -> None:
    output = CollectedOutput(MAX_OUTPUT)
    output.write("x" * MAX_OUTPUT, "")
    assert output.result(ScriptOutcome(exit_code=126), 0).truncated


def test_limit_cuts_between_characters() -> None:
    result = CollectedOutput(4).result(_whole("ééé", "abcd"), 0)
    assert (result.stdout, result.stderr, result.truncated) == ("éé", "abcd", True)
    result = CollectedOutput(3).result(_whole("ééé"), 0)
    assert result.stdout == "é"


def _chunks(
    writes: list[tuple[str, str]], outcome: ScriptOutcome, limit: int = MAX_OUTPUT
) -> list[str]:
    chunks: list[OutputChunk] = []
    output = StreamedOutput(limit, chunks.append)
    for stdout, stderr in writes:
        output.write(stdout, stderr)
    output.result(outcome, 0)
    return [f"{chunk.stream[3]}:{chunk.data}" for chunk in chunks]


def test_chunks_are_forwarded_immediately() -> None:
    writes = [("a", ""), ("", "b"), ("c", "")]
    assert _chunks(writes, _whole("ac", "b")) == ["o:a", "e:b", "o:c"]


def test_split_character_delays_its_stream() -> None:
    writes = [("a", ""), ("b\ufffd", ""), ("", "e"), ("\ufffdc", "")]
    assert _chunks(writes, _whole("abéc", "e")) == ["o:a", "e:e", "o:béc"]


def test_delayed_bytes_are_flushed_when_the_result_is_lost() -> None:
    writes = [("a\ufffd", ""), ("b", "")]
    assert _chunks(writes, ScriptOutcome(exit_code=124, message="late\n")) == [
        "o:a\ufffdb",
        "e:late\n",
    ]


def test_rest_of_a_stream_is_sent_at_the_end() -> None:
    assert _chunks([("a", "")], _whole("abc")) == ["o:a", "o:bc"]


def test_limit_applies_across_chunks() -> None:
    writes = [("ab", ""), ("cd", ""), ("ef", ""), ("", "xy")]
    assert _chunks(writes, _whole("abcdef", "xy"), 3) == ["o:ab", "o:c", "e:xy"]
    output = StreamedOutput(3, lambda chunk: None)
    output.write("abcd", "")
    assert output.result(_whole("abcd"), 0).truncated
