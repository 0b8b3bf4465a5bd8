"""Commands in the bash of a session: results, restored state, timeouts and attacks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from engine.awake_sandbox import AwakeSandbox, command_lines, eventually, open_sandbox
from smokebox.engine.jail.shell_supervisor import INTERRUPT_SIGNAL
from smokebox.engine.record.rows import SessionRow, put
from smokebox.engine.sessions import command as session_command
from smokebox.engine.sessions.bash_protocol import READY, SessionState
from smokebox.errors import (
    AccessDenied,
    InvalidOption,
    PathNotDirectory,
    PathNotFound,
    Unsupported,
)
from smokebox.limits import Limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.engine.sessions.session import ShellSession


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[AwakeSandbox]:
    async with open_sandbox(tmp_path) as sandbox:
        yield sandbox


@pytest.fixture
async def session(sandbox: AwakeSandbox) -> ShellSession:
    return await sandbox.sessions.create("s")


async def output_of(session: ShellSession, command: str) -> str:
    """Return the stdout of a command that must succeed."""
    result = await session.exec(command, timeout=15)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


STATE = """
cd /tmp
plain='a  "b" $c'
export exported=$'line 1\\nline 2'
list=(one "two three" [7]=seven)
declare -A map=([key]="v 1" ["k 2"]=v2)
declare -i number=3
declare -u upper=loud
readonly fixed=5
declare -n alias_of=plain
hello() { local who=$1; echo "hello $who"; }
alias ll='echo aliased'
set -o pipefail -o noglob
shopt -s extglob nullglob
trap 'echo got usr1' USR1
umask 027
"""
INSPECT = """
pwd; echo "$OLDPWD"
echo "$plain"; printenv exported; printenv plain
echo "${list[1]} ${list[7]} ${#list[@]}"; echo "${map[key]} ${map[k 2]}"
number=number+4; echo $number; upper=quiet; echo $upper; echo "$alias_of"
(fixed=6) 2>/dev/null || echo still $fixed
hello you; ll
set -o | grep -E 'pipefail|noglob'; shopt extglob nullglob
kill -USR1 $$; umask
"""
INSPECTED = """/tmp
/workspace
a  "b" $c
line 1
line 2
two three seven 3
v 1 v2
7
QUIET
a  "b" $c
still 5
hello you
aliased
noglob         \ton
pipefail       \ton
extglob        \ton
nullglob       \ton
got usr1
0027
"""


async def test_state_lasts_between_commands(session: ShellSession) -> None:
    await output_of(session, STATE)
    assert await output_of(session, INSPECT) == INSPECTED


async def test_state_survives_a_timeout(session: ShellSession) -> None:
    await output_of(session, STATE)
    result = await session.exec("later=1; sleep 30", timeout=0.2)
    assert (result.exit_code, result.timed_out, result.session_ended) == (124, True, False)
    assert await output_of(session, "echo $later") == "1\n"
    assert await output_of(session, INSPECT) == INSPECTED


async def test_state_survives_restarts_of_sandbox_and_engine(
    sandbox: AwakeSandbox, session: ShellSession
) -> None:
    await output_of(session, STATE)
    await sandbox.restart()
    await sandbox.restart_engine()
    assert await output_of(await sandbox.sessions.get("s"), INSPECT) == INSPECTED


async def test_unset_variables_stay_unset_in_another_shell(sandbox: AwakeSandbox) -> None:
    session = await sandbox.sessions.create("s", env={"GIVEN": "1", "KEPT": "2"})
    await output_of(session, "unset GIVEN LANG; unset -f nothing")
    await sandbox.restart()
    assert await output_of(session, "echo [${GIVEN-unset}] [${LANG-unset}] [$KEPT]") == (
        "[unset] [unset] [2]\n"
    )


HARD: dict[str, tuple[str, str, str]] = {
    "errexit, nounset": ("set -euo pipefail", "echo $-", "ehuB\n"),
    "debug trap": ("trap 'echo D' DEBUG", "echo x", "D\nx\n"),
    "error and exit traps": ("trap 'echo E' ERR; trap 'echo X' EXIT", "false; exit 0", "E\nX\n"),
    "trace": ("set -x", "{ set +x; } 2>/dev/null; echo $-", "hB\n"),
    "posix": ("set -o posix", "set -o | grep posix | cut -f2", "on\n"),
    "field separator": ("IFS=,:", 'x="a,b:c"; echo $x', "a b c\n"),
    "names of builtins": (
        "function cd { echo mine; }; function declare { echo mine; }; alias shopt=false",
        "cd; declare", "mine\nmine\n"
    ),
    "lines in values": (
        "x=$'a\ndeclare -- y=\"1\"\nUID=5\ntrap'", 'echo "$x"', 'a\ndeclare -- y="1"\nUID=5\ntrap\n'
    ),
    "bytes in values": (r"x=$'\xff\xfe\x01'", 'printf %s "$x" | od -An -tx1', " ff fe 01\n"),
    "quotes in values": ("x='$(id) `id` \"q\" \\'", 'echo "$x"', '$(id) `id` "q" \\\n'),
    "extended patterns in functions": (
        "shopt -s extglob\nf() { case $1 in +(a|b)) echo yes;; esac; }", "f abab", "yes\n"
    ),
    "heredocs in functions": ("f() { cat <<E\nin $1\nE\n}", "f x; f y", "in x\nin y\n"),
    "readonly arrays": ("declare -ra a=(1 '2 3'); declare -rA m=([k]=v)", "echo ${a[1]} ${m[k]}",
        "2 3 v\n"),
    "declared without a value": ("declare -i n; declare -a a; export E", "n=1+1; echo $n", "2\n"),
    "no PATH": ("unset PATH", "echo ${PATH-none}; /bin/echo x", "x\n"),
    "functions with odd names": ("a-b() { echo odd; }; x.y() { echo odder; }", "a-b; x.y",
        "odd\nodder\n"),
    "recursive functions": ("f() { (($1)) && f $(($1-1)) || echo end; }", "f 3", "end\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", HARD)
async def test_unusual_states_are_restored(
    sandbox: AwakeSandbox, session: ShellSession, name: str
) -> None:
    command, inspect, expected = HARD[name]
    await session.exec(command)
    same_shell = (await session.exec(inspect)).stdout
    await session.exec(command)
    await sandbox.restart()
    restored = (await session.exec(inspect)).stdout
    assert restored.endswith(expected)
    assert same_shell.endswith(expected)


async def test_exported_and_readonly_functions_survive(
    sandbox: AwakeSandbox, session: ShellSession
) -> None:
    await output_of(session, "shout() { echo LOUD; }; export -f shout; alias echo='printf no'")
    await sandbox.restart()
    assert await output_of(session, "unalias echo; bash -c shout; shout") == "LOUD\nLOUD\n"


SHADOWED = ["read", "eval", "printf", "exec", "cd", "mapfile", "trap", "kill", "declare", ".", ":"]
FUNCTIONS = "".join(f"function {name} {{ echo no; return 9; }}; " for name in SHADOWED)
HARMLESS: dict[str, tuple[str, int, str, str]] = {
    "final newlines are kept": (r'printf "a\n\n\n"', 0, "a\n\n\n", ""),
    "no newline is added": ("printf a", 0, "a", ""),
    "NUL and bytes that are not UTF-8": (r"printf 'a\0b\xffc'", 0, "a\0b�c", ""),
    "unclosed quote": ("echo 'open", 2, "", "unexpected EOF"),
    "unclosed substitution": ("echo $(echo", 2, "", "unexpected EOF"),
    "unterminated heredoc": ("cat <<END\nhello", 0, "hello\n", "delimited by end-of-file"),
    "stray brace": ("}", 2, "", "unexpected token"),
    "stray end": ("fi; done; esac", 2, "", "unexpected token"),
    "half an if": ("if true; then", 2, "", "unexpected end of file"),
    "trailing backslash": ("echo hi \\", 0, "hi \\\n", ""),
    "trailing comment": ("echo hi # why", 0, "hi\n", ""),
    "empty": ("", 0, "", ""),
    "only newlines": ("\n\n\n", 0, "", ""),
    "carriage returns": ("echo hi\r", 0, "hi\r\n", ""),
    "common names": ("dir=mine; log=x; sp=; ep=; EXIT_CODE=9; cleanup() { :; }", 0, "", ""),
    "protocol names": ("unset __smokebox; __smokebox_back=5; declare -A __smokebox", 0, "", ""),
    "readonly name of the protocol": ("readonly __smokebox=echo", 0, "", ""),
    "break": ("break; echo on", 0, "on\n", "only meaningful in a"),
    "continue": ("continue; echo on", 0, "on\n", "only meaningful in a"),
    "return": ("return 3; echo on", 0, "on\n", "can only `return'"),
    "assignment to a readonly": ("readonly r=1; r=2; echo no", 1, "", "readonly variable"),
    "nested eval": ("eval 'eval \"echo deep; false\"'", 1, "deep\n", ""),
    "output to a file": ("exec >/tmp/out 2>&1; echo kept; nosuch", 127, "", ""),
    "input from a file": ("exec </etc/nothing", 1, "", "No such file"),
    "closed streams": ("exec <&- >&- 2>&-; echo lost", 1, "", ""),
    "taken descriptors": ("exec 10>/tmp/a 11>/tmp/b 12>/tmp/c 255>/tmp/d; echo x", 0, "x\n", ""),
    "closed descriptors": (
        'for n in {3..255}; do eval "exec $n>&-"; done; echo x', 0, "x\n", "Bad file descriptor"
    ),
    "no PATH": ("unset PATH; echo x; PATH=/usr/bin:/bin", 0, "x\n", ""),
    "IFS": ("IFS='/0s%'; echo x", 0, "x\n", ""),
    "noclobber, noglob, nounset": ("set -Cfu", 0, "", ""),
    "verbose": ("set -v", 0, "", ""),
    "posix": ("set -o posix; POSIXLY_CORRECT=1", 0, "", ""),
    "allexport and keyword": ("set -ak", 0, "", ""),
    "builtins as functions": (FUNCTIONS, 0, "", ""),
    "builtins as aliases": ("alias builtin=no if=no printf=no then=no", 0, "", ""),
    "disabled builtins that are not needed": ("enable -n echo test kill", 0, "", ""),
    "error trap": ("trap 'echo E' ERR; false; true", 0, "E\n", ""),
    "lost LINENO": ("unset LINENO", 0, "", ""),
    "readonly LINENO": ("readonly LINENO", 0, "", ""),
    "huge environment": ("export BIG=$(head -c 100000 /dev/zero | tr '\\0' x)", 0, "", ""),
    "missing locale": ("export LC_ALL=xx_YY.nope 2>/dev/null", 0, "", ""),
    "few open files": ("ulimit -n 40", 0, "", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
async def test_command_does_not_break_the_session(session: ShellSession, name: str) -> None:
    command, code, stdout, stderr = HARMLESS[name]
    result = await session.exec(command, timeout=15)
    assert (result.exit_code, result.stdout, result.session_ended) == (code, stdout, False)
    assert stderr in result.stderr if stderr else not result.stderr
    after = await session.exec("echo alive", timeout=15)
    # A trap of the user may print before.
    assert after.stdout.endswith("alive\n")
    assert (after.exit_code, after.timed_out, after.session_ended) == (0, False, False)


ENDING: dict[str, tuple[str, int, str]] = {
    "exit": ("X=1; echo out; exit 3", 3, "out\n"),
    "exit in a function": ("f() { exit 4; }; f; echo no", 4, ""),
    "exit trap": ("trap 'echo bye' EXIT; exit 3", 3, "bye\n"),
    "errexit": ("set -e; echo on; false; echo no", 1, "on\n"),
    "errexit and a last status that is not zero": ("set -e; ! true", 1, ""),
    "unset variable": ("set -u; echo $nothing; echo no", 1, ""),
    "missing value": (": ${nothing:?is missing}; echo no", 1, ""),
    "exec": ("exec echo instead", 0, "instead\n"),
    "exec of a missing program": ("exec nosuch", 127, ""),
    "killed": ("kill -9 $$", 137, ""),
    "terminated": ("kill $$; sleep 5", 143, ""),
    "killed with all processes": ("kill -9 -1; sleep 5", 137, ""),
    "one command only": ("set -t", 0, ""),
}


@pytest.mark.parametrize("name", ENDING)
async def test_end_of_the_shell_is_reported_and_the_next_starts_afresh(
    sandbox: AwakeSandbox, name: str
) -> None:
    session = await sandbox.sessions.create(cwd="/tmp", env={"GIVEN": "1"})
    await output_of(session, "cd /; MADE=1; GIVEN=2")
    command, code, stdout = ENDING[name]
    result = await session.exec(command, timeout=15)
    assert (result.exit_code, result.stdout, result.session_ended) == (code, stdout, True)
    assert await output_of(session, "echo $PWD [$MADE] $GIVEN") == "/tmp [] 1\n"


BROKEN = {
    "noexec": "set -n",
    "builtin as a function": "builtin() { echo mine; }",
    "builtin disabled": "enable -n builtin",
    "restricted": "set -r",
    "no files at all": "ulimit -n 3",
    "commands skipped by a trap": "shopt -s extdebug; trap false DEBUG",
}


@pytest.mark.parametrize("name", BROKEN)
async def test_broken_shell_is_replaced(session: ShellSession, name: str) -> None:
    """The session continues with the state before the command that broke it."""
    await output_of(session, "cd /tmp; KEPT=1")
    await session.exec(BROKEN[name], timeout=15)
    assert await output_of(session, "echo $PWD $KEPT; type -t builtin") == "/tmp 1\nbuiltin\n"


async def test_status_and_line_numbers_are_as_in_a_script(session: ShellSession) -> None:
    for code in (0, 1, 2, 77, 255):
        await session.exec(f"(exit {code})")
        assert await output_of(session, "echo $? $LINENO") == f"{code} 1\n"
    result = await session.exec("\n\nnosuch")
    assert result.stderr == "bash: line 3: nosuch: command not found\n"


async def test_last_status_does_not_trigger_the_err_trap(session: ShellSession) -> None:
    await output_of(session, "trap 'echo E' ERR")
    assert (await session.exec("! true")).exit_code == 1
    assert await output_of(session, "echo $?") == "1\n"


async def test_traps_do_not_run_between_commands(session: ShellSession) -> None:
    await output_of(session, "trap 'echo D' DEBUG; trap 'echo R' RETURN; n=0")
    assert await output_of(session, "true") == "D\n"
    await session.exec("trap - DEBUG RETURN; trap 'n=$((n+1))' ERR")
    await session.exec("false")
    assert (await session.exec("trap - ERR; echo $n")).stdout in ("1\n", "2\n")


async def test_trace_shows_only_the_command(session: ShellSession) -> None:
    await session.exec("set -x")
    result = await session.exec("echo traced")
    assert (result.stdout, result.stderr) == ("traced\n", "++ echo traced\n")


async def test_commands_have_separate_streams_and_stdin(session: ShellSession) -> None:
    both = await session.exec("echo to stdout; echo to stderr >&2; cat", stdin="from stdin")
    assert (both.stdout, both.stderr) == ("to stdout\nfrom stdin", "to stderr\n")
    assert await output_of(session, "cat; echo nothing") == "nothing\n"
    big = bytes(range(1, 256)) * 4096
    counted = await session.exec("cksum; echo x >/dev/stdout; wc -c </dev/stdin", stdin=big)
    size = str(len(big))
    assert counted.stdout.split()[1:] == [size, "x", size]


async def test_cwd_and_env_apply_to_one_command(session: ShellSession) -> None:
    await output_of(session, "cd /tmp; mkdir sub; A=before")
    result = await session.exec(
        "pwd; printenv A; cd /; MADE=1", cwd="sub", env={"A": "$(id) 'x' \"\n\\"}
    )
    assert result.stdout == "/tmp/sub\n$(id) 'x' \"\n\\\n"
    assert await output_of(session, "echo $PWD $OLDPWD $A $MADE") == "/tmp /workspace before 1\n"


@pytest.mark.parametrize(
    ("cwd", "error"),
    [("/nope", PathNotFound), ("/etc/file", PathNotDirectory), ("/tmp/shut", AccessDenied)],
)
async def test_invalid_cwd_is_an_error_of_that_path(
    sandbox: AwakeSandbox, cwd: str, error: type[Exception]
) -> None:
    await sandbox.run_command("touch /etc/file; mkdir /tmp/shut; chmod 0 /tmp/shut")
    if sandbox.jail.owner.count == 1 and error is AccessDenied:
        pytest.skip("root inside is the only user, and may enter every directory")
    session = await sandbox.sessions.create(user="alice" if error is AccessDenied else None)
    with pytest.raises(error):
        await session.exec("pwd", cwd=cwd)
    assert await output_of(session, "pwd") == "/workspace\n"
    with pytest.raises(error):
        await (await sandbox.sessions.create(cwd=cwd, user=session.user or None)).exec("pwd")


async def test_removed_directory_falls_back_to_the_first(sandbox: AwakeSandbox) -> None:
    session = await sandbox.sessions.create(cwd="/tmp")
    await output_of(session, "mkdir gone; cd gone; KEPT=1")
    await sandbox.run_command("rmdir /tmp/gone")
    await sandbox.restart()
    assert await output_of(session, "echo $PWD $KEPT") == "/tmp 1\n"


@pytest.mark.parametrize("command", ["a\0b", "\ud800", ["ls"], None, b"ls"])
async def test_invalid_commands_are_refused(session: ShellSession, command: str) -> None:
    with pytest.raises(InvalidOption):
        await session.exec(command)


async def test_commands_may_be_long(session: ShellSession) -> None:
    assert await output_of(session, f"echo {'x' * 300_000} | wc -c; echo {'y' * 10}") == (
        f"300001\n{'y' * 10}\n"
    )


async def test_long_output_is_truncated(session: ShellSession) -> None:
    result = await session.exec("seq 2500000; echo done >&2", timeout=15)
    assert (result.exit_code, result.truncated, result.stderr) == (0, True, "done\n")
    assert result.stdout.endswith("2499999\n2500000\n")


async def test_stream_is_immediate_and_complete(
    sandbox: AwakeSandbox, session: ShellSession
) -> None:
    command = "printf tick; while [ ! -e go ]; do sleep 0.01; done; seq 1 50000; printf end"
    async with session.exec_stream(command, timeout=15) as stream:
        first = await anext(stream)
        assert first.data == "tick"
        await sandbox.run_command("touch go")
        rest = "".join([chunk.data async for chunk in stream])
    assert rest == "".join(f"{n}\n" for n in range(1, 50001)) + "end"
    assert stream.result.exit_code == 0


async def test_stream_reports_the_end_of_the_session(session: ShellSession) -> None:
    async with session.exec_stream("echo out; exit 3") as stream:
        assert [chunk.data async for chunk in stream] == ["out\n"]
    assert (stream.result.exit_code, stream.result.session_ended) == (3, True)


async def test_background_jobs_neither_block_nor_leak_and_keep_running(
    session: ShellSession,
) -> None:
    writer = "while echo noise; echo noise >&2; do sleep 0.01; done"
    result = await session.exec(f"({writer}) & echo begun", timeout=15)
    assert result.stdout.startswith(("begun\n", "noise\n"))
    for _ in range(3):
        assert await output_of(session, "echo quiet; sleep 0.05") == "quiet\n"
    assert (
        await output_of(session, "kill -0 $! && kill $!; wait 2>/dev/null; echo over") == "over\n"
    )


async def test_wait_knows_jobs_of_earlier_commands(session: ShellSession) -> None:
    await output_of(session, "(exit 7) >/dev/null 2>&1 &")
    assert (await session.exec("wait $!", timeout=15)).exit_code == 7


async def test_timeout_kills_the_command_but_not_earlier_jobs(
    sandbox: AwakeSandbox, session: ShellSession
) -> None:
    await output_of(session, "sleep 1001 >/dev/null 2>&1 &")
    await output_of(session, "setsid sleep 1002 >/dev/null 2>&1 &")
    command = "echo part; sleep 1003 & setsid sleep 1004 & sleep 1005 | cat; echo no"
    result = await session.exec(command, timeout=0.3)
    assert (result.exit_code, result.timed_out, result.stdout) == (124, True, "part\n")
    assert result.stderr.endswith("smokebox: timed out after 0.3 s\n")
    left = sorted(line for line in command_lines(sandbox) if line.startswith("sleep"))
    assert left == ["sleep 1001", "sleep 1002"]
    assert await output_of(session, "echo on") == "on\n"


STUCK = {
    "loop": "X=2; while :; do :; done",
    "ignored signals": "X=2; trap '' TERM INT 39; while :; do sleep 1; done",
    "stopped": "X=2; kill -STOP $$",
    "inside one builtin": "X=2; read -r line < <(sleep 1000)",
    "function": "f() { local X=3; sleep 1000; }; f",
    "child that does not end": "X=2; bash -c 'trap \"\" TERM; while :; do sleep 1; done'",
    "flood": "X=2; yes",
}


@pytest.mark.parametrize("name", STUCK)
async def test_timeout_keeps_the_session(
    session: ShellSession, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_command, "TERMINATE_SECONDS", 0.5)
    await output_of(session, "cd /tmp; X=1")
    result = await session.exec(STUCK[name], timeout=0.2)
    assert (result.exit_code, result.timed_out, result.session_ended) == (124, True, False)
    assert await output_of(session, "echo $PWD $X") in ("/tmp 1\n", "/tmp 2\n")


async def test_cancelling_kills_the_command(sandbox: AwakeSandbox, session: ShellSession) -> None:
    await output_of(session, "cd /tmp")
    task = asyncio.create_task(session.exec("X=1; sleep 1006"))
    await eventually(lambda: "sleep 1006" in command_lines(sandbox))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "sleep 1006" not in command_lines(sandbox)
    assert await output_of(session, "echo $PWD $X") == "/tmp 1\n"


async def test_closing_a_stream_kills_the_command(
    sandbox: AwakeSandbox, session: ShellSession
) -> None:
    async with session.exec_stream("echo one; sleep 1007") as stream:
        assert (await anext(stream)).data == "one\n"
    await eventually(lambda: "sleep 1007" not in command_lines(sandbox))
    assert await output_of(session, "echo on") == "on\n"


async def test_closing_a_stream_kills_what_a_command_starts_after_the_interrupt(
    sandbox: AwakeSandbox, session: ShellSession
) -> None:
    """A shell that is about to fork when it is interrupted does the same, in 1 of 25 commands."""
    command = f"trap '' {INTERRUPT_SIGNAL}; echo one; sleep 1006; sleep 1007"
    async with session.exec_stream(command) as stream:
        assert (await anext(stream)).data == "one\n"
    await eventually(lambda: "sleep 100" not in " ".join(command_lines(sandbox)))
    assert await output_of(session, "echo on") == "on\n"


async def test_state_survives_a_shell_killed_between_commands(session: ShellSession) -> None:
    await output_of(session, "cd /tmp; X=1")
    await output_of(session, "(sleep 0.1; kill -9 $$) >/dev/null 2>&1 & disown")
    await asyncio.sleep(0.3)
    assert await output_of(session, "echo $PWD $X") == "/tmp 1\n"


async def test_forged_reports_affect_only_the_own_session(
    sandbox: AwakeSandbox, session: ShellSession
) -> None:
    """A session can find its own pipes."""
    victim = await sandbox.sessions.create()
    directory = "$(dirname $(readlink /proc/$$/fd/255))"
    for attack in (
        "printf 'nonsense\\0' >$D/r; sleep 0.1",
        "(while :; do head -c 100000 /dev/zero >$D/r; done) >/dev/null 2>&1 & sleep 0.2",
        "(yes s0 | tr '\\n' '\\0' >$D/r) >/dev/null 2>&1 & sleep 0.2",
        "(cat $D/bash) >/dev/null 2>&1 & sleep 0.1",
        "(cat $D/o0 & cat $D/e0) >/dev/null 2>&1 & echo x",
        "(sleep 1 >$D/o0) & echo x",
        "rm -rf $D; echo x > $D/c; mkfifo $D/x; ls /run/smokebox",
    ):
        await session.exec(f"D={directory}; {attack}", timeout=5)
        assert await output_of(victim, "echo unharmed") == "unharmed\n"
        result = await session.exec("echo on", timeout=5)
        assert result.exit_code in (0, 124, 137)
    await sandbox.sessions.delete("s")
    assert await output_of(await sandbox.sessions.create("s"), "echo fresh") == "fresh\n"


async def test_other_users_cannot_find_the_pipes_of_a_session(
    sandbox: AwakeSandbox, session: ShellSession
) -> None:
    if sandbox.jail.owner.count == 1:
        pytest.skip("the sandbox has no other users")
    await output_of(session, "echo here")
    alice = await sandbox.sessions.create(user="alice")
    assert await output_of(alice, "id -u; echo $HOME") == "1000\n/tmp\n"
    assert (await alice.exec("ls /run/smokebox")).exit_code == 2
    pid = (await output_of(session, "echo $$")).strip()
    assert (await alice.exec(f"readlink /proc/{pid}/fd/255 /proc/{pid}/cwd")).stdout == ""
    for one in (session, alice):
        refused = await one.exec("echo id > $(readlink /proc/$$/fd/255)")
        assert (refused.exit_code, refused.session_ended) == (1, False)


async def test_oversized_state_is_not_saved(
    sandbox: AwakeSandbox, session: ShellSession, caplog: pytest.LogCaptureFixture
) -> None:
    await output_of(session, "small=1")
    await output_of(session, "big=$(head -c 5000000 /dev/zero | tr '\\0' x)")
    assert await output_of(session, "echo ${#big}") == "5000000\n"
    await sandbox.restart()
    assert "larger than" in caplog.text
    assert await output_of(session, "echo $small ${#big}") == "1 0\n"


async def test_state_that_a_slow_shell_reports_does_not_disturb_the_next_command(
    sandbox: AwakeSandbox, session: ShellSession
) -> None:
    await output_of(session, "small=1; big=$(head -c 5000000 /dev/zero | tr '\\0' x)")
    await sandbox.jail.set_limits(Limits(cpu=0.03))
    for _ in range(2):
        assert await output_of(session, "echo $small ${#big}") == "1 5000000\n"


async def test_shell_that_is_slow_to_start_gets_its_whole_state(
    sandbox: AwakeSandbox, session: ShellSession
) -> None:
    # Sleeps before the last line that a shell reads when it starts.
    pattern = rf"*printf\ ?{READY.decode()}*"
    await output_of(session, f"X=kept; trap '[[ $BASH_COMMAND != {pattern} ]] || sleep 1' DEBUG")
    await sandbox.restart()
    assert await output_of(session, "echo $X") == "kept\n"


@pytest.mark.parametrize("script", [b"exit 1", b"echo 'open", b"exec sleep 0", b"set -n"])
async def test_invalid_state_restores_only_the_directory(
    sandbox: AwakeSandbox, session: ShellSession, script: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await output_of(session, "cd /tmp; LOST=1")
    await sandbox.restart_engine()
    row = await sandbox.record.get(SessionRow, "box", "s")
    assert row is not None
    broken = replace(row, state=SessionState(cwd="/tmp", script=script).pack())
    await sandbox.record.write(put(broken))
    session = await sandbox.sessions.get("s")
    assert await output_of(session, "echo $PWD $PATH [$LOST]") == "/tmp /usr/bin:/bin []\n"
    assert "could be restored" in caplog.text


async def test_sandbox_without_bash_is_reported(
    sandbox: AwakeSandbox, session: ShellSession
) -> None:
    sandbox.shell = "/bin/nosuch"
    await sandbox.restart()
    result = await session.exec("echo hi")
    assert (result.exit_code, "nosuch" in result.stderr) == (127, True)
    sandbox.shell = "/bin/sh"
    await sandbox.restart()
    with pytest.raises(Unsupported, match="bash"):
        await session.exec("echo hi")
