"""Hostile scripts end by a limit or harmlessly, and the sandbox stays usable."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

import pytest

from smokebox import virtual
from smokebox.sandbox.virtual import VirtualLimits

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = VirtualLimits(commands=20_000, loop_iterations=20_000, memory=8 << 20, wall_time=1.5)
TEXT = "a" * 40 + "b"

STOPPED = {
    "a loop": "while :; do :; done",
    "a loop in a pipe": "while :; do echo x; done | cat > /dev/null",
    "a loop in a substitution": "x=$(while :; do :; done)",
    "a loop in another bash": "bash -c 'while :; do :; done'",
    "a loop behind exec": "exec bash -c 'while :; do :; done'",
    "a string that doubles": "x=a; while :; do x=$x$x; done",
    "an array that grows": "declare -A m; while :; do m[$((i++))]=x; done",
    "eval that evaluates itself": 'e=\'eval "$e"\'; eval "$e"',
    "a function that calls itself": "f() { f; }; f",
    "a file that sources itself": "echo '. ./s' > s; . ./s",
    "nested substitutions": "$(" * 200 + "echo" + ")" * 200,
    "a brace range": "echo {1..100000000}",
    "a pipeline of 500": "true" + " | cat" * 500,
    "dd without end": "dd if=/dev/zero of=f bs=1M count=100000",
    "files without end": "while :; do echo x > f$((i++)); done",
    "directories without end": "while :; do mkdir d; cd d; done",
    "a file without end": "while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx >> f; done",
    "output without end": "while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done",
    "yes": "yes > /dev/null",
    "sleep": "sleep infinity",
    "sleep within timeout": "timeout 1000 sleep 1000",
    "sleepers": "for i in {1..40}; do sleep 1000 & done; wait",
}

REFUSED_OR_HARMLESS = {
    "a fork bomb": ":(){ :|:& };:",
    "a brace product": "echo " + "{a,b}" * 30 + " | wc -c",
    "awk without end": "awk 'BEGIN { while (1) {} }'",
    "awk that grows": "awk 'BEGIN { x = \"a\"; while (1) x = x x }'",
    "awk that calls itself": "awk 'function f(n) { return f(n + 1) } BEGIN { f(1) }'",
    "sed without end": "echo x | sed ':a;s/$/xx/;ba' | wc -c",
    "jq without end": "jq -n 'def f: f; f'",
    "jq that grows": "jq -n '[range(1e9)] | length'",
    "jq nested deep": "jq -n 'reduce range(200000) as $_ ([]; [.]) | tojson' | wc -c",
    "jq in parentheses": "jq -n \"$(printf '(%.0s' {1..5000})1$(printf ')%.0s' {1..5000})\"",
    "JSON nested deep": "printf '[%.0s' {1..9000} | jq .",
    "SQL without end": "sqlite3 :memory: 'with recursive c(x) as "
    "(select 1 union all select x + 1 from c) select count(*) from c'",
    "python without end": "python3 -c 'while True: pass'",
    "python that grows": "python3 -c 'x = [1]\nwhile True: x = x + x'",
    "python that calls itself": "python3 -c 'def f(): return f()\nf()'",
    "arithmetic in parentheses": "echo $((" + "(" * 3000 + "1" + ")" * 3000 + "))",
    "a regex in grep": f"echo {TEXT} | grep -E '(a+)+$'",
    "a regex in grep -P": f"echo {TEXT} | grep -P '^(a*)*\\1$'",
    "a regex in sed": f"echo {TEXT} | sed -E 's/(a|a)*$/x/'",
    "a regex in awk": f"echo {TEXT} | awk '/^(a+)+$/'",
    "a regex in [[ ]]": f"[[ {TEXT} =~ ^(a+)+$ ]]",
    "a pattern in [[ ]]": f"[[ {TEXT} == {'*a' * 30}*c ]]",
    "a regex too large": "echo a | grep -E 'a{1000}{1000}{1000}'",
    "/dev/zero": "cat /dev/zero | wc -c",
    "/dev/urandom": "base64 /dev/urandom | wc -c",
    "seq": "seq 1000000000 | tail -1",
    "a printf that is too wide": "printf '%999999999d' 1 | wc -c",
    "a file that is too large": "truncate -s 100G f",
    "a name that is too long": "touch $(printf 'a%.0s' {1..5000})",
    "symlinks in a circle": "ln -s a b; ln -s b a; cat a; cd a",
    "a trap in a trap": "trap 'kill $$' TERM; kill -TERM $$",
    "a pipe without a writer": "mkfifo p; cat p",
    "a gzip bomb": "head -c 1000000 /dev/zero | gzip > z; cat z z z z | gunzip | wc -c",
    "make that makes itself": "printf 'a:\\n\\tmake a\\n' > Makefile; make a",
    "kill for everyone": "kill -9 -1; kill -9 1",
}


async def _run(script: str) -> int:
    """Run the script and check that the sandbox still works."""
    async with virtual(limits=LIMITS, python=True) as sandbox:
        result = await sandbox.exec(script)
        assert (await sandbox.exec("echo alive")).stdout == "alive\n"
        return result.exit_code


@pytest.mark.parametrize("name", STOPPED)
async def test_hostile_scripts_hit_a_limit(name: str) -> None:
    assert await _run(STOPPED[name]) in (2, 124, 126)


@pytest.mark.parametrize("name", REFUSED_OR_HARMLESS)
async def test_hostile_scripts_terminate(name: str) -> None:
    await _run(REFUSED_OR_HARMLESS[name])


@pytest.mark.parametrize(
    "script",
    [
        "cat {file}",
        "cat ../../../../../../../..{file}",
        "ln -s {file} l; cat l",
        "ln -s / root; cat root{file}",
        "cat < {file}",
        ". {file}",
        "cp {file} here; cat here",
        "tar cf - {file}",
        "find {file}",
        "python3 -c 'print(open(\"{file}\").read())'",
        "sqlite3 {file} .schema; sqlite3 :memory: \"attach '{file}' as x\"",
        "awk '{{print}}' {file}; sed p {file}; grep . {file}; jq -R . {file}",
        "curl file://{file}; wget -O - file://{file}",
        "cat /proc/1/root{file} /proc/self/cwd{file}",
    ],
)
async def test_files_of_the_host_are_out_of_reach(tmp_path: Path, script: str) -> None:
    file = tmp_path / "secret"
    file.write_text("host-secret")
    result = await virtual(python=True).exec(script.replace("{{", "{").replace("{file}", str(file)))
    assert "host-secret" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    "script",
    [
        "cat /proc/self/environ /proc/1/environ",
        "env; printenv; export -p; declare -p; set",
        "python3 -c 'import os; print(os.environ)'",
        "echo $SMOKEBOX_TEST_SECRET; printenv SMOKEBOX_TEST_SECRET",
        "awk 'BEGIN { for (k in ENVIRON) print ENVIRON[k] }'; jq -n env",
    ],
)
async def test_environment_of_the_host_is_out_of_reach(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMOKEBOX_TEST_SECRET", "host-secret")
    result = await virtual(python=True).exec(script)
    assert "host-secret" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    "script",
    [
        "cat < /dev/tcp/127.0.0.1/{port}",
        "exec 3<>/dev/tcp/127.0.0.1/{port}; cat <&3",
        "curl -s http://127.0.0.1:{port}/; wget -qO- http://127.0.0.1:{port}/",
        "http GET http://127.0.0.1:{port}/",
        "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}))'",
    ],
)
async def test_network_is_out_of_reach(script: str) -> None:
    connected = asyncio.Event()
    server = await asyncio.start_server(lambda r, w: connected.set(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        await virtual(python=True).exec(script.replace("{port}", str(port)), timeout=5)
        await asyncio.sleep(0.05)
    assert not connected.is_set()


@pytest.mark.parametrize("script", ["/bin/ls /", "/usr/bin/id", sys.executable, "bash -c /bin/ps"])
async def test_programs_of_the_host_do_not_run(script: str) -> None:
    pid = os.getpid()
    result = await virtual().exec(f"{script}; ps; kill -9 {pid}")
    assert str(pid) not in result.stdout


MEMORY_EATERS = [
    "while :; do cat big; done",
    "while :; do cat big; done > /dev/null",
    "x=$(while :; do cat big; done)",
    "while :; do cat big >&2; done",
]


@pytest.mark.parametrize("script", MEMORY_EATERS)
async def test_discarded_output_counts_against_the_limit(script: str) -> None:
    limits = VirtualLimits(process_growth=100 << 20)
    async with virtual(files={"big": "x" * 1_000_000}, limits=limits) as sandbox:
        result = await sandbox.exec(script, timeout=15)
        assert (result.exit_code, "VirtualLimits.process_growth" in result.stderr) == (126, True)
        assert (await sandbox.exec("echo alive")).stdout == "alive\n"
