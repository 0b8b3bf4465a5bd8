"""Inspect's test suite for sandbox environments, and cases that it lacks."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import (
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentSpec,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
)
from inspect_ai.util._sandbox.limits import override_max_exec_output_size
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from integrations.sandboxes import is_linux, permissions_hold
from smokebox.errors import InvalidOption
from smokebox.integrations.inspect import SmokeboxConfig, SmokeboxEnvironment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from integrations.sandboxes import MakeSandbox

READING = "test_read_file_not_allowed"
NEED_PERMISSIONS = {
    READING,
    "test_write_text_file_without_permissions",
    "test_write_binary_file_without_permissions",
}


@pytest_asyncio.fixture
async def sandbox_env(
    request: pytest.FixtureRequest, make_sandbox: MakeSandbox, tmp_path: Path
) -> AsyncIterator[SandboxEnvironment]:
    case: str = request.node.originalname
    sandbox = make_sandbox(tmp_path)
    linux = is_linux(sandbox)
    if case == "test_exec_as_user" and not linux:
        # Skipped, not an expected failure, which --runxfail would run.
        pytest.skip("adds a user to the machine, and local() is the machine")
    if case == "test_exec_as_user" and os.geteuid() != 0:
        request.applymarker(pytest.mark.xfail(reason="an engine that is not root has one user"))
    # An engine without root reads files as its user; with root inside, everything is readable.
    enforced = case == READING and os.geteuid() != 0 if linux else permissions_hold(tmp_path)
    if case in NEED_PERMISSIONS and not enforced:
        request.applymarker(pytest.mark.xfail(reason="root may read and write everything"))
    environment = SmokeboxEnvironment(sandbox)
    yield environment
    await environment.aclose()


@pytest_asyncio.fixture
async def environment(
    make_sandbox: MakeSandbox, tmp_path: Path
) -> AsyncIterator[SmokeboxEnvironment]:
    environment = SmokeboxEnvironment(make_sandbox(tmp_path))
    yield environment
    await environment.aclose()


async def test_each_sample_has_a_directory_that_is_removed_with_it() -> None:
    environments = [await SmokeboxEnvironment.sample_init("task", None, {}) for _ in range(2)]
    roots = [(await one["default"].exec(["pwd"])).stdout.strip() for one in environments]
    assert roots[0] != roots[1]
    for one in environments:
        await SmokeboxEnvironment.sample_cleanup("task", None, one, True)
    for root in roots:
        with pytest.raises(FileNotFoundError):
            os.stat(root)


async def test_cleanup_removes_read_only_folders_and_follows_no_symlink(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o750)
    environments = await SmokeboxEnvironment.sample_init("task", None, {})
    script = 'mkdir -p a/b; touch a/b/c; ln -s "$0" a/out; chmod -R a-w a; pwd'
    root = (await environments["default"].exec(["sh", "-c", script, str(tmp_path)])).stdout.strip()
    await SmokeboxEnvironment.sample_cleanup("task", None, environments, False)
    with pytest.raises(FileNotFoundError):
        os.stat(root)
    assert os.stat(tmp_path).st_mode & 0o777 == 0o750


async def test_cleanup_ends_background_processes_of_the_sample(tmp_path: Path) -> None:
    environments = await SmokeboxEnvironment.sample_init("task", None, {})
    started = await environments["default"].exec(
        ["sh", "-c", "sleep 300 >/dev/null 2>&1 & echo $!"]
    )
    await SmokeboxEnvironment.sample_cleanup("task", None, environments, False)
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.stdout), 0)


async def test_output_over_the_limit_is_an_error_with_the_first_part(
    environment: SmokeboxEnvironment,
) -> None:
    with override_max_exec_output_size(1000), pytest.raises(OutputLimitExceededError) as caught:
        await environment.exec(["yes"])
    assert caught.value.truncated_output == "y\n" * 500


async def test_output_just_within_the_limit_is_complete(environment: SmokeboxEnvironment) -> None:
    with override_max_exec_output_size(1000):
        result = await environment.exec(["sh", "-c", "yes | head -c 1000; yes | head -c 1000 >&2"])
    assert (len(result.stdout), len(result.stderr)) == (1000, 1000)


async def test_exit_code_of_124_is_not_a_timeout(environment: SmokeboxEnvironment) -> None:
    result = await environment.exec(["sh", "-c", "exit 124"], timeout=60)
    assert result.returncode == 124


async def test_line_endings_are_kept(environment: SmokeboxEnvironment) -> None:
    await environment.write_file("dos.txt", "a\r\nb\r")
    assert await environment.read_file("dos.txt") == "a\r\nb\r"


async def test_text_that_is_not_utf8_is_a_decode_error(environment: SmokeboxEnvironment) -> None:
    await environment.write_file("latin", b"caf\xe9")
    with pytest.raises(UnicodeDecodeError):
        await environment.read_file("latin")


@pytest.mark.parametrize("make_sandbox", ["local"], indirect=True)
async def test_only_the_existing_user_can_run_commands(environment: SmokeboxEnvironment) -> None:
    me = (await environment.exec(["id", "-un"])).stdout.strip()
    assert (await environment.exec(["true"], user=me)).success
    assert (await environment.exec(["true"], user=str(os.geteuid()))).success
    with pytest.raises(SandboxUserUnsupportedError, match="Leave user out"):
        await environment.exec(["true"], user="unknown")


@pytest.mark.parametrize("make_sandbox", ["linux", "sdk"], indirect=True)
async def test_sandbox_with_users_runs_as_them(environment: SmokeboxEnvironment) -> None:
    assert (await environment.exec(["id", "-un"], user="root")).stdout == "root\n"
    if os.geteuid() == 0:
        assert (await environment.exec(["id", "-un"], user="user")).stdout == "user\n"
        result = await environment.exec(["true"], user="used")
        assert result.returncode == 126
        assert "Did you mean 'user'?" in result.stderr
    else:
        with pytest.raises(SandboxUserUnsupportedError, match="leave user= out"):
            await environment.exec(["true"], user="user")


async def test_closed_sandbox_is_unavailable(environment: SmokeboxEnvironment) -> None:
    await environment.aclose()
    with pytest.raises(SandboxUnavailableError):
        await environment.exec(["true"])


async def test_configuration_round_trips_through_a_log() -> None:
    config = SmokeboxConfig(env={"COLOUR": "blue"})
    spec = SandboxEnvironmentSpec("smokebox", config)
    again = SandboxEnvironmentSpec.model_validate(spec.model_dump())
    assert again.config == config
    assert hash(again) == hash(spec)


async def test_configuration_can_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "box.toml"
    file.write_text('sandbox = "local"\n[env]\nCOLOUR = "blue"\n')
    environments = await SmokeboxEnvironment.sample_init("task", str(file), {})
    result = await environments["default"].exec(["printenv", "COLOUR"])
    await SmokeboxEnvironment.sample_cleanup("task", str(file), environments, False)
    assert result.stdout == "blue\n"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sandboxx": "local"}, "Did you mean 'sandbox'"),
        ({"sandbox": "lokal"}, "'local'"),
        ({"env": {"A": 1}}, "env.A"),
    ],
)
def test_invalid_configuration_is_explained(config: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        SmokeboxEnvironment.config_deserialize(config)


async def test_missing_configuration_file_is_named() -> None:
    with pytest.raises(InvalidOption, match=r"nowhere\.toml"):
        await SmokeboxEnvironment.sample_init("task", "/nowhere.toml", {})


# Inspect leaves a stream open; it must be collected while the warning is expected.
@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:Unclosed <MemoryObjectReceiveStream:ResourceWarning")
def test_task_finds_it_by_name_and_runs_in_it(tmp_path: Path) -> None:
    call = ModelOutput.for_tool_call("mockllm", "bash", {"command": "cat secret.txt"})
    reply = ModelOutput.from_content("mockllm", "it says swordfish")
    # Without a usage, Inspect counts tokens with a table that it downloads.
    call.usage = reply.usage = ModelUsage()
    task = Task(
        dataset=[Sample(input="?", target="swordfish", files={"secret.txt": "swordfish"})],
        solver=[use_tools(bash()), generate()],
        scorer=includes(),
        sandbox="smokebox",
    )
    model = get_model("mockllm/model", custom_outputs=[call, reply])
    (log,) = eval(task, model=model, log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    assert log.samples
    assert [m.text for m in log.samples[0].messages if m.role == "tool"] == ["swordfish"]
    gc.collect()
