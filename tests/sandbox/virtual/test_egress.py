"""Egress policies of the virtual sandbox: rules, handlers and refusals as in Linux sandboxes."""

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
            self._respond(302, b"", ("Location", "http://169.254.169.254/latest"))
            return
        token = self.headers.get("authorization", "no token")
        size = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(size)
        text = f"{self.command} {self.path} {token} {body.decode()} range={self.headers['range']}"
        self._respond(200, text.encode(), ("X-Echo", token))

    do_POST = do_GET

    def _respond(self, status: int, body: bytes, header: tuple[str, str]) -> None:
        self.send_response(status)
        self.send_header(*header)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
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


async def test_allowed_host_is_reached_at_its_mapped_address(address: str) -> None:
    policy = Egress(allowed_hosts=[HOST], hosts={HOST: address})
    assert (await run(policy, f"curl -s http://{HOST}/x")).stdout.startswith("GET /x no token")
    result = await run(policy, f"wget -q -O - http://{HOST}/y")
    assert result.stdout.startswith("GET /y no token")


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Egress(), "allowed_hosts=['api.test'] would open it"),
        (Egress(allowed_hosts=["b.test"]), "api.test is not in allowed_hosts"),
        (Egress(internet=True, denied_hosts=["*.test"]), "api.test is denied"),
    ],
)
async def test_refusal_names_the_setting_that_would_allow_it(policy: Egress, message: str) -> None:
    result = await run(policy, f"curl -sS http://{HOST}/")
    assert result.exit_code == 7
    assert message in result.stderr


async def test_other_port_is_refused_unless_listed(address: str) -> None:
    result = await run(Egress(internet=True), f"curl -sS http://{HOST}:8080/")
    assert "tcp=['api.test:8080'] would open it" in result.stderr
    policy = Egress(tcp=[f"{HOST}:8080"], hosts={HOST: address})
    assert (await run(policy, f"curl -s http://{HOST}:8080/")).stdout.startswith("GET / ")


async def test_private_address_is_refused(address: str) -> None:
    result = await run(Egress(internet=True, tcp=[address]), f"curl -sS http://{address}/")
    assert result.exit_code == 7
    assert "private address" in result.stderr


async def test_redirect_is_checked_again(address: str) -> None:
    policy = Egress(internet=True, hosts={HOST: address})
    result = await run(policy, f"curl -sSL http://{HOST}/away")
    assert result.exit_code == 7
    assert "private address" in result.stderr


async def test_handler_adds_a_secret_that_scripts_never_see(address: str) -> None:
    policy = Egress(outbound_by_host={HOST: bearer(SECRET)}, hosts={HOST: address})
    result = await run(policy, f"curl -sv -H 'Range: bytes=0-5' http://{HOST}/x")
    assert SECRET not in result.stdout + result.stderr
    assert "redacted" in result.stdout
    assert "range=None" in result.stdout
    shown = Egress(outbound=bearer(SECRET), hosts={HOST: address}, scrub=False)
    assert SECRET in (await run(shown, f"curl -s http://{HOST}/x")).stdout


async def test_secret_in_the_url_is_scrubbed(address: str) -> None:
    async def add(request: Request, env: Any, context: HandlerContext) -> Request:
        request.url += f"?key={SECRET}"
        return request

    policy = Egress(outbound_by_host={HOST: add}, hosts={HOST: address})
    output = (await run(policy, f"curl -sv http://{HOST}/x")).stdout
    assert output.startswith("GET /x?key=[redacted]")
    assert SECRET not in output


async def test_handler_may_respond_refuse_fail_or_forward(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def choose(request: Request, env: Any, context: HandlerContext) -> Request | Response:
        match request.url.rpartition("/")[2]:
            case "respond":
                return Response(f"{context.rule} {await request.text()}", 201)
            case "refuse":
                raise Refused("not on a monday")
            case "fail":
                raise KeyError(SECRET)
            case _:
                response = await context.forward(request, to=f"http://{address}/base")
                return Response((await response.text()).upper())

    policy = Egress(outbound=choose)
    curl = "curl -s -w '\\n%{http_code}' http://any.test"
    assert (await run(policy, f"{curl}/respond -d hi")).stdout == "outbound hi\n201"
    refused = (await run(policy, f"{curl}/refuse")).stdout
    assert ("not on a monday" in refused, refused[-3:]) == (True, "403")
    failed = (await run(policy, f"{curl}/fail")).stdout
    assert (SECRET in failed, failed[-3:]) == (False, "502")
    assert (await run(policy, f"{curl}/other")).stdout.startswith("GET /BASE/OTHER")


async def test_limits_apply_to_one_sandbox(address: str) -> None:
    policy = Egress(allowed_hosts=[HOST], hosts={HOST: address}, max_requests=2)
    async with virtual(egress=policy) as sandbox:
        for _ in range(2):
            assert (await sandbox.exec(f"curl -s http://{HOST}/")).exit_code == 0
        result = await sandbox.exec(f"curl -sS http://{HOST}/")
        assert "max_requests=2 is reached" in result.stderr
    assert (await run(policy, f"curl -s http://{HOST}/")).exit_code == 0


async def test_capabilities_report_guarded_egress() -> None:
    for policy, network in ((Egress(), "off"), (Egress(internet=True), "guarded")):
        async with virtual(egress=policy) as sandbox:
            assert (await sandbox.capabilities()).network == network


async def test_process_isolation_takes_a_handler_by_its_import_path() -> None:
    policy = Egress(outbound="smokebox.egress.builtin_handlers:log", denied_hosts=[HOST])
    async with virtual(egress=policy, isolation="process") as sandbox:
        assert "is denied" in (await sandbox.exec(f"curl -sS http://{HOST}/")).stderr
    with pytest.raises(InvalidOption, match="pickled"):
        virtual(egress=Egress(outbound=lambda r, e, c: r), isolation="process")
