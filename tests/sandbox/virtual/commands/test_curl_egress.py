"""Limits of `curl`: it stays within the policy, shows no secret and never hangs."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import pytest

from sandbox.virtual.commands.website import Running, reach
from smokebox import Egress, virtual
from smokebox.egress import bearer, header, restrict
from smokebox.sandbox.virtual.commands.curl import curl_on
from smokebox.sandbox.virtual.fetch import EgressClient, FetchLimits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sandbox.virtual.commands.website import Website
    from smokebox.types import ExecResult

TOKEN = "s3cr3t/t0ken+value"


async def run(script: str, egress: Egress, **options: Any) -> ExecResult:
    """Run a script; the options are those of the HTTP client that curl uses."""
    commands = {"curl": curl_on(EgressClient(egress, **options))} if options else None
    async with virtual(egress=egress, commands=commands) as sandbox:
        return await sandbox.exec(script)


async def test_without_a_policy_the_error_names_the_egress_option() -> None:
    async with virtual() as sandbox:
        for command in ("curl", "wget"):
            result = await sandbox.exec(f"{command} https://example.com/")
            assert result.exit_code != 0
            assert "egress=" in result.stderr


async def test_disallowed_host_is_refused_before_anything_is_sent(site: Website) -> None:
    result = await run(f"curl -s -S {site.url}/b", Egress(allowed_hosts=["api.test"]))
    assert result.exit_code == 7
    assert "not in allowed_hosts" in result.stderr
    assert site.seen == []


async def test_handler_restricts_methods_and_paths(site: Website) -> None:
    egress = reach(site, handler=restrict(methods=["GET"], paths=["/big"]))
    assert (await run(f"curl -s {site.url}/big?n=2", egress)).stdout == "xx"
    post = await run(f"curl -s -d x {site.url}/big", egress)
    assert post.stdout == "smokebox: POST is not allowed, only GET\n"
    path = await run(f"curl -sf {site.url}/echo", egress)
    assert path.exit_code == 22
    assert len(site.seen) == 1


async def test_loopback_is_reached_only_if_mapped_by_hosts(site: Website) -> None:
    result = await run(f"curl {site.url}/echo", Egress(internet=True, tcp=[site.place]))
    assert result.exit_code == 7
    assert "a private address; hosts=" in result.stderr
    assert site.seen == []


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "169.254.169.254"])
async def test_name_that_resolves_to_a_private_address_is_refused(
    address: str, site: Website
) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["93.184.216.34", address]

    port = site.url.rpartition(":")[2]
    egress = Egress(tcp=[f"public.test:{port}"])
    result = await run(f"curl http://public.test:{port}/", egress, resolver=resolve)
    assert result.exit_code == 7
    assert site.seen == []


async def test_name_is_resolved_once_and_that_address_is_used(site: Website) -> None:
    port = site.url.rpartition(":")[2]
    lookups: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        lookups.append(host)
        return ["127.0.0.1"] if len(lookups) == 1 else ["192.0.2.1"]

    egress = Egress(tcp=[f"api.test:{port}"], hosts={"api.test": "inside.test"})
    result = await run(f"curl -s http://api.test:{port}/big?n=2", egress, resolver=resolve)
    assert result.stdout == "xx"
    assert lookups == ["inside.test"]


async def test_redirect_to_a_private_address_is_refused(site: Website) -> None:
    script = f"curl -sSL '{site.url}/redirect?to=http://169.254.169.254/x'"
    result = await run(script, reach(site, internet=True))
    assert result.exit_code == 7
    assert "private address" in result.stderr


async def test_redirect_to_a_disallowed_host_is_refused(
    site: Website, make_site: Callable[[], Website]
) -> None:
    other = make_site()
    result = await run(f"curl -sSL '{site.url}/redirect?to={other.url}/'", reach(site))
    assert result.exit_code == 7
    assert other.seen == []


async def test_redirect_does_not_carry_a_secret_to_another_origin(
    site: Website, make_site: Callable[[], Website]
) -> None:
    other = make_site()
    result = await run(
        f"curl -sL -u me:pw -b c=1 -H 'X-Own: 1' '{site.url}/redirect?to={other.url}/echo'",
        Egress(
            outbound_by_host={site.place: header("X-Key", TOKEN)},
            tcp=[other.place],
            hosts={"127.0.0.1": "127.0.0.1"},
        ),
    )
    assert result.exit_code == 0
    assert headers_of(site)["X-Key"] == TOKEN
    assert not {"Authorization", "Cookie", "X-Key"} & headers_of(other).keys()
    assert headers_of(other)["X-Own"] == "1"


async def test_redirect_does_not_carry_a_secret_in_its_location(
    site: Website, make_site: Callable[[], Website]
) -> None:
    other = make_site()
    egress = Egress(
        outbound_by_host={site.place: header("Authorization", TOKEN)},
        tcp=[other.place],
        hosts={"127.0.0.1": "127.0.0.1"},
    )
    url = f"{site.url}/redirect?leak=1&to={other.url}/echo?k="
    result = await run(f"curl -sL -w '%{{url_effective}}' '{url}'", egress)
    assert other.seen[0]["path"] == "/echo?k=[redacted]********"
    assert TOKEN not in str(other.seen) + result.stdout


async def test_each_hop_gets_the_secret_of_its_host(
    site: Website, make_site: Callable[[], Website]
) -> None:
    other = make_site()
    handlers = {
        site.place: header("X-Key", "first-key"),
        other.place: header("X-Key", "second-key"),
    }
    egress = Egress(outbound_by_host=handlers, hosts={"127.0.0.1": "127.0.0.1"})
    await run(f"curl -sL '{site.url}/redirect?to={other.url}/echo'", egress)
    assert headers_of(site)["X-Key"] == "first-key"
    assert headers_of(other)["X-Key"] == "second-key"


def headers_of(site: Website) -> dict[str, str]:
    """Return the headers of the last request that the site received."""
    headers = site.seen[-1]["headers"]
    assert isinstance(headers, dict)
    return headers


LEAK_ATTEMPTS = [
    "curl -s $U/leak", "curl -si $U/leak", "curl -sv $U/leak 2>&1", "curl -sI $U/leak",
    "curl -s $U/echo", "curl -s --compressed $U/gzip", "curl -s $U/gzip", "curl -s $U/gzip | od -c",
    "curl -s -o f $U/leak; cat f", "curl -s -D h $U/leak; cat h", "wget -qSO- $U/leak 2>&1",
    "curl -s -w '%{header_json}%{redirect_url}%{url_effective}' $U/leak", "env; set; declare -p",
    "curl -s -H 'Authorization: mine' $U/leak", "curl -s $U/leak | base64 -d 2>&1",
    "curl -s $U/leak | rev | rev", "grep -r s3cr3t / 2>&1 | head", "curl -s -r 0-12 $U/leak",
    "curl -sL \"$U/redirect?to=/leak\" -v 2>&1",
]  # fmt: skip


@pytest.mark.parametrize("script", LEAK_ATTEMPTS)
async def test_script_never_sees_the_secret(script: str, site: Website) -> None:
    egress = reach(site, handler=bearer(TOKEN))
    async with virtual(egress=egress, env={"U": site.url}) as sandbox:
        result = await sandbox.exec(script)
    assert "s3cr3t" not in result.stdout + result.stderr
    for request in site.seen:
        headers = request["headers"]
        assert isinstance(headers, dict) and headers["authorization"] == f"Bearer {TOKEN}"


async def test_secret_split_between_two_reads_is_scrubbed(site: Website) -> None:
    egress = reach(site, handler=bearer(TOKEN))
    padding = 64 * 1024 - 200
    for shift in range(0, 60, 7):
        script = f"head -c {padding + shift} /dev/zero | tr '\\0' x | curl -s -d @- {site.url}/echo"
        assert "s3cr3t" not in (await run(script, egress)).stdout


async def test_secret_is_visible_with_scrub_off(site: Website) -> None:
    egress = reach(site, handler=bearer(TOKEN), scrub=False)
    assert TOKEN in (await run(f"curl -s {site.url}/leak", egress)).stdout


HEADERS = [
    "Host: evil",
    "Transfer-Encoding: chunked",
    "a: b\rc: d",
]


@pytest.mark.parametrize("header", HEADERS)
async def test_headers_that_would_change_the_message_are_refused(
    header: str, site: Website
) -> None:
    script = f"curl -sS -H $'{header}' {site.url}/".replace("\r", "\\r")
    result = await run(script, reach(site))
    assert result.exit_code == 43
    assert site.seen == []


async def test_response_over_the_limit_is_cut_with_an_error(site: Website) -> None:
    script = f"curl -sS -o f {site.url}/big?n=100001; echo $?; ls"
    result = await run(script, reach(site), limits=FetchLimits(max_response_bytes=100_000))
    assert result.stdout == "63\n"
    assert "exceeds the limit of 100000 bytes" in result.stderr


async def test_plain_commands_after_a_request_do_not_block_the_script(site: Website) -> None:
    script = f"curl -sS -o f {site.url}/big?n=100001; echo $?; ls"
    limits = FetchLimits(max_response_bytes=100_000)
    for _ in range(150):
        assert (await run(script, reach(site), limits=limits)).stdout == "63\n"


async def test_request_over_the_limit_is_not_sent(site: Website) -> None:
    limits = FetchLimits(max_request_bytes=4)
    result = await run(f"curl -sS -d 12345 {site.url}/", reach(site), limits=limits)
    assert result.exit_code == 55
    assert site.seen == []


@pytest.mark.parametrize("option", ["-m 0.2", ""])
async def test_hanging_server_times_out(option: str, site: Website) -> None:
    limits = FetchLimits(timeout=0.4)
    result = await run(f"curl -sS {option} {site.url}/hang", reach(site), limits=limits)
    assert result.exit_code == 28
    assert "timed out" in result.stderr


async def test_script_timeout_ends_a_hanging_request(site: Website) -> None:
    async with virtual(egress=reach(site)) as sandbox:
        result = await sandbox.exec(f"echo a; curl -s {site.url}/hang; echo b", timeout=0.3)
        assert (result.exit_code, result.stdout) == (124, "a\n")
        assert (await sandbox.exec(f"curl -s {site.url}/big?n=1")).stdout == "x"


async def test_cancelling_closes_the_connection_of_a_hanging_request() -> None:
    requested, closed = asyncio.Event(), asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        requested.set()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        closed.set()
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server, asyncio.timeout(10):
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        egress = Egress(tcp=[address], hosts={"127.0.0.1": "127.0.0.1"})
        async with virtual(egress=egress) as sandbox:
            running = asyncio.create_task(sandbox.exec(f"curl -s http://{address}/"))
            await requested.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await closed.wait()
            assert (await sandbox.exec("echo alive")).stdout == "alive\n"


async def test_hanging_name_lookup_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: release.wait(10) and [])
    try:
        async with asyncio.timeout(5):
            result = await run("curl -sS -m 0.2 http://api.test/", Egress(internet=True))
    finally:
        release.set()
    assert result.exit_code == 28


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Return a key and a self-signed certificate for 127.0.0.1."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl on this machine to make a certificate with")
    both = tmp_path / "both.pem"
    names = "subjectAltName=IP:127.0.0.1"
    subprocess.run(
        [
            openssl,
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=test",
            "-addext",
            names,
            "-keyout",
            str(tmp_path / "key.pem"),
            "-out",
            str(tmp_path / "cert.pem"),
        ],
        check=True,
        capture_output=True,
    )
    both.write_text((tmp_path / "key.pem").read_text() + (tmp_path / "cert.pem").read_text())
    return both


async def test_certificates_are_checked(
    certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Running("https")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    running.server.socket = context.wrap_socket(running.server.socket, server_side=True)
    site = running.start()
    try:
        unknown = await run(f"curl -sS {site.url}/big?n=1", reach(site))
        assert unknown.exit_code == 60
        assert "certificate" in unknown.stderr
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        known = await run(f"curl -s {site.url}/big?n=1", reach(site))
        assert known.stdout == "x"
    finally:
        running.stop()
