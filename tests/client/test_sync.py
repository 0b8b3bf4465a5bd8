"""Facade without `await`: the same names, and the same cleanup."""

from __future__ import annotations

import ast
import inspect
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, ClassVar

import pytest

from client.sync_stub import STUB, stub
from smokebox import sync
from smokebox.errors import InvalidOption, NotFound
from smokebox.sync.facade import RENAMED, Facade

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from client.server_process import ServerProcess

FACADES = Facade.__subclasses__()


@pytest.fixture
def client(server: ServerProcess) -> sync.Client:
    return sync.connect(server.url)


@pytest.fixture
def sandbox(client: sync.Client) -> Iterator[sync.Sandbox]:
    with client.create() as sandbox:
        yield sandbox


@pytest.mark.parametrize("facade", FACADES, ids=lambda one: str(one.__name__))
def test_facade_has_every_method_and_parameter(facade: type[Facade]) -> None:
    for name, member in inspect.getmembers(facade._kind, inspect.isfunction):
        if name.startswith("_") and name not in RENAMED:
            continue
        here = getattr(facade, RENAMED.get(name, name))
        if not name.startswith("_"):
            assert inspect.signature(here) == inspect.signature(member)


def test_stub_matches_the_async_classes() -> None:
    hint = "run `PYTHONPATH=tests python tests/client/sync_stub.py`"
    assert _definitions(STUB.read_text()) == _definitions(stub()), hint


def test_exec_returns_the_result(sandbox: sync.Sandbox) -> None:
    result = sandbox.exec("echo hi; exit 3")
    assert (result.stdout, result.exit_code) == ("hi\n", 3)
    assert sandbox.run("printf", ["%s", "a b"]).stdout == "a b"


def test_exec_stream_is_an_iterator(sandbox: sync.Sandbox) -> None:
    with sandbox.exec_stream("echo one; echo two >&2; exit 4") as stream:
        text = "".join(chunk.data for chunk in stream)
    assert sorted(text.split()) == ["one", "two"]
    assert stream.exit_code == 4


def test_closing_a_stream_kills_its_command(sandbox: sync.Sandbox) -> None:
    with sandbox.exec_stream("echo go; exec sleep 987") as stream:
        assert next(stream).data == "go\n"
    deadline = time.monotonic() + 5
    while sandbox.exec("pgrep -f 'sleep 98[7]'").exit_code == 0:
        assert time.monotonic() < deadline


def test_handles_are_wrapped_and_unwrapped(sandbox: sync.Sandbox) -> None:
    session = sandbox.create_session("main")
    assert isinstance(session, sync.ShellSession)
    session.exec("cd /tmp")
    assert sandbox.exec("pwd", session=session).stdout == "/tmp\n"
    assert [one.id for one in sandbox.list_sessions()] == ["main"]
    sandbox.delete_session(session)
    with pytest.raises(NotFound):
        session.exec("pwd")


def test_process_without_await(sandbox: sync.Sandbox) -> None:
    process = sandbox.start_process("for n in 1 2 3; do echo $n; done")
    assert isinstance(process, sync.Process)
    assert process.wait_for_exit(timeout=10) == 0
    assert "".join(chunk.data for chunk in process.stream_logs()) == "1\n2\n3\n"
    assert process.refresh().status == "exited"
    assert process.exit_code == 0


def test_terminal_is_an_iterator(sandbox: sync.Sandbox) -> None:
    with sandbox.create_terminal(["sh", "-c", "echo ready; read line; echo got $line"]) as terminal:
        terminal.write("abc\n")
        shown = b"".join(terminal)
        assert b"got abc" in shown
        assert terminal.wait() == 0


def test_write_stream_takes_an_iterable(sandbox: sync.Sandbox) -> None:
    assert sandbox.write_stream("/tmp/f", (b"x" * 1000 for _ in range(5))) == 5000
    assert b"".join(sandbox.read_stream("/tmp/f", offset=4990)) == b"x" * 10


def test_subclass_has_settings_and_methods(client: sync.Client) -> None:
    class Small(sync.Sandbox):
        cwd = "/tmp"
        labels: ClassVar = {"team": "search"}

        def here(self) -> str:
            return self.exec("pwd").stdout

    with client.create(Small) as small:
        assert isinstance(small, Small)
        assert (small.here(), small.cwd) == ("/tmp\n", "/tmp")
        info = small.info()
        assert info is not None
        assert info.labels == {"team": "search"}


def test_unknown_attribute_of_a_subclass_is_refused() -> None:
    with pytest.raises(InvalidOption, match="'limits'"):
        type("Small", (sync.Sandbox,), {"limit": "lite"})


def test_handle_is_shared_by_threads(sandbox: sync.Sandbox) -> None:
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(sandbox.exec(f"echo {n}").stdout))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(results) == ["0\n", "1\n", "2\n", "3\n"]


def test_interrupt_kills_the_command(sandbox: sync.Sandbox) -> None:
    sandbox.exec("true")
    process = sandbox.start_process("while ! pgrep -f 'sleep 98[6]'; do :; done")

    def interrupt() -> None:
        process.wait_for_exit(timeout=10)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        sandbox.exec("exec sleep 986")
    thread.join(10)
    deadline = time.monotonic() + 5
    while sandbox.exec("pgrep -f 'sleep 98[6]'").exit_code == 0:
        assert time.monotonic() < deadline


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_forked_process_gets_its_own_loop(sandbox: sync.Sandbox, tmp_path: Path) -> None:
    sandbox.exec("true")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            (tmp_path / "output").write_text(sandbox.exec("echo child").stdout)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (tmp_path / "output").read_text() == "child\n"
    assert sandbox.exec("echo parent").stdout == "parent\n"


def _definitions(source: str) -> list[str]:
    """Return the definitions of a stub without its imports, some of which a formatter removes."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [ast.unparse(one) for one in ast.parse(source).body if isinstance(one, kinds)]
