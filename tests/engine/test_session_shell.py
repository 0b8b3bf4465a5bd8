"""What a session's bash makes of commands: as a script does, and never the worse for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from engine.session_box import Box, eventually, open_box, processes
from smokebox.engine.record.rows import SessionRow, put
from smokebox.engine.sessions import command as session_command
from smokebox.engine.sessions.driver import SessionState
from smokebox.errors import (
    AccessDenied,
    InvalidOption,
    PathNotDirectory,
    PathNotFound,
    Unsupported,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.engine.sessions.session import ShellSession


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    async with open_box(tmp_path) as box:
        yield box


@pytest.fixture
async def session(box: Box) -> ShellSession:
    return await box.sessions.create("s")


async def out(session: ShellSession, command: str) -> str:
    """What a command prints, that must not fail."""
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
LOOK = """
pwd; echo "$OLDPWD"
echo "$plain"; printenv exported; printenv plain
echo "${list[1]} ${list[7]} ${#list[@]}"; echo "${map[key]} ${map[k 2]}"
number=number+4; echo $number; upper=quiet; echo $upper; echo "$alias_of"
(fixed=6) 2>/dev/null || echo still $fixed
hello you; ll
set -o | grep -E 'pipefail|noglob'; shopt extglob nullglob
kill -USR1 $$; umask
"""
SEEN = """/tmp
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


async def test_everything_survives_from_command_to_command(session: ShellSession) -> None:
    await out(session, STATE)
    assert await out(session, LOOK) == SEEN


async def test_everything_survives_a_timeout(session: ShellSession) -> None:
    await out(session, STATE)
    result = await session.exec("later=1; sleep 30", timeout=0.2)
    assert (result.exit_code, result.timed_out, result.session_ended) == (124, True, False)
    assert await out(session, "echo $later") == "1\n"
    # The number has been counted up by nobody, and all the rest is as it was.
    assert await out(session, LOOK) == SEEN


async def test_everything_survives_the_sandbox_and_the_engine(
    box: Box, session: ShellSession
) -> None:
    await out(session, STATE)
    await box.sleep()
    await box.restart_engine()
    assert await out(await box.sessions.get("s"), LOOK) == SEEN


async def test_unset_stays_unset_in_another_shell(box: Box) -> None:
    session = await box.sessions.create("s", env={"GIVEN": "1", "KEPT": "2"})
    await out(session, "unset GIVEN LANG; unset -f nothing")
    await box.sleep()
    assert await out(session, "echo [${GIVEN-unset}] [${LANG-unset}] [$KEPT]") == (
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


@pytest.mark.parametrize("what", HARD)
async def test_states_that_are_hard_to_restore(box: Box, session: ShellSession, what: str) -> None:
    command, look, seen = HARD[what]
    await session.exec(command)
    here = (await session.exec(look)).stdout
    await session.exec(command)
    await box.sleep()
    again = (await session.exec(look)).stdout
    assert again.endswith(seen)
    assert here.endswith(seen)


async def test_exported_and_readonly_functions_survive(box: Box, session: ShellSession) -> None:
    await out(session, "shout() { echo LOUD; }; export -f shout; alias echo='printf no'")
    await box.sleep()
    assert await out(session, "unalias echo; bash -c shout; shout") == "LOUD\nLOUD\n"


TAKEN = ["read", "eval", "printf", "exec", "cd", "mapfile", "trap", "kill", "declare", ".", ":"]
FUNCTIONS = "".join(f"function {name} {{ echo no; return 9; }}; " for name in TAKEN)
HARMLESS: dict[str, tuple[str, int, str, str]] = {
    "final newlines are kept": (r'printf "a\n\n\n"', 0, "a\n\n\n", ""),
    "none is added": ("printf a", 0, "a", ""),
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
    "names like ours": ("dir=mine; log=x; sp=; ep=; EXIT_CODE=9; cleanup() { :; }", 0, "", ""),
    "our own names": ("unset __smokebox; __smokebox_back=5; declare -A __smokebox", 0, "", ""),
    "our own name for good": ("readonly __smokebox=echo", 0, "", ""),
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
    "disabled builtins of no need": ("enable -n echo test kill", 0, "", ""),
    "error trap": ("trap 'echo E' ERR; false; true", 0, "E\n", ""),
    "lost LINENO": ("unset LINENO", 0, "", ""),
    "readonly LINENO": ("readonly LINENO", 0, "", ""),
    "huge environment": ("export BIG=$(head -c 100000 /dev/zero | tr '\\0' x)", 0, "", ""),
    "locale that is not there": ("export LC_ALL=xx_YY.nope 2>/dev/null", 0, "", ""),
    "no room for files": ("ulimit -n 40", 0, "", ""),
}  # fmt: skip


@pytest.mark.parametrize("what", HARMLESS)
async def test_harmless(session: ShellSession, what: str) -> None:
    command, code, stdout, stderr = HARMLESS[what]
    result = await session.exec(command, timeout=15)
    assert (result.exit_code, result.stdout, result.session_ended) == (code, stdout, False)
    assert stderr in result.stderr if stderr else not result.stderr
    again = await session.exec("echo alive", timeout=15)
    # What a trap of the user says is the user's.
    assert again.stdout.endswith("alive\n")
    assert (again.exit_code, again.timed_out, again.session_ended) == (0, False, False)


ENDING: dict[str, tuple[str, int, str]] = {
    "exit": ("X=1; echo out; exit 3", 3, "out\n"),
    "exit in a function": ("f() { exit 4; }; f; echo no", 4, ""),
    "exit trap": ("trap 'echo bye' EXIT; exit 3", 3, "bye\n"),
    "errexit": ("set -e; echo on; false; echo no", 1, "on\n"),
    "errexit and a last status that is not zero": ("set -e; ! true", 1, ""),
    "unset variable": ("set -u; echo $nothing; echo no", 1, ""),
    "missing value": (": ${nothing:?is missing}; echo no", 1, ""),
    "exec": ("exec echo instead", 0, "instead\n"),
    "exec of nothing": ("exec nosuch", 127, ""),
    "killed": ("kill -9 $$", 137, ""),
    "terminated": ("kill $$; sleep 5", 143, ""),
    "killed with all that is there": ("kill -9 -1; sleep 5", 137, ""),
    "one command only": ("set -t", 0, ""),
}


@pytest.mark.parametrize("what", ENDING)
async def test_the_end_of_the_shell_is_said_and_the_next_is_fresh(box: Box, what: str) -> None:
    session = await box.sessions.create(cwd="/tmp", env={"GIVEN": "1"})
    await out(session, "cd /; MADE=1; GIVEN=2")
    command, code, stdout = ENDING[what]
    result = await session.exec(command, timeout=15)
    assert (result.exit_code, result.stdout, result.session_ended) == (code, stdout, True)
    assert await out(session, "echo $PWD [$MADE] $GIVEN") == "/tmp [] 1\n"


BROKEN = {
    "noexec": "set -n",
    "builtin as a function": "builtin() { echo mine; }",
    "builtin disabled": "enable -n builtin",
    "restricted": "set -r",
    "no files at all": "ulimit -n 3",
    "commands skipped by a trap": "shopt -s extdebug; trap false DEBUG",
}


@pytest.mark.parametrize("what", BROKEN)
async def test_a_shell_that_lost_its_way_is_replaced(session: ShellSession, what: str) -> None:
    """Its command gets no exit code of its own, and the session its state before it."""
    await out(session, "cd /tmp; KEPT=1")
    await session.exec(BROKEN[what], timeout=15)
    assert await out(session, "echo $PWD $KEPT; type -t builtin") == "/tmp 1\nbuiltin\n"


async def test_status_and_line_numbers_are_those_of_the_command(session: ShellSession) -> None:
    for code in (0, 1, 2, 77, 255):
        await session.exec(f"(exit {code})")
        assert await out(session, "echo $? $LINENO") == f"{code} 1\n"
    result = await session.exec("\n\nnosuch")
    assert result.stderr == "bash: line 3: nosuch: command not found\n"


async def test_the_status_of_the_last_command_trips_no_trap(session: ShellSession) -> None:
    await out(session, "trap 'echo E' ERR")
    assert (await session.exec("! true")).exit_code == 1
    assert await out(session, "echo $?") == "1\n"


async def test_traps_do_not_talk_between_commands(session: ShellSession) -> None:
    await out(session, "trap 'echo D' DEBUG; trap 'echo R' RETURN; n=0")
    assert await out(session, "true") == "D\n"
    await session.exec("trap - DEBUG RETURN; trap 'n=$((n+1))' ERR")
    await session.exec("false")
    assert (await session.exec("trap - ERR; echo $n")).stdout in ("1\n", "2\n")


async def test_the_trace_shows_the_command_alone(session: ShellSession) -> None:
    await session.exec("set -x")
    result = await session.exec("echo traced")
    assert (result.stdout, result.stderr) == ("traced\n", "++ echo traced\n")


async def test_each_command_has_its_own_streams_and_stdin(session: ShellSession) -> None:
    both = await session.exec("echo to stdout; echo to stderr >&2; cat", stdin="from stdin")
    assert (both.stdout, both.stderr) == ("to stdout\nfrom stdin", "to stderr\n")
    assert await out(session, "cat; echo nothing") == "nothing\n"
    big = bytes(range(1, 256)) * 4096
    counted = await session.exec("cksum; echo x >/dev/stdout; wc -c </dev/stdin", stdin=big)
    size = str(len(big))
    assert counted.stdout.split()[1:] == [size, "x", size]


async def test_cwd_and_env_hold_for_one_command(session: ShellSession) -> None:
    await out(session, "cd /tmp; mkdir sub; A=before")
    result = await session.exec(
        "pwd; printenv A; cd /; MADE=1", cwd="sub", env={"A": "$(id) 'x' \"\n\\"}
    )
    assert result.stdout == "/tmp/sub\n$(id) 'x' \"\n\\\n"
    assert await out(session, "echo $PWD $OLDPWD $A $MADE") == "/tmp /workspace before 1\n"


@pytest.mark.parametrize(
    ("cwd", "error"),
    [("/nope", PathNotFound), ("/etc/file", PathNotDirectory), ("/tmp/shut", AccessDenied)],
)
async def test_a_cwd_that_cannot_be(box: Box, cwd: str, error: type[Exception]) -> None:
    await box.exec("touch /etc/file; mkdir /tmp/shut; chmod 0 /tmp/shut")
    if box.jail.owner.count == 1 and error is AccessDenied:
        pytest.skip("root inside is the only user, and may go anywhere")
    session = await box.sessions.create(user="alice" if error is AccessDenied else None)
    with pytest.raises(error):
        await session.exec("pwd", cwd=cwd)
    assert await out(session, "pwd") == "/workspace\n"
    with pytest.raises(error):
        await (await box.sessions.create(cwd=cwd, user=session.user or None)).exec("pwd")


async def test_a_directory_that_has_gone_is_left_for_the_first(box: Box) -> None:
    session = await box.sessions.create(cwd="/tmp")
    await out(session, "mkdir gone; cd gone; KEPT=1")
    await box.exec("rmdir /tmp/gone")
    await box.sleep()
    assert await out(session, "echo $PWD $KEPT") == "/tmp 1\n"


@pytest.mark.parametrize("command", ["a\0b", "\ud800", ["ls"], None, b"ls"])
async def test_what_is_no_command(session: ShellSession, command: str) -> None:
    with pytest.raises(InvalidOption):
        await session.exec(command)


async def test_long_commands(session: ShellSession) -> None:
    assert await out(session, f"echo {'x' * 300_000} | wc -c; echo {'y' * 10}") == (
        f"300001\n{'y' * 10}\n"
    )


async def test_much_output_in_many_lines(session: ShellSession) -> None:
    result = await session.exec("seq 2500000; echo done >&2", timeout=15)
    assert (result.exit_code, result.truncated, result.stderr) == (0, True, "done\n")
    assert result.stdout.endswith("2499999\n2500000\n")


async def test_streams_come_whole_and_at_once(box: Box, session: ShellSession) -> None:
    command = "printf tick; while [ ! -e go ]; do sleep 0.01; done; seq 1 50000; printf end"
    async with session.exec_stream(command, timeout=15) as stream:
        first = await anext(stream)
        assert first.data == "tick"
        await box.exec("touch go")
        rest = "".join([chunk.data async for chunk in stream])
    assert rest == "".join(f"{n}\n" for n in range(1, 50001)) + "end"
    assert stream.result.exit_code == 0


async def test_a_stream_says_that_the_session_has_ended(session: ShellSession) -> None:
    async with session.exec_stream("echo out; exit 3") as stream:
        assert [chunk.data async for chunk in stream] == ["out\n"]
    assert (stream.result.exit_code, stream.result.session_ended) == (3, True)


async def test_background_jobs_hold_nothing_leak_nothing_and_live_on(session: ShellSession) -> None:
    talker = "while echo noise; echo noise >&2; do sleep 0.01; done"
    result = await session.exec(f"({talker}) & echo begun", timeout=15)
    assert result.stdout.startswith(("begun\n", "noise\n"))
    for _ in range(3):
        assert await out(session, "echo quiet; sleep 0.05") == "quiet\n"
    assert await out(session, "kill -0 $! && kill $!; wait 2>/dev/null; echo over") == "over\n"


async def test_wait_knows_the_jobs_of_earlier_commands(session: ShellSession) -> None:
    await out(session, "(exit 7) >/dev/null 2>&1 &")
    assert (await session.exec("wait $!", timeout=15)).exit_code == 7


async def test_a_timeout_kills_the_command_and_spares_earlier_jobs(
    box: Box, session: ShellSession
) -> None:
    await out(session, "sleep 1001 >/dev/null 2>&1 &")
    await out(session, "setsid sleep 1002 >/dev/null 2>&1 &")
    command = "echo part; sleep 1003 & setsid sleep 1004 & sleep 1005 | cat; echo no"
    result = await session.exec(command, timeout=0.3)
    assert (result.exit_code, result.timed_out, result.stdout) == (124, True, "part\n")
    assert result.stderr.endswith("smokebox: timed out after 0.3 s\n")
    left = sorted(line for line in processes(box) if line.startswith("sleep"))
    assert left == ["sleep 1001", "sleep 1002"]
    assert await out(session, "echo on") == "on\n"


STUCK = {
    "loop": "X=2; while :; do :; done",
    "ignored signals": "X=2; trap '' TERM INT 39; while :; do sleep 1; done",
    "stopped": "X=2; kill -STOP $$",
    "inside one builtin": "X=2; read -r line < <(sleep 1000)",
    "function": "f() { local X=3; sleep 1000; }; f",
    "child that does not end": "X=2; bash -c 'trap \"\" TERM; while :; do sleep 1; done'",
    "flood": "X=2; yes",
}


@pytest.mark.parametrize("what", STUCK)
async def test_a_timeout_keeps_the_session(
    session: ShellSession, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_command, "TERMINATE_SECONDS", 0.5)
    await out(session, "cd /tmp; X=1")
    result = await session.exec(STUCK[what], timeout=0.2)
    assert (result.exit_code, result.timed_out, result.session_ended) == (124, True, False)
    assert await out(session, "echo $PWD $X") in ("/tmp 1\n", "/tmp 2\n")


async def test_cancelling_kills_the_command_at_once(box: Box, session: ShellSession) -> None:
    await out(session, "cd /tmp")
    task = asyncio.create_task(session.exec("X=1; sleep 1006"))
    await eventually(lambda: "sleep 1006" in processes(box))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "sleep 1006" not in processes(box)
    assert await out(session, "echo $PWD $X") == "/tmp 1\n"


async def test_leaving_a_stream_kills_the_command(box: Box, session: ShellSession) -> None:
    async with session.exec_stream("echo one; sleep 1007") as stream:
        assert (await anext(stream)).data == "one\n"
    await eventually(lambda: "sleep 1007" not in processes(box))
    assert await out(session, "echo on") == "on\n"


async def test_a_shell_that_dies_between_commands_leaves_its_state(session: ShellSession) -> None:
    await out(session, "cd /tmp; X=1")
    await out(session, "(sleep 0.1; kill -9 $$) >/dev/null 2>&1 & disown")
    await asyncio.sleep(0.3)
    assert await out(session, "echo $PWD $X") == "/tmp 1\n"


async def test_what_is_said_in_the_name_of_the_shell_costs_the_session_alone(
    box: Box, session: ShellSession
) -> None:
    """Inside, the pipes of a session are no secret to the session itself."""
    victim = await box.sessions.create()
    folder = "$(dirname $(readlink /proc/$$/fd/255))"
    for attack in (
        "printf 'nonsense\\0' >$D/r; sleep 0.1",
        "(while :; do head -c 100000 /dev/zero >$D/r; done) >/dev/null 2>&1 & sleep 0.2",
        "(yes s0 | tr '\\n' '\\0' >$D/r) >/dev/null 2>&1 & sleep 0.2",
        "(cat $D/bash) >/dev/null 2>&1 & sleep 0.1",
        "(cat $D/o0 & cat $D/e0) >/dev/null 2>&1 & echo x",
        "(sleep 1 >$D/o0) & echo x",
        "rm -rf $D; echo x > $D/c; mkfifo $D/x; ls /run/smokebox",
    ):
        await session.exec(f"D={folder}; {attack}", timeout=5)
        assert await out(victim, "echo unharmed") == "unharmed\n"
        result = await session.exec("echo on", timeout=5)
        assert result.exit_code in (0, 124, 137)
    await box.sessions.delete("s")
    assert await out(await box.sessions.create("s"), "echo anew") == "anew\n"


async def test_other_users_do_not_see_the_pipes_of_a_session(
    box: Box, session: ShellSession
) -> None:
    if box.jail.owner.count == 1:
        pytest.skip("there are no other users")
    await out(session, "echo here")
    alice = await box.sessions.create(user="alice")
    assert await out(alice, "id -u; echo $HOME") == "1000\n/tmp\n"
    assert (await alice.exec("ls /run/smokebox")).exit_code == 2
    pid = (await out(session, "echo $$")).strip()
    assert (await alice.exec(f"readlink /proc/{pid}/fd/255 /proc/{pid}/cwd")).stdout == ""
    for root_too in (session, alice):
        refused = await root_too.exec("echo id > $(readlink /proc/$$/fd/255)")
        assert (refused.exit_code, refused.session_ended) == (1, False)


async def test_a_state_that_is_too_large_is_not_kept(
    box: Box, session: ShellSession, caplog: pytest.LogCaptureFixture
) -> None:
    await out(session, "small=1")
    await out(session, "big=$(head -c 5000000 /dev/zero | tr '\\0' x)")
    assert await out(session, "echo ${#big}") == "5000000\n"
    await box.sleep()
    assert "larger than" in caplog.text
    assert await out(session, "echo $small ${#big}") == "1 0\n"


@pytest.mark.parametrize("script", [b"exit 1", b"echo 'open", b"exec sleep 0", b"set -n"])
async def test_a_state_that_cannot_be_restored_leaves_the_directory(
    box: Box, session: ShellSession, script: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await out(session, "cd /tmp; LOST=1")
    await box.restart_engine()
    row = await box.record.get(SessionRow, "box", "s")
    assert row is not None
    broken = replace(row, state=SessionState(cwd="/tmp", script=script).pack())
    await box.record.write(put(broken))
    session = await box.sessions.get("s")
    assert await out(session, "echo $PWD $PATH [$LOST]") == "/tmp /usr/bin:/bin []\n"
    assert "could not be restored" in caplog.text


async def test_a_sandbox_without_bash_says_so(box: Box, session: ShellSession) -> None:
    box.shell = "/bin/nosuch"
    await box.sleep()
    result = await session.exec("echo hi")
    assert (result.exit_code, "nosuch" in result.stderr) == (127, True)
    box.shell = "/bin/sh"
    await box.sleep()
    with pytest.raises(Unsupported, match="bash"):
        await session.exec("echo hi")
