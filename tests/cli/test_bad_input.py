"""Bad input to commands that use a server: one line, a hint, and the right exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cli.command_line import CommandLine

CASES = [
    (1, ["exec", "missing", "true"], "there is no sandbox 'missing'"),
    (1, ["sh", "missing", "-c", "true"], "there is no sandbox 'missing'"),
    (1, ["info", "missing"], "there is no sandbox 'missing'"),
    (1, ["stats", "missing"], "there is no sandbox 'missing'"),
    (1, ["sleep", "missing"], "there is no sandbox 'missing'"),
    (1, ["wake", "missing"], "there is no sandbox 'missing'"),
    (1, ["rm", "missing"], "there is no sandbox 'missing'"),
    (1, ["ps", "missing"], "there is no sandbox 'missing'"),
    (1, ["start", "missing", "true"], "there is no sandbox 'missing'"),
    (1, ["logs", "missing", "p"], "there is no sandbox 'missing'"),
    (1, ["kill", "missing", "p"], "there is no sandbox 'missing'"),
    (1, ["cp", "missing:a", "."], "there is no sandbox 'missing'"),
    (2, ["create", "Big_Id"], "Big_Id"),
    (2, ["create", "a/b"], "a/b"),
    (2, ["create", "x", "--label", "novalue"], "--label takes NAME=VALUE, not 'novalue'"),
    (2, ["create", "x", "--label", "BAD NAME=1"], "BAD NAME"),
    (2, ["create", "x", "--env", "=1"], "--env takes NAME=VALUE, not '=1'"),
    (2, ["create", "x", "--env", "1A=1"], "not the name of an environment variable"),
    (2, ["create", "x", "--limits", "huge"], "there is no instance type 'huge'"),
    (2, ["create", "x", "--limits", "memory=5"], "memory is at least"),
    (2, ["create", "x", "--limits", "memory"], "there is no instance type 'memory'"),
    (2, ["create", "x", "--limits", "wings=2"], "'wings'"),
    (2, ["create", "x", "--limits", "memory=1GiB,cpu"], "--limits takes NAME=VALUE, not 'cpu'"),
    (2, ["create", "x", "--sleep-after", "soon"], "--sleep-after takes a duration"),
    (2, ["create", "x", "--cwd", "relative"], "absolute path, not 'relative'"),
    (1, ["create", "x", "--image", "none-such"], "none-such"),
    (2, ["create", "x", "--tier", "paper"], "paper"),
    (2, ["ls", "--label", "novalue"], "--label takes NAME=VALUE, not 'novalue'"),
    (2, ["ls", "--status", "tired"], "tired"),
    (2, ["exec"], "Missing argument 'ID'"),
    (2, ["exec", "BOX"], "Missing argument 'COMMAND...'"),
    (2, ["exec", "BOX", "-t", "-1", "true"], "positive number of seconds"),
    (2, ["exec", "BOX", "-t", "soon", "true"], "soon"),
    (1, ["exec", "BOX", "-w", "/missing", "true"], "/missing"),
    (1, ["exec", "BOX", "-s", "missing", "true"], "missing"),
    (2, ["rm"], "rm takes IDs of sandboxes, or --all"),
    (2, ["rm", "x", "--all"], "rm takes IDs of sandboxes, or --all"),
    (2, ["kill", "BOX"], "kill takes IDs of processes, or --all"),
    (1, ["kill", "BOX", "missing"], "has no process 'missing'"),
    (2, ["kill", "BOX", "--all", "-s", "SIGNONE"], "SIGNONE"),
    (1, ["logs", "BOX", "missing"], "has no process 'missing'"),
    (2, ["logs", "BOX"], "logs takes the ID of a sandbox and of a process"),
    (2, ["cp", "a", "b"], "neither side of cp is in a sandbox"),
    (2, ["cp", "BOX:a", "other:b"], "not between two"),
    (2, ["cp", "-", "-"], "neither side of cp is in a sandbox"),
    (1, ["cp", "BOX:/missing", "."], "no such file or directory: /missing"),
    (1, ["cp", "BOX:/missing", "-"], "no such file or directory: /missing"),
    (1, ["cp", "BOX:/etc", "-"], "directory"),
    (1, ["cp", "/no/such/file", "BOX:"], "no such file or directory: /no/such/file"),
    (1, ["cp", "BOX:/etc/passwd", "/no/such/folder/x"], "/no/such/folder"),
    (2, ["keys", "create"], "--name"),
    (2, ["keys", "create", "--name", "x", "--expires", "never"], "--expires takes a duration"),
    (2, ["keys", "create", "--name", "x", "--prefix", "_"], "'_'"),
    (1, ["keys", "revoke", "missing"], "there is no key 'missing'"),
    (2, ["completion", "tcsh"], "tcsh"),
]


@pytest.mark.parametrize(("code", "arguments", "message"), CASES)
def test_bad_input_is_one_line_and_a_hint(
    cli: CommandLine, unchanged: str, code: int, arguments: list[str], message: str
) -> None:
    words = [word.replace("BOX", unchanged) for word in arguments]
    done = cli.run(*words)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    line, *hint = done.stderr.splitlines()
    assert line.startswith("smokebox: ")
    assert message in line
    assert len(hint) <= 1


@pytest.fixture(scope="module")
def unchanged(cli: CommandLine) -> str:
    """Yield a sandbox that none of these tests changes."""
    return cli.output("create", "unchanged").strip()
