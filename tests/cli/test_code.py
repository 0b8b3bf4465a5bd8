"""`smokebox code`: code in a sandbox."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

from cli.served import until
from cli.terminal import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path

    from cli.served import Served


def test_variables_persist_and_values_are_printed(served: Served, box: str) -> None:
    assert served.says("code", box, "-c", "x = 6\nprint('hi')") == "hi\n"
    assert served.says("code", box, "-c", "x * 7") == "42\n"


def test_code_is_read_from_a_file_or_standard_input(
    served: Served, box: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(os.environ['A'])\n")
    assert served.says("code", box, str(script), "-e", "A=x y") == "x y\n"
    assert served.says("code", box, "-", stdin="'typed'") == "'typed'\n"
    for arguments in ((), (str(script), "-c", "1")):
        done = served.run("code", box, *arguments)
        assert (done.returncode, "either FILE or" in done.stderr) == (2, True)
    (tmp_path / "bytes").write_bytes(b"\xff")
    assert "not UTF-8" in served.run("code", box, str(tmp_path / "bytes")).stderr
    assert "No such file" in served.run("code", box, str(tmp_path / "none.py")).stderr


def test_language_is_an_option_or_the_suffix_of_the_file(
    served: Served, box: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.ts"
    script.write_text("const n: number = 6\nconsole.log(n * 7)\n")
    assert served.says("code", box, str(script)) == "42\n"
    assert served.says("code", box, "-l", "typescript", "-c", "n + 1") == "7\n"
    assert served.says("code", box, "-l", "javascript", "-c", "typeof n") == "'undefined'\n"


def test_exception_is_printed_with_exit_code_1(served: Served, box: str) -> None:
    done = served.run("code", box, "-c", "print('before')\n1 / 0")
    assert (done.returncode, done.stdout) == (1, "before\n")
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_timeout_exits_with_124(served: Served, box: str) -> None:
    done = served.run("code", box, "-t", "0.3", "-c", "import time; time.sleep(1000)")
    assert (done.returncode, done.stdout) == (124, "")
    assert "longer than 0.3 s" in done.stderr


def test_json_has_output_results_and_error(served: Served, box: str) -> None:
    code = "print('out')\nclass P:\n    def _repr_png_(self): return b'\\x89'\nP()"
    told = json.loads(served.says("code", box, "--json", "-c", code))
    assert (told["stdout"], told["results"][0]["png"], told["error"]) == ("out\n", "iQ==", None)
    done = served.run("code", box, "-c", "P()")
    assert done.stderr == "[png, 1 bytes: use --json to get it]\n"


def test_ctrl_c_interrupts_code_and_keeps_variables(served: Served, box: str) -> None:
    code = "y = 'kept'\nopen('begun', 'w').close()\nimport time\nwhile True: time.sleep(0.01)"
    with served.started("code", box, "-c", code) as process:
        until(lambda: served.run("exec", box, "test -e begun").returncode == 0)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    assert served.says("code", box, "-c", "y") == "'kept'\n"


def test_context_is_chosen_by_id_and_must_exist(served: Served, box: str) -> None:
    done = served.run("code", box, "--context", "ghost", "-c", "1")
    assert (done.returncode, "has no code context 'ghost'" in done.stderr) == (1, True)
    assert served.run("code", "nobody", "-c", "1").returncode == 1
    assert served.says("code", "somebody", "--create", "-c", "1") == "1\n"
    served.says("rm", "somebody")
