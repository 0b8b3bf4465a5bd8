"""`smokebox code`: code in a sandbox."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

from cli.command_line import wait_until
from cli.terminal import TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

    from cli.command_line import CommandLine


def test_variables_persist_and_values_are_printed(cli: CommandLine, sandbox: str) -> None:
    assert cli.output("code", sandbox, "-c", "x = 6\nprint('hi')") == "hi\n"
    assert cli.output("code", sandbox, "-c", "x * 7") == "42\n"


def test_code_is_read_from_a_file_or_standard_input(
    cli: CommandLine, sandbox: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(os.environ['A'])\n")
    assert cli.output("code", sandbox, str(script), "-e", "A=x y") == "x y\n"
    assert cli.output("code", sandbox, "-", stdin="'typed'") == "'typed'\n"
    for arguments in ((), (str(script), "-c", "1")):
        done = cli.run("code", sandbox, *arguments)
        assert (done.returncode, "either FILE or" in done.stderr) == (2, True)
    (tmp_path / "bytes").write_bytes(b"\xff")
    assert "not UTF-8" in cli.run("code", sandbox, str(tmp_path / "bytes")).stderr
    assert "No such file" in cli.run("code", sandbox, str(tmp_path / "none.py")).stderr


def test_language_is_an_option_or_the_suffix_of_the_file(
    cli: CommandLine, sandbox: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.ts"
    script.write_text("const n: number = 6\nconsole.log(n * 7)\n")
    assert cli.output("code", sandbox, str(script)) == "42\n"
    assert cli.output("code", sandbox, "-l", "typescript", "-c", "n + 1") == "7\n"
    assert cli.output("code", sandbox, "-l", "javascript", "-c", "typeof n") == "'undefined'\n"


def test_exception_is_printed_with_exit_code_1(cli: CommandLine, sandbox: str) -> None:
    done = cli.run("code", sandbox, "-c", "print('before')\n1 / 0")
    assert (done.returncode, done.stdout) == (1, "before\n")
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_timeout_exits_with_124(cli: CommandLine, sandbox: str) -> None:
    done = cli.run("code", sandbox, "-t", "0.3", "-c", "import time; time.sleep(1000)")
    assert (done.returncode, done.stdout) == (124, "")
    assert "longer than 0.3 s" in done.stderr


def test_json_has_output_results_and_error(cli: CommandLine, sandbox: str) -> None:
    code = "print('out')\nclass P:\n    def _repr_png_(self): return b'\\x89'\nP()"
    output = json.loads(cli.output("code", sandbox, "--json", "-c", code))
    assert (output["stdout"], output["results"][0]["png"], output["error"]) == (
        "out\n",
        "iQ==",
        None,
    )
    done = cli.run("code", sandbox, "-c", "P()")
    assert done.stderr == "[png, 1 bytes: use --json to get it]\n"


def test_ctrl_c_interrupts_code_and_keeps_variables(cli: CommandLine, sandbox: str) -> None:
    code = "y = 'kept'\nopen('started', 'w').close()\nimport time\nwhile True: time.sleep(0.01)"
    with cli.start("code", sandbox, "-c", code) as process:
        wait_until(lambda: cli.run("exec", sandbox, "test -e started").returncode == 0)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT) == 130
    assert cli.output("code", sandbox, "-c", "y") == "'kept'\n"


def test_context_is_chosen_by_id_and_must_exist(cli: CommandLine, sandbox: str) -> None:
    done = cli.run("code", sandbox, "--context", "ghost", "-c", "1")
    assert (done.returncode, "has no code context 'ghost'" in done.stderr) == (1, True)
    assert cli.run("code", "missing", "-c", "1").returncode == 1
    assert cli.output("code", "created", "--create", "-c", "1") == "1\n"
    cli.output("rm", "created")
