"""Cases on commands: input, output, failures, timeouts and cancellation."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from smokebox.errors import InvalidOption, PathNotDirectory, PathNotFound
from smokebox.sandbox.conformance.cases import Cases

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi
    from smokebox.types import Capabilities

SPECIAL_CHARACTERS = [
    "echo 'it'\\''s'",
    'echo "a\\"b"',
    "echo a\\\\b",
    "echo $((1+1))",
    "echo `echo x`",
    "cat <<'EOF'\n$HOME `id` \"quotes' \\\nEOF",
    "echo one # a comment",
    "echo 'EOF'; echo done",
    "echo a;\necho b",
    "printf '%s\\n' '---RESULT_START---'",
    "(exit 0) && echo ok || echo bad",
    "{ echo grouped; }",
]
# Each command leaves a process that would write `survived` shortly after the kill.
SURVIVORS = {
    "child": "(sleep 1.5; echo x > survived) & sleep 30",
    "grandchild": "bash -c '(sleep 1.5; echo x > survived) & sleep 30'",
    "own session": "setsid bash -c 'sleep 1.5; echo x > survived' & sleep 30",
    "daemon": "(setsid bash -c 'sleep 1.5; echo x > survived' &) ; sleep 30",
    "ignores TERM": "trap '' TERM; bash -c 'trap \"\" TERM; sleep 3; echo x > survived'; sleep 30",
    "nohup": "nohup bash -c 'sleep 1.5; echo x > survived' >/dev/null 2>&1 & sleep 30",
}
# Seconds after the kill until it would have been written.
PAUSE = {kind: 3.0 if kind == "ignores TERM" else 1.5 for kind in SURVIVORS}


class CommandCases(Cases):
    """`exec` and its options."""

    async def test_output_and_success(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("echo hi")
        assert (result.exit_code, result.stdout, result.stderr) == (0, "hi\n", "")
        assert (result.success, result.truncated) == (True, False)
        assert result.duration >= 0

    async def test_stderr_is_separate(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("echo out; echo err >&2")
        assert (result.stdout, result.stderr) == ("out\n", "err\n")

    async def test_output_is_not_trimmed(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec(r"printf '\n  a \n\n'")
        assert result.stdout == "\n  a \n\n"

    @pytest.mark.parametrize("code", [1, 3, 42, 255])
    async def test_non_zero_exit_code_is_a_result(self, sandbox: SandboxApi, code: int) -> None:
        result = await sandbox.exec("echo before; exit $CODE", env={"CODE": str(code)})
        assert (result.exit_code, result.success, result.stdout) == (code, False, "before\n")

    async def test_missing_program_exits_with_127(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("no-such-program-anywhere")
        assert result.exit_code == 127
        assert "no-such-program-anywhere" in result.stderr

    async def test_syntax_error_exits_with_2(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("if then fi (")
        assert result.exit_code == 2
        assert result.stderr

    async def test_unclosed_quote_exits_with_2(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("echo 'open")
        assert result.exit_code == 2

    @pytest.mark.parametrize(("signal", "code"), [("KILL", 137), ("TERM", 143)])
    async def test_signal_gives_its_exit_code(
        self, sandbox: SandboxApi, signal: str, code: int
    ) -> None:
        result = await sandbox.exec("kill -$NAME $$; sleep 5", env={"NAME": signal})
        assert result.exit_code == code

    async def test_empty_command_does_nothing(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("")
        assert (result.exit_code, result.stdout) == (0, "")

    async def test_command_with_nul_is_refused(self, sandbox: SandboxApi) -> None:
        with pytest.raises(InvalidOption):
            await sandbox.exec("echo a\0b")

    @pytest.mark.parametrize("command", SPECIAL_CHARACTERS)
    async def test_special_characters_do_not_affect_the_next_command(
        self, sandbox: SandboxApi, command: str
    ) -> None:
        first = await sandbox.exec(command)
        assert (first.exit_code, bool(first.stdout)) == (0, True)
        assert (await sandbox.exec("echo next")).stdout == "next\n"

    async def test_shell_is_bash(self, sandbox: SandboxApi) -> None:
        script = 'a=(x y z); [[ ${a[1]} == y ]] && echo "${a[@]:1}" {1..3} ${#a[@]}'
        assert (await sandbox.exec(script)).stdout == "y z 1 2 3 3\n"

    async def test_pipelines_and_globs(self, sandbox: SandboxApi, directory: str) -> None:
        for name, text in (("b.log", "2\n"), ("a.log", "1\n2\n")):
            await sandbox.write_file(f"{directory}/{name}", text)
        result = await sandbox.exec("cat *.log | sort | uniq -c | wc -l", cwd=directory)
        assert result.stdout.strip() == "2"

    async def test_unicode_output(self, sandbox: SandboxApi) -> None:
        assert (await sandbox.exec("echo 'héllo 名前 🦊'")).stdout == "héllo 名前 🦊\n"

    async def test_invalid_utf8_is_replaced(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec(r"printf 'a\xffb'")
        assert result.stdout == "a\ufffdb"

    async def test_env_sets_variables(self, sandbox: SandboxApi) -> None:
        value = "a b'c\"d$e\nf"
        result = await sandbox.exec('printf %s "$VALUE"', env={"VALUE": value})
        assert result.stdout == value

    async def test_env_reaches_child_shells(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("bash -c 'echo $VALUE'", env={"VALUE": "down"})
        assert result.stdout == "down\n"

    async def test_env_applies_to_one_command(self, sandbox: SandboxApi) -> None:
        await sandbox.exec("true", env={"VALUE": "once"})
        assert (await sandbox.exec('echo "[$VALUE]"')).stdout == "[]\n"

    @pytest.mark.parametrize("name", ["", "1A", "A-B", "A=B", "A B"])
    async def test_invalid_env_name_is_refused(self, sandbox: SandboxApi, name: str) -> None:
        with pytest.raises(InvalidOption):
            await sandbox.exec("true", env={name: "x"})

    async def test_command_starts_in_cwd(self, sandbox: SandboxApi) -> None:
        assert (await sandbox.exec("pwd")).stdout == f"{sandbox.cwd}\n"

    async def test_cwd_may_be_absolute_or_relative(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        await sandbox.mkdir(f"{directory}/d")
        name = directory.rsplit("/", 1)[-1]
        for cwd in (f"{directory}/d", f"{name}/d", f"{name}/d/../d"):
            assert (await sandbox.exec("pwd", cwd=cwd)).stdout == f"{directory}/d\n"

    async def test_cwd_applies_to_one_command(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.exec("true", cwd=directory)
        assert (await sandbox.exec("pwd")).stdout == f"{sandbox.cwd}\n"

    async def test_missing_cwd_is_refused_before_the_command(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        with pytest.raises(PathNotFound):
            await sandbox.exec("touch ran", cwd=f"{directory}/nope")
        assert await sandbox.readdir(directory) == []

    async def test_cwd_that_is_a_file_is_refused(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.write_file(f"{directory}/f", "")
        with pytest.raises(PathNotDirectory):
            await sandbox.exec("true", cwd=f"{directory}/f")

    async def test_shell_state_is_as_declared(
        self, sandbox: SandboxApi, capabilities: Capabilities, directory: str
    ) -> None:
        await sandbox.exec('cd "$PLACE"; kept=yes', env={"PLACE": directory})
        after = await sandbox.exec('echo "$PWD [$kept]"')
        fresh = f"{sandbox.cwd} []\n"
        assert after.stdout == (
            fresh if capabilities.shell_state == "fresh" else f"{directory} [yes]\n"
        )

    async def test_stdin_is_empty_by_default(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec('cat; read -r line; echo "code $? [$line]"')
        assert result.stdout == "code 1 []\n"

    @pytest.mark.parametrize("stdin", ["text\nmore\n", b"text\nmore\n"])
    async def test_stdin_is_text_or_bytes(self, sandbox: SandboxApi, stdin: str | bytes) -> None:
        result = await sandbox.exec('read -r first; echo "[$first]"; cat', stdin=stdin)
        assert result.stdout == "[text]\nmore\n"

    async def test_stdin_is_binary_safe(self, sandbox: SandboxApi, directory: str) -> None:
        data = bytes(range(256))
        await sandbox.exec("cat > copy", cwd=directory, stdin=data)
        assert await sandbox.read_bytes(f"{directory}/copy") == data

    async def test_stdin_of_a_megabyte(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("wc -c", stdin=b"x" * 1_000_000)
        assert result.stdout.strip() == "1000000"

    async def test_unread_stdin_is_discarded(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("echo done", stdin=b"x" * 1_000_000)
        assert (result.exit_code, result.stdout) == (0, "done\n")

    async def test_stdin_applies_to_one_command(self, sandbox: SandboxApi) -> None:
        await sandbox.exec("true", stdin="left over\n")
        assert (await sandbox.exec("cat")).stdout == ""

    async def test_fifty_concurrent_commands(self, sandbox: SandboxApi) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(sandbox.exec("sleep 0.05; echo $N", env={"N": str(n)}))
                for n in range(50)
            ]
        assert [task.result().stdout for task in tasks] == [f"{n}\n" for n in range(50)]


class DeadlineCases(Cases):
    """Nothing hangs, nothing survives, and partial output is kept."""

    async def test_timeout_is_124_and_keeps_partial_output(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("echo hi; echo oops >&2; sleep 30", timeout=0.5)
        assert (result.exit_code, result.stdout) == (124, "hi\n")
        assert result.stderr.startswith("oops\n")
        assert "timed out after 0.5" in result.stderr

    async def test_timeout_is_prompt(self, sandbox: SandboxApi) -> None:
        started = time.monotonic()
        await sandbox.exec("sleep 60", timeout=0.3)
        assert time.monotonic() - started < 15

    async def test_busy_loop_times_out(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("echo on; while :; do :; done", timeout=0.5)
        assert (result.exit_code, result.stdout) == (124, "on\n")

    async def test_command_within_its_timeout_is_unaffected(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("sleep 0.1; echo fine", timeout=30)
        assert (result.exit_code, result.stdout, result.stderr) == (0, "fine\n", "")

    async def test_sandbox_works_after_a_timeout(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.exec("echo kept > f; sleep 30", cwd=directory, timeout=0.5)
        result = await sandbox.exec("cat f", cwd=directory)
        assert result.stdout == "kept\n"

    @pytest.mark.parametrize("kind", SURVIVORS)
    async def test_no_process_survives_a_timeout(
        self, sandbox: SandboxApi, directory: str, kind: str
    ) -> None:
        result = await sandbox.exec(SURVIVORS[kind], cwd=directory, timeout=0.5)
        assert result.exit_code == 124
        await asyncio.sleep(PAUSE[kind])
        assert await sandbox.readdir(directory) == []

    @pytest.mark.parametrize("kind", ["child", "own session", "ignores TERM"])
    async def test_no_process_survives_cancellation(
        self, sandbox: SandboxApi, directory: str, kind: str
    ) -> None:
        task = asyncio.create_task(sandbox.exec(SURVIVORS[kind], cwd=directory))
        await asyncio.sleep(0.5)
        started = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - started < 5
        await asyncio.sleep(PAUSE[kind])
        assert await sandbox.readdir(directory) == []

    async def test_sandbox_works_after_cancellation(self, sandbox: SandboxApi) -> None:
        task = asyncio.create_task(sandbox.exec("while :; do :; done"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await sandbox.exec("echo alive")).stdout == "alive\n"

    async def test_command_cancelled_before_its_start_does_not_run(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        task = asyncio.create_task(sandbox.exec("touch ran", cwd=directory))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.3)
        assert await sandbox.readdir(directory) == []

    async def test_background_process_does_not_delay_the_call(
        self, sandbox: SandboxApi, capabilities: Capabilities
    ) -> None:
        # Without processes, a background command runs to its end first.
        pause = "20" if capabilities.processes else "0.5"
        started = time.monotonic()
        result = await sandbox.exec("sleep $PAUSE & echo done", env={"PAUSE": pause})
        assert (result.exit_code, result.stdout) == (0, "done\n")
        assert time.monotonic() - started < 15

    @pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True])
    async def test_invalid_timeout_is_refused(self, sandbox: SandboxApi, timeout: float) -> None:
        with pytest.raises(InvalidOption):
            await sandbox.exec("true", timeout=timeout)

    async def test_aclose_is_safe_to_repeat(self, sandbox: SandboxApi) -> None:
        await sandbox.exec("true")
        await sandbox.aclose()
        await sandbox.aclose()
