"""Commands that continue on the next line."""

from __future__ import annotations

import pytest

from smokebox.cli.shell.input import unfinished


@pytest.mark.parametrize(
    "text",
    [
        "echo 'a",
        'echo "a',
        "echo a \\",
        "echo $(ls",
        "echo `ls",
        "for i in 1 2; do",
        "if true; then",
        "case x in",
        "f() {",
        "( echo a",
        "[[ -n x",
        "a &&",
        "a ||",
        "a |",
        "x=(1 2",
        "cat <<END",
        "cat <<'END'\n$x",
        "cat <<-END\n\tx",
        "cat <<A <<B\na\nA\nb",
    ],
)
def test_waits_for_more(text: str) -> None:
    assert unfinished(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "echo a",
        "echo 'a' \"b\"",
        "echo a \\\\",
        "echo it # isn't",
        "for i in 1 2; do\necho $i\ndone",
        "cat <<END\nit's )\nEND",
        "cat <<A <<B\na\nA\nb\nB",
        "x=(1 2)",
        "echo )",
        "done",
        "fi",
    ],
)
def test_is_ready_to_run(text: str) -> None:
    assert not unfinished(text)
