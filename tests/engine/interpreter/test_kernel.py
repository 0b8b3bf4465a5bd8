"""The Python kernel: display formats, figures, IPython and interrupts."""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING

import pytest

from engine.interpreter.kernel_process import KernelProcess, python_kernel
from smokebox.engine.interpreter.frames import KernelEnd, KernelOutput, KernelResult
from smokebox.types import CodeResult

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Simulates an image in which these libraries are not installed.
HIDE_LIBRARIES = "sys.modules.update(dict.fromkeys(['IPython', 'matplotlib', 'numpy']))"


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[KernelProcess]:
    with python_kernel(tmp_path) as kernel:
        yield kernel


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[KernelProcess]:
    """Run a kernel without IPython, matplotlib and NumPy."""
    with python_kernel(tmp_path, before=HIDE_LIBRARIES) as kernel:
        yield kernel


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("1 + 1", CodeResult(text="2", main=True)),
        ("'a'", CodeResult(text="'a'", main=True)),
        ("{'a': [1, None]}", CodeResult(text="{'a': [1, None]}", json={"a": [1, None]}, main=True)),
        ("[float('nan')]", CodeResult(text="[nan]", main=True)),
        ("(1, 2)", CodeResult(text="(1, 2)", main=True)),
        ("x = 5\nx", CodeResult(text="5", main=True)),
        ("if True:\n    5", None),
        ("None", None),
        ("5;", None),
        ("5  # not suppressed;", CodeResult(text="5", main=True)),
        ("'é';", None),
        ("", None),
        ("# comment", None),
        ("def f(): return 1", None),
        ("'\\ud800'", CodeResult(text="'\\ud800'", main=True)),
    ],
)
def test_last_expression_is_the_result(
    bare: KernelProcess, code: str, expected: CodeResult | None
) -> None:
    assert bare.run(code).results == ([] if expected is None else [expected])


def test_value_is_shown_in_every_format_it_offers(bare: KernelProcess) -> None:
    output = bare.run(
        "class Rich:\n"
        "    def __repr__(self): return 'plain'\n"
        "    def _repr_html_(self): return '<b>'\n"
        "    def _repr_markdown_(self): return '*m*'\n"
        "    def _repr_svg_(self): return '<svg/>'\n"
        "    def _repr_latex_(self): return '$x$'\n"
        "    def _repr_png_(self): return b'\\x89PNG'\n"
        "    def _repr_jpeg_(self): return b'\\xff\\xd8', {'width': 1}\n"
        "    def _repr_json_(self): return {'a': 1}\n"
        "    def _repr_javascript_(self): return 'alert()'\n"
        "    def _repr_pdf_(self): raise NotImplementedError\n"
        "Rich()"
    )
    assert output.results == [
        CodeResult(
            text="plain",
            html="<b>",
            markdown="*m*",
            svg="<svg/>",
            latex="$x$",
            png=b"\x89PNG",
            jpeg=b"\xff\xd8",
            json={"a": 1},
            javascript="alert()",
            main=True,
        )
    ]


def test_repr_mimebundle_is_passed_through(bare: KernelProcess) -> None:
    output = bare.run(
        "class Bundle:\n"
        "    def _repr_mimebundle_(self, include=None, exclude=None):\n"
        "        return {'text/plain': 'p', 'application/vnd.x+json': {'y': 1}}, {}\n"
        "display(Bundle(), 2)"
    )
    first, second = output.results
    assert (first.text, first.data) == ("p", {"application/vnd.x+json": {"y": 1}})
    assert (second.text, second.main) == ("2", False)


def test_failing_repr_is_an_error(bare: KernelProcess) -> None:
    output = bare.run("class Bad:\n    def __repr__(self): raise ValueError('no repr')\nBad()")
    assert output.error is not None
    assert (output.error.name, output.error.message) == ("ValueError", "no repr")
    assert bare.run("1").results[0].text == "1"


def test_mocks_are_shown_as_text_only(bare: KernelProcess) -> None:
    output = bare.run("from unittest.mock import MagicMock\nMagicMock(name='m')")
    assert output.error is None
    assert (output.results[0].text or "").startswith("<MagicMock name='m'")
    assert output.results[0].formats() == ("text",)


def test_long_texts_are_shortened_and_large_formats_omitted(bare: KernelProcess) -> None:
    [long] = bare.run("'x' * 3_000_000").results
    assert "characters left out here" in (long.text or "")
    assert len(long.text or "") < 1_100_000
    output = bare.run("class Big:\n    def _repr_png_(self): return bytes(20_000_000)\nBig()")
    assert output.results[0].png is None
    assert "image/png is too large" in (output.results[0].text or "")


def test_top_level_await_shares_one_event_loop(bare: KernelProcess) -> None:
    code = "import asyncio\ntask = asyncio.ensure_future(asyncio.sleep(0, 'done'))\nawait {}"
    assert bare.run(code.format("asyncio.sleep(0)")).error is None
    assert bare.run("await task").results[0].text == "'done'"


def test_interrupt_reaches_only_running_code(bare: KernelProcess, tmp_path: Path) -> None:
    bare.interrupt()
    assert bare.run("1").results[0].text == "1"
    bare.start("import time\nopen('started', 'w').close()\nwhile True: time.sleep(1000)")
    _wait_for(tmp_path / "started")
    bare.interrupt()
    output = bare.finish()
    assert output.error is not None
    assert (output.error.name, output.error.line) == ("KeyboardInterrupt", 3)
    assert "smokebox" not in output.error.traceback
    assert bare.run("2").results[0].text == "2"


def test_interrupts_at_any_moment_do_not_corrupt_frames(
    bare: KernelProcess, tmp_path: Path
) -> None:
    code = "open('started', 'w').close()\nwhile True: print('x' * 500)\n"
    for _ in range(20):
        bare.start(code)
        _wait_for(tmp_path / "started")
        (tmp_path / "started").unlink()
        bare.interrupt()
        output = bare.finish()
        assert output.error is not None
        assert output.error.name == "KeyboardInterrupt"
        assert set(output.stdout) <= {"x", "\n"}
    assert bare.run("'ok'").results[0].text == "'ok'"


def test_replaced_streams_are_restored_for_the_next_run(bare: KernelProcess) -> None:
    bare.run(
        "import sys, io, os\nsys.stdout = io.StringIO()\nsys.stderr.close()\nprint('not captured')"
    )
    assert bare.run("print('captured')").stdout == "captured\n"
    bare.run("import sys; sys.stdin.read(); del sys.stdout")
    assert bare.run("print('again')").stdout == "again\n"
    output = bare.run("input()")
    assert output.error is not None
    assert output.error.name == "EOFError"


def test_output_of_forked_children_is_captured(bare: KernelProcess) -> None:
    code = (
        "import multiprocessing as m\n"
        "p = m.get_context('fork').Process(target=print, args=('from a child',))\n"
        "p.start(); p.join(); p.exitcode"
    )
    output = bare.run(code)
    assert (output.stdout, output.results[0].text) == ("from a child\n", "0")


def test_forked_child_does_not_become_a_second_kernel(bare: KernelProcess) -> None:
    for code, status in (("5", 0), ("sys.exit(3)", 3), ("1 / 0", 1)):
        output = bare.run(
            "import os, sys\nif os.fork():\n    print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
            f"else:\n    print('child')\n    display(1)\n    {code}"
        )
        assert (output.error, output.results) == (None, [])
        assert output.stdout == f"child\n{status}\n"
    assert bare.run("'one'").results[0].text == "'one'"


def test_partial_lines_are_sent_on_display_flush_and_end(bare: KernelProcess) -> None:
    output = bare.run(
        "print('.', end='')\ndisplay(1)\nprint(',', end='', flush=True)\nprint('!', end='')"
    )
    assert [type(one) for one in output.frames] == [
        KernelOutput,
        KernelResult,
        KernelOutput,
        KernelOutput,
        KernelEnd,
    ]
    assert output.stdout == ".,!"


def test_shell_commands_and_pip_work_without_ipython(bare: KernelProcess) -> None:
    assert bare.run("for n in range(2):\n    !echo $((n + 1)); true").stdout == "1\n1\n"
    output = bare.run("!exit 3")
    assert output.stderr == "exit code 3\n"
    assert bare.run("%pip --version").stdout.startswith("pip ")
    broken = bare.run("%matplotlib inline")
    assert broken.error is not None
    assert broken.error.name == "SyntaxError"


def test_magics_use_ipython_when_installed(kernel: KernelProcess) -> None:
    assert kernel.run("x = 2\n%who_ls").error is None
    assert kernel.run("!echo hi").stdout == "hi\n"
    assert kernel.run("y = !echo there\ny[0]").results[0].text == "'there'"
    output = kernel.run("%%timeit -n1 -r1\nx + 1")
    assert "per loop" in output.stdout
    assert kernel.run("%%capture out\nprint('text')").stdout == ""
    assert kernel.run("out.stdout").results[0].text == "'text\\n'"
    assert kernel.run("get_ipython().__class__.__name__").results[0].text == "'InteractiveShell'"


def test_ipython_display_shows_results(kernel: KernelProcess) -> None:
    output = kernel.run(
        "from IPython.display import HTML, JSON, Markdown, Image, display\n"
        "display(HTML('<i>'))\ndisplay(JSON({'a': 1}), Markdown('*m*'))\nHTML('<b>')"
    )
    assert output.error is None
    assert [one.html for one in output.results] == ["<i>", None, None, "<b>"]
    assert output.results[1].json == {"a": 1}
    assert output.results[2].markdown == "*m*"
    assert output.results[3].main


def test_open_figures_are_shown_when_the_code_ends(kernel: KernelProcess) -> None:
    output = kernel.run(
        "import matplotlib.pyplot as plt\n"
        "plt.plot([1, 2, 3], [4, 5, 6], label='a')\nplt.title('T')\nplt.xlabel('X');"
    )
    assert output.error is None
    [figure] = output.results
    assert figure.png is not None
    assert figure.png.startswith(b"\x89PNG")
    assert struct.unpack(">II", figure.png[16:24])[0] > 100
    assert figure.chart == {
        "type": "line",
        "title": "T",
        "x_label": "X",
        "y_label": None,
        "elements": [{"label": "a", "points": [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]}],
    }
    assert kernel.run("plt.get_fignums()").results[0].text == "[]"


def test_show_displays_immediately_without_a_warning(kernel: KernelProcess) -> None:
    output = kernel.run(
        "import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [1, 2])\nplt.show()\nprint('after')"
    )
    kinds = [type(one) for one in output.frames]
    assert kinds == [KernelResult, KernelOutput, KernelEnd]
    assert output.stderr == ""
    chart = output.results[0].chart or {}
    assert chart["type"] == "bar"
    assert [(one["label"], one["value"]) for one in chart["elements"]] == [("a", 1.0), ("b", 2.0)]


def test_chart_types_are_recognized(kernel: KernelProcess) -> None:
    output = kernel.run(
        "import matplotlib.pyplot as plt\n"
        "figure, (a, b) = plt.subplots(1, 2)\nfigure.suptitle('both')\n"
        "a.scatter([1, 2], [3, float('nan')])\nb.pie([1, 3], labels=['x', 'y'])\nfigure"
    )
    assert output.error is None
    chart = output.results[0].chart or {}
    assert (chart["type"], chart["title"]) == ("superchart", "both")
    scatter, pie = chart["elements"]
    assert (scatter["type"], pie["type"]) == ("scatter", "pie")
    assert [one["label"] for one in pie["elements"]] == ["x", "y"]


def test_mplbackend_of_the_environment_is_kept(tmp_path: Path) -> None:
    with python_kernel(tmp_path, env={"MPLBACKEND": "agg"}) as kernel:
        output = kernel.run("import matplotlib; matplotlib.get_backend()")
    assert (output.results[0].text or "").lower() == "'agg'"


def test_kernel_adds_no_names_to_user_globals(bare: KernelProcess) -> None:
    output = bare.run("sorted(name for name in globals() if not name.startswith('__'))")
    assert output.results[0].text == "[]"
    assert bare.run("__name__, __import__('sys').argv").results[0].text == "('__main__', [''])"
    assert bare.run("import sys; sys.path[0]").results[0].text == "''"


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 15
    while not path.exists():
        assert time.monotonic() < deadline, "the code did not start"
        time.sleep(0.005)
