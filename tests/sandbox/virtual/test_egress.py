"""The virtual sandbox under an `Egress` policy: same order, handlers and refusals as in Linux
sandboxes.
"""

from __future__ import annotations

import http.server
import threading
from typing import TYPE_CHECKING, Any

import pytest

from smokebox import Egress, virtual
from smokebox.egress import Refused, Request, Response, bearer
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.egress import HandlerContext

HOST = "api.test"
SECRET = "s3cret-of-the-tests"


class _Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/away":
            self._answer(302, b"", ("Location", "http://169.254.169.254/latest"))
            return
        token = self.headers.get("authorization", "no token")
        size = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(size)
        text = f"{self.command} {self.path} {token} {body.decode()} range={self.headers['range']}"
        self._answer(200, text.encode(), ("X-Echo", token))

    do_POST = do_GET

    def _answer(self, status: int, body: bytes, header: tuple[str, str]) -> None:
        self.send_response(status)
        self.send_header(*header)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def place() -> Iterator[str]:
    """Return the address of a server that echoes requests."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def run(policy: Egress, command: str) -> Any:
    async with virtual(egress=policy) as sandbox:
        return await sandbox.exec(command)


async def test_an_allowed_host_is_reached_at_its_mapped_address(place: str) -> None:
    policy = Egress(allowed_hosts=[HOST], hosts={HOST: place})
    assert (await run(policy, f"curl -s http://{HOST}/x")).stdout.startswith("GET /x no token")
    told = await run(policy, f"wget -q -O - http://{HOST}/y")
    assert told.stdout.startswith("GET /y no token")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Egress(), "allowed_hosts=['api.test'] would open it"),
        (Egress(allowed_hosts=["b.test"]), "api.test is not in allowed_hosts"),
        (Egress(internet=True, denied_hosts=["*.test"]), "api.test is denied"),
    ],
)
async def test_a_refusal_names_the_setting_that_would_allow_it(policy: Egress, words: str) -> None:
    told = await run(policy, f"curl -sS http://{HOST}/")
    assert told.exit_code == 7
    assert words in told.stderr


async def test_another_port_is_refused_unless_it_is_named(place: str) -> None:
    told = await run(Egress(internet=True), f"curl -sS http://{HOST}:8080/")
    assert "tcp=['api.test:8080'] would open it" in told.stderr
    policy = Egress(tcp=[f"{HOST}:8080"], hosts={HOST: place})
    assert (await run(policy, f"curl -s http://{HOST}:8080/")).stdout.startswith("GET / ")


async def test_private_addresses_need_the_policy(place: str) -> None:
    told = await run(Egress(internet=True, tcp=[place]), f"curl -sS http://{place}/")
    assert told.exit_code == 7
    assert "private address" in told.stderr


async def test_a_redirect_is_checked_again(place: str) -> None:
    policy = Egress(internet=True, hosts={HOST: place})
    told = await run(policy, f"curl -sSL http://{HOST}/away")
    assert told.exit_code == 7
    assert "private address" in told.stderr


async def test_a_handler_adds_what_the_script_never_sees(place: str) -> None:
    policy = Egress(outbound_by_host={HOST: bearer(SECRET)}, hosts={HOST: place})
    told = await run(policy, f"curl -sv -H 'Range: bytes=0-5' http://{HOST}/x")
    assert SECRET not in told.stdout + told.stderr
    assert "redacted" in told.stdout
    assert "range=None" in told.stdout
    shown = Egress(outbound=bearer(SECRET), hosts={HOST: place}, scrub=False)
    assert SECRET in (await run(shown, f"curl -s http://{HOST}/x")).stdout


async def test_a_secret_in_the_url_is_scrubbed_too(place: str) -> None:
    async def add(request: Request, env: Any, context: HandlerContext) -> Request:
        request.url += f"?key={SECRET}"
        return request

    policy = Egress(outbound_by_host={HOST: add}, hosts={HOST: place})
    told = (await run(policy, f"curl -sv http://{HOST}/x")).stdout
    assert told.startswith("GET /x?key=[redacted]")
    assert SECRET not in told


async def test_a_handler_may_answer_refuse_fail_or_forward(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def choose(request: Request, env: Any, context: HandlerContext) -> Request | Response:
        match request.url.rpartition("/")[2]:
            case "answer":
                return Response(f"{context.rule} {await request.text()}", 201)
            case "refuse":
                raise Refused("not on a monday")
            case "fail":
                raise KeyError(SECRET)
            case _:
                response = await context.forward(request, to=f"http://{place}/base")
                return Response((await response.text()).upper())

    policy = Egress(outbound=choose)
    ask = "curl -s -w '\\n%{http_code}' http://any.test"
    assert (await run(policy, f"{ask}/answer -d hi")).stdout == "outbound hi\n201"
    refused = (await run(policy, f"{ask}/refuse")).stdout
    assert ("not on a monday" in refused, refused[-3:]) == (True, "403")
    failed = (await run(policy, f"{ask}/fail")).stdout
    assert (SECRET in failed, failed[-3:]) == (False, "502")
    assert (await run(policy, f"{ask}/other")).stdout.startswith("GET /BASE/OTHER")


async def test_limits_hold_for_one_sandbox(place: str) -> None:
    policy = Egress(allowed_hosts=[HOST], hosts={HOST: place}, max_requests=2)
    async with virtual(egress=policy) as sandbox:
        for _ in range(2):
            assert (await sandbox.exec(f"curl -s http://{HOST}/")).exit_code == 0
        told = await sandbox.exec(f"curl -sS http://{HOST}/")
        assert "max_requests=2 is reached" in told.stderr
    assert (await run(policy, f"curl -s http://{HOST}/")).exit_code == 0


async def test_capabilities_report_guarded_egress() -> None:
    for policy, reach in ((Egress(), "off"), (Egress(internet=True), "guarded")):
        async with virtual(egress=policy) as sandbox:
            assert (await sandbox.capabilities()).network == reach


async def test_process_isolation_takes_a_handler_by_its_import_path() -> None:
    policy = Egress(outbound="smokebox.egress.builtin_handlers:log", denied_hosts=[HOST])
    async with virtual(egress=policy, isolation="process") as sandbox:
        assert "is denied" in (await sandbox.exec(f"curl -sS http://{HOST}/")).stderr
    with pytest.raises(InvalidOption, match="pickled"):
        virtual(egress=Egress(outbound=lambda r, e, c: r), isolation="process")
