"""The JavaScript and TypeScript kernel, run by Deno and Node."""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest
from deno import find_deno_bin  # type: ignore[import-untyped]

from engine.interpreter.kernel_process import KernelProcess, script_kernel
from smokebox.engine.interpreter.frames import KernelOutput, KernelResult
from smokebox.types import CodeResult

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engine.interpreter.kernel_process import CodeOutput

DENO = (os.fspath(find_deno_bin()), "run", "-A", "-q", "--no-prompt")
NODE = ("node", "--no-warnings")


@pytest.fixture(params=["deno", "node"])
def kernel(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KernelProcess]:
    if request.param == "node" and shutil.which("node") is None:
        pytest.skip("Node is not installed")
    with script_kernel(tmp_path, *(DENO if request.param == "deno" else NODE)) as kernel:
        yield kernel


@pytest.fixture
def ts_kernel(tmp_path: Path) -> Iterator[KernelProcess]:
    with script_kernel(tmp_path, *DENO, language="typescript") as kernel:
        yield kernel


def value(output: CodeOutput) -> str | None:
    assert output.error is None
    assert len(output.results) == 1
    return output.results[0].text


def test_names_persist_and_can_be_redeclared(kernel: KernelProcess) -> None:
    assert value(kernel.run("const x = 1; x + 1")) == "2"
    assert value(kernel.run("const x = 5; let y = 1; x + y;")) == "6"
    assert kernel.run("function f() { return x * 2 }; class Q {}").results == []
    assert value(kernel.run("f() + _")) == "16"
    assert value(kernel.run("new Q()")) == "Q {}"


def test_values_are_shown_as_text_and_json(kernel: KernelProcess) -> None:
    cases: list[tuple[str, str | None, Any]] = [
        ("'s'", "'s'", None),
        ("5n", "5n", None),
        ("NaN", "NaN", None),
        ("-0", "-0", None),
        ("null", "null", None),
        ("[1, 'a']", "[ 1, 'a' ]", [1, "a"]),
        ("({a: {b: [1]}})", "{ a: { b: [ 1 ] } }", {"a": {"b": [1]}}),
        ("new Map([[1, 2]])", "Map(1) { 1 => 2 }", None),
        ("Symbol('x')", "Symbol(x)", None),
        ("const o = {}; o.self = o; Object.keys(o)", "[ 'self' ]", ["self"]),
    ]
    for code, text, json in cases:
        output = kernel.run(code)
        assert output.results == [CodeResult(text=text, json=json, main=True)], code
    assert kernel.run("undefined").results == []
    assert kernel.run("// comment").results == []
    assert kernel.run("o").results[0].json is None


def test_output_and_results_keep_their_order(kernel: KernelProcess) -> None:
    output = kernel.run(
        "console.log('a', {b: 1}); display('shown'); console.error('e');"
        "console.info('%s-%d', 'i', 5);"
        "process.stdout.write('raw'); process.stdout.write(new Uint8Array([0xe2, 0x82, 0xac]));"
    )
    assert (output.stdout, output.stderr) == ("a { b: 1 }\ni-5\nraw€", "e\n")
    kinds = [type(frame) for frame in output.frames]
    assert kinds[:3] == [KernelOutput, KernelResult, KernelOutput]
    grouped = kernel.run("console.group('g'); console.log('in\\nside'); console.groupEnd()")
    assert grouped.stdout == "g\n  in\n  side\n"


def test_display_accepts_mime_bundles(kernel: KernelProcess) -> None:
    output = kernel.run(
        "display({'text/html': '<b>'}, {raw: true});"
        "const shown = Symbol.for('Jupyter.display');"
        "const later = {async [shown]() { return {'text/markdown': '*m*'} }};"
        "display(later);"
        "({[Symbol.for('Jupyter.display')]: () => ({'image/png': new Uint8Array([137, 80])})})"
    )
    assert output.results == [
        CodeResult(html="<b>"),
        CodeResult(markdown="*m*"),
        CodeResult(png=b"\x89P", main=True),
    ]


def test_errors_have_a_line_and_no_kernel_frames(kernel: KernelProcess) -> None:
    error = kernel.run("function g() {\n  throw new TypeError('no')\n}\ng()").error
    assert error is not None
    assert (error.name, error.message, error.line) == ("TypeError", "no", 2)
    assert error.traceback.startswith("TypeError: no\n    at g (")
    assert "kernel" not in error.traceback
    broken = kernel.run("let fine = 1\nlet broken = = 2").error
    assert broken is not None
    assert (broken.name, broken.line) == ("SyntaxError", 2)
    thrown = kernel.run("throw {code: 7}").error
    assert thrown is not None
    assert (thrown.name, thrown.message) == ("Uncaught", "{ code: 7 }")
    awaited = kernel.run("await Promise.reject(new RangeError('out of range'))").error
    assert awaited is not None
    assert awaited.name == "RangeError"
    assert value(kernel.run("'ok'")) == "'ok'"


def test_import_and_export_work_as_in_a_module(kernel: KernelProcess, tmp_path: Path) -> None:
    (tmp_path / "local.mjs").write_text("export const a = 3; export default 4;\n")
    code = (
        "import os, { type as kind } from 'node:os'\nimport * as path from \"node:path\";\n"
        "import { join as j } from 'node:path'\nimport other, { a } from './local.mjs'\n"
        "[os.type() === kind(), path.join('a', 'b'), j('c', 'd'), a, other]"
    )
    assert kernel.run(code).results[0].json == [True, "a/b", "c/d", 3, 4]
    assert value(kernel.run("const m = await import('node:path'); m.basename('/x/y')")) == "'y'"
    assert value(kernel.run("export const out = 9\nout")) == "9"
    assert value(kernel.run("require('node:path').extname('a.js')")) == "'.js'"
    missing = kernel.run("import x from './none.mjs'").error
    assert missing is not None


def test_background_errors_go_to_stderr_only(kernel: KernelProcess) -> None:
    output = kernel.run(
        "setTimeout(() => { throw new Error('late') }, 1); Promise.reject('lost');"
        "await new Promise(done => setTimeout(done, 100)); 'ok'"
    )
    assert value(output) == "'ok'"
    assert output.stderr.count("(in the background)") == 2
    assert "late" in output.stderr
    assert "lost" in output.stderr


def test_exit_ends_the_code_but_not_the_context(kernel: KernelProcess) -> None:
    error = kernel.run("const kept = 1; process.exit(3)").error
    assert error is not None
    assert (error.name, error.message) == ("Exit", "3")
    assert value(kernel.run("kept")) == "1"


def test_env_of_one_run_does_not_reach_the_next(kernel: KernelProcess) -> None:
    assert value(kernel.run("process.env.A", A="x y")) == "'x y'"
    assert kernel.run("process.env.A").results == []


def test_interrupt_ends_a_pending_await(kernel: KernelProcess, tmp_path: Path) -> None:
    kernel.interrupt()
    kernel.start(
        "require('node:fs').writeFileSync('started', ''); await new Promise(() => {}); 'never'"
    )
    deadline = time.monotonic() + 15
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline, "the code did not start"
        time.sleep(0.005)
    kernel.interrupt()
    error = kernel.finish().error
    assert error is not None
    assert error.name == "Interrupted"
    assert value(kernel.run("'next'")) == "'next'"


def test_long_texts_are_shortened_and_large_formats_omitted(kernel: KernelProcess) -> None:
    [long] = kernel.run("'x'.repeat(3_000_000)").results
    assert len(long.text or "") < 1_200_000
    [big] = kernel.run("display({'text/html': 'x'.repeat(20_000_000)}, {raw: true})").results
    assert (big.html, "text/html is too large" in (big.text or "")) == (None, True)


def test_lone_surrogates_do_not_break_a_frame(kernel: KernelProcess) -> None:
    output = kernel.run("console.log('\\ud800'); '\\udc00'")
    assert output.stdout == "\ufffd\n"


def test_typescript_types_are_removed(ts_kernel: KernelProcess) -> None:
    assert (
        value(ts_kernel.run("interface A { a: number }\nconst v: A = {a: 1}\nv.a as number")) == "1"
    )
    assert value(ts_kernel.run("function f<T>(x: T): T { return x }\nf<string>('g')")) == "'g'"
    assert value(ts_kernel.run("enum E { X = 2, Y }\nE.Y")) == "3"
    assert value(ts_kernel.run("class P { constructor(public n: number) {} }\nnew P(4).n")) == "4"
    assert value(
        ts_kernel.run("import type { Stats } from 'node:fs'\nimport os from 'node:os'\nos.EOL")
    )
    failed = ts_kernel.run("const a: number = 1\nconst b: string = (").error
    assert failed is not None
    assert (failed.name, failed.line) == ("SyntaxError", 2)
    thrown = ts_kernel.run("type T = string\n\nthrow new Error('here' as T)").error
    assert thrown is not None
    assert thrown.line == 3
