"""Count the source files that an exec, a prompt and an egress request pass through.

    python bench/hops.py [--rounds 9] [--list]

Each is measured warm. `files` is the number of source files of Smokebox whose functions are
called, `changes` how often a call is in another file than the one before, and `calls` the number of
function calls, without resumed coroutines. All are medians of the rounds. Client and server run in
two processes, whose calls are ordered by time. Processes inside a sandbox are not traced. `--list`
prints the files of the last round in the order of their first call.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import smokebox

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from types import CodeType, FrameType

    from smokebox.agents.messages import ToolCall
    from smokebox.egress.message import Request

SOURCE = f"{Path(smokebox.__file__).parent}/"
# Fakes for tests are not counted.
FAKES = "testing/"
HOST = "api.test"
# Sends as many requests as its argument says, each on a new connection, and prints the start and
# end of each: the monotonic clock is the same inside a sandbox.
REQUESTS = f"""
import http.client, json, sys, time
spans = []
for _ in range(int(sys.argv[1])):
    time.sleep(0.1)
    began = time.monotonic()
    connection = http.client.HTTPConnection("{HOST}")
    connection.request("GET", "/")
    assert connection.getresponse().read() == b"hello"
    connection.close()
    spans.append((began, time.monotonic()))
print(json.dumps(spans))
"""
WARM_UPS = 3

Call = tuple[float, str]
Span = tuple[float, float]


class Trace:
    """Records every call of a function of Smokebox in this process."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def start(self) -> None:
        """Trace this thread and those started later."""
        threading.setprofile(self._record)
        sys.setprofile(self._record)

    def stop(self) -> None:
        """Stop tracing."""
        threading.setprofile(None)
        sys.setprofile(None)

    def _record(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and (path := source_path(code)) and not resumes(code, frame.f_lasti):
            self.calls.append((time.monotonic(), path))


@functools.cache
def source_path(code: CodeType) -> str:
    """Return the path of a function's file in the package, empty if it is not counted."""
    path = code.co_filename.removeprefix(SOURCE)
    return "" if path == code.co_filename or path.startswith(FAKES) else path


@functools.cache
def resumes(code: CodeType, offset: int) -> bool:
    """Return whether the RESUME instruction at `offset` follows a yield or an await."""
    return bool(code.co_code[offset + 1] & 3)


async def trace_exec(trace: Trace, folder: Path, rounds: int) -> list[list[str]]:
    """Run /bin/true with the SDK in a sandbox of a server."""
    remote = folder / "calls.json"
    with run_traced_server(folder / "server", remote):
        sandbox = smokebox.connect(f"unix:{folder}/server/server.sock").sandbox("hops")
        spans = await spans_of(lambda: sandbox.exec(["/bin/true"]), rounds)
        await sandbox.destroy()
    return within(spans, trace.calls + [tuple(call) for call in json.loads(remote.read_text())])


@contextlib.contextmanager
def run_traced_server(home: Path, calls: Path) -> Iterator[None]:
    """Run a traced server, which writes its calls to a file when it exits."""
    command = [sys.executable, __file__, "--serve", str(home), "--calls", str(calls)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while not (home / "server.sock").exists():
                time.sleep(0.01)
            yield
        finally:
            server.terminate()


def serve(home: str, calls: str) -> None:
    """Run the server of `smokebox serve` with a trace."""
    from smokebox.cli import main as run_command

    trace = Trace()

    @atexit.register
    def write() -> None:
        trace.stop()
        Path(calls).write_text(json.dumps(trace.calls))

    trace.start()
    sys.argv = ["smokebox", "serve", "--home", home, "--no-tcp"]
    sys.exit(run_command())


async def trace_prompt(trace: Trace, folder: Path, rounds: int) -> list[list[str]]:
    """Prompt an agent that runs a command in the virtual sandbox, then replies."""
    from smokebox.agents import init
    from smokebox.testing import ScriptedModel, call

    turns: list[ToolCall | str] = [call("bash", command="echo hello"), "It says hello."]
    model = ScriptedModel(*turns * (WARM_UPS + rounds))
    async with init(model=model, persist=str(folder / "agents.db")) as harness:
        session = await harness.session()
        spans = await spans_of(lambda: session.prompt("Say hello."), rounds)
    return within(spans, trace.calls)


async def trace_egress(trace: Trace, folder: Path, rounds: int) -> list[list[str]]:
    """Send requests from a sandbox, to which a handler adds a header."""
    from smokebox.engine import Host

    async with upstream() as address:
        egress = smokebox.Egress(outbound_by_host={HOST: add_header}, hosts={HOST: address})
        async with await Host.open(folder / "engine", pool=0) as host:
            sandbox = await host.create("hops", egress=egress)
            count = str(WARM_UPS + rounds)
            result = await sandbox.exec(["/usr/bin/python3", "-c", REQUESTS, count])
            assert result.exit_code == 0, result.stderr
            await sandbox.destroy()
    spans = [(began, ended) for began, ended in json.loads(result.stdout)]
    return within(spans[WARM_UPS:], trace.calls)


async def add_header(request: Request, env: object, context: object) -> Request:
    """Add a credential, as handlers do."""
    request.headers["authorization"] = "Bearer token"
    return request


@contextlib.asynccontextmanager
async def upstream() -> AsyncIterator[str]:
    """Run an HTTP server and yield its address."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def spans_of(work: Callable[[], Awaitable[object]], rounds: int) -> list[Span]:
    """Repeat a job, and return the start and end of each run."""
    spans = []
    for _ in range(WARM_UPS + rounds):
        # Let background work of the previous run finish.
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await work()
        spans.append((began, time.monotonic()))
    return spans[WARM_UPS:]


def within(spans: list[Span], calls: list[Call]) -> list[list[str]]:
    """Return the files of the calls in each span, in order of time."""
    ordered = sorted(calls)
    return [[path for at, path in ordered if began <= at <= ended] for began, ended in spans]


def report(name: str, runs: list[list[str]], *, listed: bool) -> None:
    """Print a line of medians, and the files if `listed`."""
    files = statistics.median(len(set(run)) for run in runs)
    changes = statistics.median(sum(a != b for a, b in itertools.pairwise(run)) for run in runs)
    calls = statistics.median(map(len, runs))
    print(f"{name:42} {files:7.0f} {changes:8.0f} {calls:7.0f}")
    if listed:
        print(*(f"    {path}" for path in dict.fromkeys(runs[-1])), sep="\n")


async def measure(options: argparse.Namespace) -> None:
    """Trace all three."""
    print(f"{'path':42} {'files':>7} {'changes':>8} {'calls':>7}")
    for name, trace_runs in (
        ("exec, SDK to kernel", trace_exec),
        ("prompt with one tool call", trace_prompt),
        ("egress request with a handler", trace_egress),
    ):
        trace = Trace()
        with tempfile.TemporaryDirectory(prefix="smokebox-hops-") as folder:
            trace.start()
            try:
                runs = await trace_runs(trace, Path(folder), options.rounds)
            finally:
                trace.stop()
        report(name, runs, listed=options.list)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--list", action="store_true", help="print the files too")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--calls", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.calls)
    else:
        asyncio.run(measure(options))


if __name__ == "__main__":
    main()
