"""Output as the engine tells it: kept, passed on, held back, and cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.sandbox.virtual.ending import Ending
from smokebox.sandbox.virtual.limits import MAX_OUTPUT
from smokebox.sandbox.virtual.transcript import Kept, Live

if TYPE_CHECKING:
    from smokebox.types import OutputChunk


def _whole(stdout: str, stderr: str = "") -> Ending:
    return Ending(exit_code=0, stdout=stdout, stderr=stderr)


def test_the_whole_streams_are_preferred() -> None:
    kept = Kept(MAX_OUTPUT)
    kept.hear("a\ufffd", "")
    kept.hear("\ufffdb", "")
    result = kept.result(_whole("aéb", "e"), 1.5)
    assert (result.stdout, result.stderr, result.duration) == ("aéb", "e", 1.5)
    assert not result.truncated


def test_what_was_heard_is_kept_where_the_rest_is_lost() -> None:
    kept = Kept(MAX_OUTPUT)
    kept.hear("out", "")
    kept.hear("", "err\n")
    result = kept.result(Ending(exit_code=124, timed_out=True, message="late\n"), 0)
    assert (result.stdout, result.stderr) == ("out", "err\nlate\n")
    assert (result.exit_code, result.timed_out) == (124, True)


def test_output_at_the_cap_of_the_engine_is_truncated() -> None:
    kept = Kept(MAX_OUTPUT)
    kept.hear("x" * MAX_OUTPUT, "")
    assert kept.result(Ending(exit_code=126), 0).truncated


def test_a_limit_cuts_between_characters() -> None:
    result = Kept(4).result(_whole("ééé", "abcd"), 0)
    assert (result.stdout, result.stderr, result.truncated) == ("éé", "abcd", True)
    result = Kept(3).result(_whole("ééé"), 0)
    assert result.stdout == "é"


def _heard(writes: list[tuple[str, str]], ending: Ending, limit: int = MAX_OUTPUT) -> list[str]:
    chunks: list[OutputChunk] = []
    live = Live(limit, chunks.append)
    for stdout, stderr in writes:
        live.hear(stdout, stderr)
    live.result(ending, 0)
    return [f"{chunk.stream[3]}:{chunk.data}" for chunk in chunks]


def test_chunks_are_passed_on_as_they_come() -> None:
    writes = [("a", ""), ("", "b"), ("c", "")]
    assert _heard(writes, _whole("ac", "b")) == ["o:a", "e:b", "o:c"]


def test_a_split_character_holds_its_stream_back() -> None:
    writes = [("a", ""), ("b\ufffd", ""), ("", "e"), ("\ufffdc", "")]
    assert _heard(writes, _whole("abéc", "e")) == ["o:a", "e:e", "o:béc"]


def test_what_is_held_back_is_passed_on_where_the_rest_is_lost() -> None:
    writes = [("a\ufffd", ""), ("b", "")]
    assert _heard(writes, Ending(exit_code=124, message="late\n")) == ["o:a\ufffdb", "e:late\n"]


def test_the_rest_of_a_stream_comes_at_the_end() -> None:
    assert _heard([("a", "")], _whole("abc")) == ["o:a", "o:bc"]


def test_a_limit_holds_over_chunks() -> None:
    writes = [("ab", ""), ("cd", ""), ("ef", ""), ("", "xy")]
    assert _heard(writes, _whole("abcdef", "xy"), 3) == ["o:ab", "o:c", "e:xy"]
    live = Live(3, lambda chunk: None)
    live.hear("abcd", "")
    assert live.result(_whole("abcd"), 0).truncated
