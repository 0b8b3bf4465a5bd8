"""RecordedModels: responses of providers are replayed without them and without a key."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from smokebox.agents import Durability, init
from smokebox.agents.models import open_model
from smokebox.errors import (
    InvalidOption,
    MissingDependency,
    ModelRefused,
    ModelUnavailable,
    NotFound,
)
from smokebox.testing import FakeModelServer, RecordedModels, call, faults

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from smokebox.agents import Reply

# The first use of a provider imports its SDK, which takes seconds.
pytestmark = pytest.mark.timeout(120)

SPECS = ["anthropic/claude-sonnet-4-6", "openai/gpt-5.2", "openrouter/moonshotai/kimi-k2.6"]


async def prompt_agent(
    spec: str, config: Mapping[str, Mapping[str, Any]], prompt: str = "Count."
) -> Reply[Any]:
    """Prompt an agent that has a workspace."""
    async with contextlib.aclosing(open_model(spec, config)) as model:
        assert model.info.images  # Imports the SDK, before the timeout for silence starts.
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
        reply = await prompt_agent(spec, recorded.config)
        assert len(provider.received) == len(turns or script())
    return reply


@pytest.mark.parametrize("spec", SPECS)
async def test_recording_is_replayed(spec: str, tmp_path: Path) -> None:
    file = tmp_path / "folder" / "recording.jsonl"
    first = await record(spec, file)
    async with RecordedModels(file) as recorded:
        assert recorded.remaining == 2
        again = await prompt_agent(spec, recorded.config)
        assert recorded.remaining == 0
    assert (again.text, again.usage) == (first.text, first.usage)
    assert again.text == "It is 42, naïve as that is: ☂."


async def test_recording_contains_no_key(tmp_path: Path) -> None:
    await record(SPECS[0], tmp_path / "a.jsonl")
    assert FakeModelServer.api_key not in (tmp_path / "a.jsonl").read_text()


async def test_faults_are_recorded_and_replayed(tmp_path: Path) -> None:
    turns = [faults.rate_limited(retry_after=0), faults.cut_off("Half"), "Whole."]
    first = await record(SPECS[1], tmp_path / "a.jsonl", *turns)
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()[1:]]
    assert [(line["status"], line["complete"]) for line in lines] == [
        (429, True),
        (200, False),
        (200, True),
    ]
    async with RecordedModels(tmp_path / "a.jsonl") as recorded:
        assert (await prompt_agent(SPECS[1], recorded.config)).text == first.text == "Whole."
        assert recorded.remaining == 0


async def test_unknown_request_is_rejected_with_the_difference(tmp_path: Path) -> None:
    await record(SPECS[0], tmp_path / "a.jsonl")
    async with RecordedModels(tmp_path / "a.jsonl") as recorded:
        with pytest.raises(ModelRefused, match=r'\+.*"Multiply\."') as refused:
            await prompt_agent(SPECS[0], recorded.config, "Multiply.")
        assert '"Count."' in str(refused.value)
        assert "SMOKEBOX_RECORD=1" in str(refused.value)


async def test_request_after_the_last_is_rejected(tmp_path: Path) -> None:
    await record(SPECS[0], tmp_path / "a.jsonl", "An answer.")
    async with RecordedModels(tmp_path / "a.jsonl") as recorded:
        await prompt_agent(SPECS[0], recorded.config)
        with pytest.raises(ModelRefused, match="no further request"):
            await prompt_agent(SPECS[0], recorded.config)


async def test_failed_recording_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    await record(SPECS[0], file)
    before = file.read_bytes()
    with pytest.raises(ModelUnavailable):
        await record(SPECS[0], file, *[faults.overloaded()] * 4)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


async def test_environment_variable_starts_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMOKEBOX_RECORD", "1")
    with FakeModelServer("An answer.") as provider:
        async with RecordedModels(tmp_path / "a.jsonl", models=provider.config) as recorded:
            assert recorded.recording
            await prompt_agent(SPECS[0], recorded.config)
    assert (tmp_path / "a.jsonl").exists()


def test_missing_recording_explains_how_to_record(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="SMOKEBOX_RECORD=1"):
        RecordedModels(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    "text", ["", "hello\n", '{"version": 99}\n', '{"version": 1, "apis": {}}\n{"a": 1}\n']
)
def test_invalid_recording_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(InvalidOption, match="again"):
        RecordedModels(tmp_path / "a.jsonl")


async def test_recording_without_the_models_extra_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(MissingDependency, match="models") as caught:
        async with RecordedModels(tmp_path / "a.jsonl", record=True, models={}):
            pass
    assert "smokebox[models]" in caught.value.hint
