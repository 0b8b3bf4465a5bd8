"""Recorded models: what providers answered is answered again, without them and without a key."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from smokebox.agents import Durability, init
from smokebox.agents.models import open_model
from smokebox.errors import InvalidOption, ModelRefused, ModelUnavailable, NotFound
from smokebox.testing import FakeModelServer, RecordedModels, call, faults

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from smokebox.agents import Reply

# The first to use a provider imports it, which takes seconds where others compute as well.
pytestmark = pytest.mark.timeout(120)

SPECS = ["anthropic/claude-sonnet-4-6", "openai/gpt-5.2", "openrouter/moonshotai/kimi-k2.6"]


async def work(
    spec: str, config: Mapping[str, Mapping[str, Any]], prompt: str = "Count."
) -> Reply[Any]:
    """What an agent with a workspace makes of a prompt."""
    async with contextlib.aclosing(open_model(spec, config)) as model:
        assert model.info.images  # Imported by now: that does not count as silence.
        quick = Durability(retry_delay=0.001)
        async with init(model=model, persist=False, durability=quick) as harness:
            return await (await harness.session()).prompt(prompt)


def script() -> list[Any]:
    return [
        ["Let me see.", call("bash", command="echo $((6 * 7)) é")],
        "It is 42, naïve as that is: ☂.",
    ]


async def record(spec: str, file: Path, *turns: Any) -> Reply[Any]:
    async with (
        FakeModelServer(*(turns or script())) as provider,
        RecordedModels(file, record=True, models=provider.config) as recorded,
    ):
        reply = await work(spec, recorded.config)
        assert len(provider.received) == len(turns or script())
    return reply


@pytest.mark.parametrize("spec", SPECS)
async def test_what_was_recorded_is_answered_again(spec: str, tmp_path: Path) -> None:
    file = tmp_path / "some" / "where.jsonl"
    first = await record(spec, file)
    async with RecordedModels(file) as recorded:
        assert recorded.remaining == 2
        again = await work(spec, recorded.config)
        assert recorded.remaining == 0
    assert (again.text, again.usage) == (first.text, first.usage)
    assert again.text == "It is 42, naïve as that is: ☂."


async def test_no_key_is_in_a_recording(tmp_path: Path) -> None:
    await record(SPECS[0], tmp_path / "a.jsonl")
    assert FakeModelServer.api_key not in (tmp_path / "a.jsonl").read_text()


async def test_faults_are_recorded_as_they_were(tmp_path: Path) -> None:
    turns = [faults.rate_limited(retry_after=0), faults.cut_off("Half"), "Whole."]
    first = await record(SPECS[1], tmp_path / "a.jsonl", *turns)
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()[1:]]
    assert [(line["status"], line["whole"]) for line in lines] == [
        (429, True),
        (200, False),
        (200, True),
    ]
    async with RecordedModels(tmp_path / "a.jsonl") as recorded:
        assert (await work(SPECS[1], recorded.config)).text == first.text == "Whole."
        assert recorded.remaining == 0


async def test_another_request_is_refused_with_what_is_different(tmp_path: Path) -> None:
    await record(SPECS[0], tmp_path / "a.jsonl")
    async with RecordedModels(tmp_path / "a.jsonl") as recorded:
        with pytest.raises(ModelRefused, match=r'\+.*"Multiply\."') as refused:
            await work(SPECS[0], recorded.config, "Multiply.")
        assert '"Count."' in str(refused.value)
        assert "SMOKEBOX_RECORD=1" in str(refused.value)


async def test_one_request_too_many_is_refused(tmp_path: Path) -> None:
    await record(SPECS[0], tmp_path / "a.jsonl", "An answer.")
    async with RecordedModels(tmp_path / "a.jsonl") as recorded:
        await work(SPECS[0], recorded.config)
        with pytest.raises(ModelRefused, match="no further request"):
            await work(SPECS[0], recorded.config)


async def test_what_fails_leaves_the_recording_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    await record(SPECS[0], file)
    before = file.read_bytes()
    with pytest.raises(ModelUnavailable):
        await record(SPECS[0], file, *[faults.overloaded()] * 4)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


async def test_the_environment_says_to_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMOKEBOX_RECORD", "1")
    with FakeModelServer("An answer.") as provider:
        async with RecordedModels(tmp_path / "a.jsonl", models=provider.config) as recorded:
            assert recorded.recording
            await work(SPECS[0], recorded.config)
    assert (tmp_path / "a.jsonl").exists()


def test_a_recording_that_is_not_there_says_how_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="SMOKEBOX_RECORD=1"):
        RecordedModels(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    "text", ["", "hello\n", '{"version": 99}\n', '{"version": 1, "apis": {}}\n{"a": 1}\n']
)
def test_what_is_no_recording_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(InvalidOption, match="again"):
        RecordedModels(tmp_path / "a.jsonl")
