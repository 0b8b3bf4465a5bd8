"""Options of a single script, and how scripts end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox import virtual
from smokebox.errors import InvalidOption
from smokebox.sandbox.virtual.limits import MAX_OUTPUT

if TYPE_CHECKING:
    from smokebox.sandbox.virtual import VirtualSandbox


@pytest.fixture
def sandbox() -> VirtualSandbox:
    return virtual()


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("if", "line 2: syntax error: unexpected end of file"),
        (": ok\necho )", "line 2: syntax error near unexpected token `)'"),
        ("echo 'open", "looking for matching `''"),
    ],
)
async def test_syntax_error_has_the_message_of_bash(
    sandbox: VirtualSandbox, script: str, line: str
) -> None:
    result = await sandbox.exec(script)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("bash: ")
    assert f"{line}\n" in result.stderr


async def test_syntax_error_with_stdin_exits_with_2(sandbox: VirtualSandbox) -> None:
    result = await sandbox.exec("if", stdin="x")
    assert result.exit_code == 2
    assert "syntax error" in result.stderr


async def test_env_is_restored(sandbox: VirtualSandbox) -> None:
    await sandbox.exec("export A=exported; B=private")
    env = {"A": "1", "B": "2", "C": "3"}
    assert (await sandbox.exec('echo "$A$B$C"; B=changed', env=env)).stdout == "123\n"
    after = await sandbox.exec('echo "$A $B [$C]"; env | grep -c "^[ABC]="')
    assert after.stdout == "exported private []\n1\n"


async def test_cwd_is_restored(sandbox: VirtualSandbox) -> None:
    await sandbox.exec("mkdir a b; cd a; cd ../b")
    await sandbox.exec("cd /; cd /tmp", cwd="/workspace/a")
    assert (await sandbox.exec("pwd; cd -")).stdout == "/workspace/b\n/workspace/a\n"


async def test_cwd_with_shell_metacharacters_is_a_name(sandbox: VirtualSandbox) -> None:
    name = "-$(touch pwned) `x` 'q' \"w\" ;&|"
    await sandbox.mkdir(name)
    assert (await sandbox.exec("pwd", cwd=name)).stdout == f"/workspace/{name}\n"
    assert await sandbox.readdir(".") == [name]


async def test_functions_named_like_builtins_do_not_divert_cwd(sandbox: VirtualSandbox) -> None:
    await sandbox.exec("cd() { echo diverted; }; unset() { echo diverted; }")
    assert (await sandbox.exec("pwd", cwd="/tmp", env={"A": "b"})).stdout == "/tmp\n"
    assert (await sandbox.exec('pwd; echo "[$SMOKEBOX_CWD$A]"')).stdout == "/workspace\n[]\n"


async def test_state_changes_survive_a_script_with_stdin(sandbox: VirtualSandbox) -> None:
    await sandbox.exec("read -r x; cd /tmp; f() { echo f; }", stdin="kept\n")
    assert (await sandbox.exec('echo "$x $PWD"; f')).stdout == "kept /tmp\nf\n"


async def test_stdin_is_invisible_to_later_scripts(sandbox: VirtualSandbox) -> None:
    await sandbox.exec("cat", stdin="secret")
    result = await sandbox.exec("cat /dev/smokebox/stdin; ls /dev; env")
    assert "secret" not in result.stdout
    assert "smokebox" not in result.stdout.replace("HOSTNAME=smokebox", "")


async def test_too_much_stdin_is_refused(sandbox: VirtualSandbox) -> None:
    with pytest.raises(InvalidOption, match="10000001"):
        await sandbox.exec("wc -c", stdin=b"x" * 10_000_001)


@pytest.mark.parametrize("command", ["a\ud800", "a\0b", b"echo", None])
async def test_invalid_commands_are_refused(sandbox: VirtualSandbox, command: object) -> None:
    with pytest.raises(InvalidOption):
        await sandbox.exec(command)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption):
        sandbox.exec_stream(command)  # type: ignore[arg-type]


async def test_env_value_that_utf8_cannot_hold_is_refused(sandbox: VirtualSandbox) -> None:
    with pytest.raises(InvalidOption):
        await sandbox.exec("true", env={"A": "\ud800"})


async def test_output_over_the_cap_is_truncated_with_a_notice(sandbox: VirtualSandbox) -> None:
    await sandbox.write_file("mb", b"x" * 1_000_000)
    result = await sandbox.exec("for i in {1..11}; do cat mb; done; echo end >&2")
    assert (len(result.stdout), result.stderr) == (MAX_OUTPUT, "end\n")
    assert (result.exit_code, result.truncated) == (0, True)


async def test_output_limit_applies_to_exec_and_exec_stream() -> None:
    sandbox = virtual(limits={"output": 5})
    result = await sandbox.exec("echo ééé; echo abc >&2")
    assert (result.stdout, result.stderr, result.truncated) == ("éé", "abc\n", True)
    stream = sandbox.exec_stream("echo ééé; echo abc >&2")
    assert "".join([chunk.data async for chunk in stream]) == "ééabc\n"
    assert stream.result.truncated


async def test_stream_continues_after_an_undecodable_byte(sandbox: VirtualSandbox) -> None:
    script = r"echo a; printf '\xe2\x82'; printf '\xac'; echo b; printf '\xff'; echo err >&2"
    chunks = [chunk async for chunk in sandbox.exec_stream(script)]
    assert "".join(c.data for c in chunks if c.stream == "stdout") == "a\n€b\n\ufffd"
    assert chunks[0].data == "a\n"


async def test_timeout_does_not_lose_delayed_bytes(sandbox: VirtualSandbox) -> None:
    stream = sandbox.exec_stream(r"echo a; printf '\xff'; sleep 20", timeout=0.3)
    text = "".join([chunk.data async for chunk in stream if chunk.stream == "stdout"])
    assert (text, stream.exit_code) == ("a\n\ufffd", 124)


async def test_background_job_runs_to_its_end(sandbox: VirtualSandbox) -> None:
    assert (await sandbox.exec("(sleep 0.05; echo late) & echo early")).stdout in (
        "early\nlate\n",
        "late\nearly\n",
    )
