"""The ordinary tenants of a soak test: ordinary.py SETUP, with phases on the standard input.

Operations begin at random times that do not depend on how long others take (an open loop), and
the latency of one is the time of the call. What was written and acknowledged must be there at the
end. Prints `ready`, and at the end an `OrdinaryReport`.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from smokebox import connect
from soak.plan import ORIGIN, Phases, Setup, Tenant, owned, report

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from smokebox import Sandbox

# Files of each sandbox that are written again and again.
_FILES = 6
_SMALL, _LARGE = 4 << 10, 1 << 20
_PORT = 8000
_WEB = f"""
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "5")
        self.end_headers()
        self.wfile.write(b"hello")
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", {_PORT}), Handler).serve_forever()
"""
_FETCH = (
    f"exec 3<>/dev/tcp/{ORIGIN}/80; printf 'GET /2000 HTTP/1.1\\r\\nhost: {ORIGIN}\\r\\n"
    "connection: close\\r\\n\\r\\n' >&3; cat <&3 | wc -c"
)
# An operation that takes longer is an error.
_DEADLINE = 60.0


class OrdinaryReport(msgspec.Struct, kw_only=True):
    """Seconds of each operation by kind of window, errors, and content that is not as written."""

    seconds: dict[str, dict[str, list[float]]] = {}
    errors: list[str] = []
    lost: list[str] = []
    operations: int = 0


class TenantLoad:
    """The operations of one tenant, and what its files must hold.

    Its first sandbox has a web server, and its second goes to sleep and wakes.
    """

    def __init__(self, setup: Setup, tenant: Tenant, rng: random.Random) -> None:
        self.rng = rng
        self.lost: list[str] = []
        self._url = setup.url
        self._tenant = tenant
        self._client = connect(setup.url, tenant.key)
        self._http = aiohttp.ClientSession()
        egress = {"hosts": {ORIGIN: f"127.0.0.1:{setup.origin}"}, "allowed_hosts": [ORIGIN]}
        self._boxes = [
            self._client.sandbox(id, egress=egress, sleep_after="2h") for id in tenant.sandboxes
        ]
        # Digests that the content of a file may have: one, or two after an interrupted write.
        self._files: dict[tuple[int, str], set[str]] = {}
        self._busy: set[tuple[int, str]] = set()
        self._sleeping = asyncio.Lock()
        self._headers: dict[str, str] = {}
        self._created = 0

    async def prepare(self) -> None:
        """Create the sandboxes, and start the web server."""
        for box in self._boxes:
            await box.wake()
        web = await self._boxes[0].start_process(["python3", "-c", _WEB], process_id="web")
        await web.wait_for_port(_PORT, timeout=_DEADLINE)
        exposed = await self._boxes[0].expose_port(_PORT)
        self._headers = {"host": f"{exposed.label}.localhost", "x-smokebox-token": exposed.token}

    def operations(self) -> dict[str, tuple[int, Callable[[], Awaitable[None]]]]:
        """Return each operation by its name, with its weight."""
        return {
            "exec": (24, self.exec),
            "read": (14, lambda: self.read(_SMALL)),
            "write": (14, lambda: self.write(_SMALL)),
            "download": (3, lambda: self.read(_LARGE)),
            "upload": (3, lambda: self.write(_LARGE)),
            "stream": (5, self.stream),
            "process": (4, self.process),
            "preview": (18, self.preview),
            "egress": (5, self.egress),
            "info": (4, self.info),
            "list": (3, self.list_all),
            "create": (3, self.create),
            "sleep": (1, self.sleep),
        }

    async def exec(self) -> None:
        result = await self._box().exec("echo $((6 * 7))")
        assert (result.exit_code, result.stdout) == (0, "42\n"), result

    async def write(self, size: int) -> None:
        """Write a file again, unless another operation uses all of them."""
        if (file := self._pick(size)) is None:
            return
        data = self.rng.randbytes(size)
        digest = hashlib.sha256(data).hexdigest()
        before = self._files.get(file, {""})
        # Until it is acknowledged, the file may hold either.
        self._files[file] = before | {digest}
        try:
            await self._boxes[file[0]].write_file(file[1], data)
            self._files[file] = {digest}
        finally:
            self._busy.discard(file)

    async def read(self, size: int) -> None:
        """Read a file that was written."""
        file = self._pick(size, written=True)
        if file is None:
            await self.write(size)
            return
        try:
            await self._check(file)
        finally:
            self._busy.discard(file)

    async def stream(self) -> None:
        text = ""
        async with self._box().exec_stream("seq 1 200") as chunks:
            async for chunk in chunks:
                text += chunk.data
        assert text.split() == [str(one) for one in range(1, 201)], text[-80:]

    async def process(self) -> None:
        process = await self._box().start_process("echo starting; echo ready on port 1234; sleep 0")
        found = await process.wait_for_log(re.compile(r"ready on port (\d+)"), timeout=_DEADLINE)
        assert found.groups == ("1234",), found
        assert await process.wait_for_exit(_DEADLINE) == 0
        assert "starting" in (await process.logs()).stdout

    async def preview(self) -> None:
        async with self._http.get(self._url, headers=self._headers) as response:
            body = await response.read()
            assert (response.status, body) == (200, b"hello"), (response.status, body[:300])

    async def egress(self) -> None:
        result = await self._box().exec(["bash", "-c", _FETCH])
        assert int(result.stdout or 0) > 2000, result

    async def info(self) -> None:
        found = await self._box().info()
        assert found is not None

    async def list_all(self) -> None:
        found = {one.id for one in await self._client.list(prefix=self._tenant.prefix)}
        assert found >= set(self._tenant.sandboxes), found

    async def create(self) -> None:
        """Create a sandbox, use it once and destroy it."""
        self._created += 1
        box = self._client.sandbox(f"{self._tenant.prefix}temporary-{self._created % 8}")
        try:
            await box.exec("true")
        finally:
            await box.destroy()

    async def sleep(self) -> None:
        """Put the second sandbox to sleep, and wake it by reading a file."""
        async with self._sleeping:
            box, data = self._boxes[1], str(self.rng.random())
            await box.write_file("kept", data)
            await box.sleep()
            assert await box.read_file("kept") == data

    async def verify(self) -> None:
        """Check the content of every file, and that the web server still runs."""
        for file in list(self._files):
            await self._check(file)
        await self.preview()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.close()
        await self._client.aclose()

    async def _check(self, file: tuple[int, str]) -> None:
        if self._files[file] == {""}:
            return
        try:
            found = hashlib.sha256(await self._boxes[file[0]].read_bytes(file[1])).hexdigest()
        except FileNotFoundError:
            found = ""
        if found not in self._files[file]:
            self.lost.append(f"{self._boxes[file[0]].id}:{file[1]} is not what was written")
        self._files[file] = {found}

    def _box(self) -> Sandbox:
        return self.rng.choice(self._boxes[2:])

    def _pick(self, size: int, *, written: bool = False) -> tuple[int, str] | None:
        """Reserve a file of a size that no other operation uses."""
        boxes, names = range(2, len(self._boxes)), range(_FILES)
        free = [
            file
            for box in boxes
            for name in names
            if (file := (box, f"{size}-{name}")) not in self._busy
            and (not written or file in self._files)
        ]
        if not free:
            return None
        file = self.rng.choice(free)
        self._busy.add(file)
        return file


class OrdinaryLoad:
    """The load of all tenants of this process."""

    def __init__(self, setup: Setup, phases: Phases) -> None:
        self._rng = random.Random(setup.seed)
        self._phases = phases
        self._rate = setup.rate
        self._report = OrdinaryReport()
        self._seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._tenants = [
            TenantLoad(setup, tenant, random.Random(f"{setup.seed}{tenant.prefix}"))
            for tenant in setup.tenants
        ]

    async def prepare(self) -> None:
        """Create the sandboxes of all tenants."""
        for tenant in self._tenants:
            await tenant.prepare()

    async def run(self) -> None:
        """Begin operations until cancelled."""
        running: set[asyncio.Task[None]] = set()
        due = time.perf_counter()
        try:
            while True:
                due = max(due + self._rng.expovariate(self._rate), time.perf_counter() - 1)
                await asyncio.sleep(due - time.perf_counter())
                if self._phases.kind == "down":
                    await self._phases.wait_until(down=False)
                    due = time.perf_counter()
                task = asyncio.create_task(self._operate(self._rng.choice(self._tenants)))
                running.add(task)
                task.add_done_callback(running.discard)
        finally:
            await asyncio.gather(*running)

    async def verify(self) -> OrdinaryReport:
        """Check that nothing is lost, and return the report."""
        for tenant in self._tenants:
            try:
                await tenant.verify()
            except Exception as error:
                self._report.lost.append(f"verify: {error!r}")
            self._report.lost += tenant.lost
            await tenant.aclose()
        self._report.seconds = {name: dict(kinds) for name, kinds in self._seconds.items()}
        return self._report

    async def _operate(self, tenant: TenantLoad) -> None:
        operations = tenant.operations()
        weights = [weight for weight, _ in operations.values()]
        (name,) = self._rng.choices(list(operations), weights)
        phases, report = self._phases, self._report
        number, outages = phases.number, phases.outages
        started = time.perf_counter()
        try:
            async with asyncio.timeout(_DEADLINE):
                await operations[name][1]()
        except Exception as error:
            # A request to a server that is killed has no result.
            if outages == phases.outages:
                report.errors.append(f"{name} in {phases.kind} {number}: {error!r:.500}")
            return
        report.operations += 1
        if number == phases.number and phases.kind in ("quiet", "hostile"):
            self._seconds[name][phases.kind].append(time.perf_counter() - started)


async def main() -> None:
    """Run the load until the input ends."""
    phases = Phases()
    load = OrdinaryLoad(msgspec.json.decode(sys.argv[1], type=Setup), phases)
    await load.prepare()
    report("ready")
    async with owned(asyncio.create_task(load.run())):
        await phases.follow()
    report(await load.verify())


if __name__ == "__main__":
    asyncio.run(main())
