"""Cases on commands: input, output and failures."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from smokebox.errors import InvalidOption, PathNotDirectory, PathNotFound
from smokebox.sandbox.conformance.cases import Cases

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi
    from smokebox.types import Capabilities

HOSTILE = [
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


class CommandCases(Cases):
    """`exec` and its options."""

    async def test_output_and_success(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("echo hi")
        assert (result.exit_code, result.stdout, result.stderr) == (0, "hi\n", "")
        assert (result.success, result.truncated) == (True, False)
        assert result.duration >= 0

    async def test_stderr_is_kept_apart(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("echo out; echo err >&2")
        assert (result.stdout, result.stderr) == ("out\n", "err\n")

    async def test_output_is_not_trimmed(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec(r"printf '\n  a \n\n'")
        assert result.stdout == "\n  a \n\n"

    @pytest.mark.parametrize("code", [1, 3, 42, 255])
    async def test_a_non_zero_exit_is_a_result(self, sandbox: SandboxApi, code: int) -> None:
        result = await sandbox.exec("echo before; exit $CODE", env={"CODE": str(code)})
        assert (result.exit_code, result.success, result.stdout) == (code, False, "before\n")

    async def test_a_missing_program_is_127(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("no-such-program-anywhere")
        assert result.exit_code == 127
        assert "no-such-program-anywhere" in result.stderr

    async def test_a_syntax_error_is_2(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("if then fi (")
        assert result.exit_code == 2
        assert result.stderr

    async def test_an_unclosed_quote_is_2_and_not_a_hang(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("echo 'open")
        assert result.exit_code == 2

    @pytest.mark.parametrize(("signal", "code"), [("KILL", 137), ("TERM", 143)])
    async def test_death_by_signal(self, sandbox: SandboxApi, signal: str, code: int) -> None:
        result = await sandbox.exec("kill -$NAME $$; sleep 5", env={"NAME": signal})
        assert result.exit_code == code

    async def test_an_empty_command_does_nothing(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("")
        assert (result.exit_code, result.stdout) == (0, "")

    async def test_a_command_with_a_nul_is_refused(self, sandbox: SandboxApi) -> None:
        with pytest.raises(InvalidOption):
            await sandbox.exec("echo a\0b")

    @pytest.mark.parametrize("command", HOSTILE)
    async def test_a_command_is_data_and_leaves_no_trace(
        self, sandbox: SandboxApi, command: str
    ) -> None:
        first = await sandbox.exec(command)
        assert (first.exit_code, bool(first.stdout)) == (0, True)
        assert (await sandbox.exec("echo next")).stdout == "next\n"

    async def test_it_is_bash(self, sandbox: SandboxApi) -> None:
        script = 'a=(x y z); [[ ${a[1]} == y ]] && echo "${a[@]:1}" {1..3} ${#a[@]}'
        assert (await sandbox.exec(script)).stdout == "y z 1 2 3 3\n"

    async def test_pipelines_and_globs(self, sandbox: SandboxApi, place: str) -> None:
        for name, text in (("b.log", "2\n"), ("a.log", "1\n2\n")):
            await sandbox.write_file(f"{place}/{name}", text)
        result = await sandbox.exec("cat *.log | sort | uniq -c | wc -l", cwd=place)
        assert result.stdout.strip() == "2"

    async def test_unicode_comes_through(self, sandbox: SandboxApi) -> None:
        assert (await sandbox.exec("echo 'héllo 名前 🦊'")).stdout == "héllo 名前 🦊\n"

    async def test_invalid_utf8_is_replaced(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec(r"printf 'a\xffb'")
        assert result.stdout == "a\ufffdb"

    async def test_env_is_given(self, sandbox: SandboxApi) -> None:
        value = "a b'c\"d$e\nf"
        result = await sandbox.exec('printf %s "$GIVEN"', env={"GIVEN": value})
        assert result.stdout == value

    async def test_env_reaches_child_shells(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("bash -c 'echo $GIVEN'", env={"GIVEN": "down"})
        assert result.stdout == "down\n"

    async def test_env_holds_for_one_command(self, sandbox: SandboxApi) -> None:
        await sandbox.exec("true", env={"GIVEN": "once"})
        assert (await sandbox.exec('echo "[$GIVEN]"')).stdout == "[]\n"

    @pytest.mark.parametrize("name", ["", "1A", "A-B", "A=B", "A B"])
    async def test_an_impossible_env_name_is_refused(self, sandbox: SandboxApi, name: str) -> None:
        with pytest.raises(InvalidOption):
            await sandbox.exec("true", env={name: "x"})

    async def test_it_starts_in_cwd(self, sandbox: SandboxApi) -> None:
        assert (await sandbox.exec("pwd")).stdout == f"{sandbox.cwd}\n"

    async def test_cwd_absolute_and_relative(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.mkdir(f"{place}/d")
        name = place.rsplit("/", 1)[-1]
        for cwd in (f"{place}/d", f"{name}/d", f"{name}/d/../d"):
            assert (await sandbox.exec("pwd", cwd=cwd)).stdout == f"{place}/d\n"

    async def test_cwd_holds_for_one_command(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.exec("true", cwd=place)
        assert (await sandbox.exec("pwd")).stdout == f"{sandbox.cwd}\n"

    async def test_a_missing_cwd_is_refused_before_the_command(
        self, sandbox: SandboxApi, place: str
    ) -> None:
        with pytest.raises(PathNotFound):
            await sandbox.exec("touch ran", cwd=f"{place}/nope")
        assert await sandbox.readdir(place) == []

    async def test_a_file_is_no_cwd(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/f", "")
        with pytest.raises(PathNotDirectory):
            await sandbox.exec("true", cwd=f"{place}/f")

    async def test_shell_state_is_as_declared(
        self, sandbox: SandboxApi, able: Capabilities, place: str
    ) -> None:
        await sandbox.exec('cd "$PLACE"; kept=yes', env={"PLACE": place})
        after = await sandbox.exec('echo "$PWD [$kept]"')
        fresh = f"{sandbox.cwd} []\n"
        assert after.stdout == (fresh if able.shell_state == "fresh" else f"{place} [yes]\n")

    async def test_stdin_is_at_its_end_by_default(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec('cat; read -r line; echo "code $? [$line]"')
        assert result.stdout == "code 1 []\n"

    @pytest.mark.parametrize("stdin", ["text\nmore\n", b"text\nmore\n"])
    async def test_stdin_is_given(self, sandbox: SandboxApi, stdin: str | bytes) -> None:
        result = await sandbox.exec('read -r first; echo "[$first]"; cat', stdin=stdin)
        assert result.stdout == "[text]\nmore\n"

    async def test_stdin_is_binary_safe(self, sandbox: SandboxApi, place: str) -> None:
        data = bytes(range(256))
        await sandbox.exec("cat > copy", cwd=place, stdin=data)
        assert await sandbox.read_bytes(f"{place}/copy") == data

    async def test_a_megabyte_of_stdin(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("wc -c", stdin=b"x" * 1_000_000)
        assert result.stdout.strip() == "1000000"

    async def test_stdin_that_nobody_reads(self, sandbox: SandboxApi) -> None:
        result = await sandbox.exec("echo done", stdin=b"x" * 1_000_000)
        assert (result.exit_code, result.stdout) == (0, "done\n")

    async def test_stdin_holds_for_one_command(self, sandbox: SandboxApi) -> None:
        await sandbox.exec("true", stdin="left over\n")
        assert (await sandbox.exec("cat")).stdout == ""

    async def test_fifty_at_once(self, sandbox: SandboxApi) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(sandbox.exec("sleep 0.05; echo $N", env={"N": str(n)}))
                for n in range(50)
            ]
        assert [task.result().stdout for task in tasks] == [f"{n}\n" for n in range(50)]
