"""What `curl` may not do: reach further than the policy, show a secret, or hang."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from sandbox.virtual.commands.website import Running
from smokebox import virtual
from smokebox.sandbox.network import Allow, Network

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sandbox.virtual.commands.website import Website
    from smokebox.types import ExecResult

TOKEN = "s3cr3t/t0ken+value"
SECRET = {"Authorization": f"Bearer {TOKEN}"}


async def ask(script: str, *allow: Allow, **options: Any) -> ExecResult:
    async with virtual(network=Network(allow=list(allow), **options)) as sandbox:
        return await sandbox.exec(script)


async def test_without_a_network_curl_says_what_would_open_it() -> None:
    async with virtual() as sandbox:
        for command in ("curl", "wget"):
            result = await sandbox.exec(f"{command} https://example.com/")
            assert result.exit_code != 0
            assert "network=" in result.stderr


async def test_what_is_not_listed_is_refused_before_anything_is_sent(site: Website) -> None:
    result = await ask(f"curl -s -S {site.url}/b", Allow(url=f"{site.url}/a", private=True))
    assert result.exit_code == 7
    assert "not in the network allow-list" in result.stderr
    assert site.seen == []


async def test_a_method_that_is_not_listed_is_refused(site: Website) -> None:
    result = await ask(f"curl -d x {site.url}/", Allow(url=site.url, private=True))
    assert result.exit_code == 7
    assert "only GET, HEAD" in result.stderr
    assert site.seen == []


async def test_loopback_needs_an_entry_that_says_private(site: Website) -> None:
    result = await ask(f"curl {site.url}/echo", Allow(url=site.url))
    assert result.exit_code == 7
    assert "private address" in result.stderr
    assert site.seen == []


async def test_everything_public_is_still_nothing_private(site: Website) -> None:
    result = await ask(f"curl {site.url}/echo", Allow(url="*"))
    assert result.exit_code == 7
    assert site.seen == []


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "169.254.169.254"])
async def test_a_name_that_leads_inside_is_refused(address: str, site: Website) -> None:
    port = site.url.rpartition(":")[2]
    result = await ask(
        f"curl http://public.test:{port}/",
        Allow(url=f"http://public.test:{port}"),
        resolver=lambda host, port: ["93.184.216.34", address],
    )
    assert result.exit_code == 7
    assert site.seen == []


async def test_a_name_is_looked_up_once_and_that_answer_is_used(site: Website) -> None:
    port = site.url.rpartition(":")[2]
    lookups: list[str] = []

    def resolver(host: str, port: int) -> list[str]:
        lookups.append(host)
        return ["127.0.0.1"] if len(lookups) == 1 else ["192.0.2.1"]

    url = f"http://api.test:{port}"
    result = await ask(f"curl -s {url}/big?n=2", Allow(url=url, private=True), resolver=resolver)
    assert result.stdout == "xx"
    assert lookups == ["api.test"]


async def test_a_redirect_inside_is_refused(site: Website) -> None:
    allow = Allow(url=site.url, private=True), Allow(url="*")
    result = await ask(f"curl -sSL '{site.url}/redirect?to=http://169.254.169.254/x'", *allow)
    assert result.exit_code == 7
    assert "private address" in result.stderr


async def test_a_redirect_to_what_is_not_listed_is_refused(
    site: Website, make_site: Callable[[], Website]
) -> None:
    other = make_site()
    result = await ask(
        f"curl -sSL '{site.url}/redirect?to={other.url}/'", Allow(url=site.url, private=True)
    )
    assert result.exit_code == 7
    assert other.seen == []


async def test_a_redirect_takes_no_secret_to_another_origin(
    site: Website, make_site: Callable[[], Website]
) -> None:
    other = make_site()
    result = await ask(
        f"curl -sL -u me:pw -b c=1 -H 'X-Own: 1' '{site.url}/redirect?to={other.url}/echo'",
        Allow(url=site.url, private=True, headers={"X-Key": TOKEN}),
        Allow(url=other.url, private=True),
    )
    assert result.exit_code == 0
    assert headers_of(site)["X-Key"] == TOKEN
    assert not {"Authorization", "Cookie", "X-Key"} & headers_of(other).keys()
    assert headers_of(other)["X-Own"] == "1"


async def test_each_hop_gets_the_secret_of_its_own_entry(
    site: Website, make_site: Callable[[], Website]
) -> None:
    other = make_site()
    await ask(
        f"curl -sL '{site.url}/redirect?to={other.url}/echo'",
        Allow(url=site.url, private=True, headers={"X-Key": "first-key"}),
        Allow(url=other.url, private=True, headers={"X-Key": "second-key"}),
    )
    assert headers_of(site)["X-Key"] == "first-key"
    assert headers_of(other)["X-Key"] == "second-key"


def headers_of(site: Website) -> dict[str, str]:
    """The headers of the last request the site saw."""
    headers = site.seen[-1]["headers"]
    assert isinstance(headers, dict)
    return headers


LOOKS = [
    "curl -s $U/leak", "curl -si $U/leak", "curl -sv $U/leak 2>&1", "curl -sI $U/leak",
    "curl -s $U/echo", "curl -s --compressed $U/gzip", "curl -s $U/gzip", "curl -s $U/gzip | od -c",
    "curl -s -o f $U/leak; cat f", "curl -s -D h $U/leak; cat h", "wget -qSO- $U/leak 2>&1",
    "curl -s -w '%{header_json}%{redirect_url}%{url_effective}' $U/leak", "env; set; declare -p",
    "curl -s -H 'Authorization: mine' $U/leak", "curl -s $U/leak | base64 -d 2>&1",
    "curl -s $U/leak | rev | rev", "grep -r s3cr3t / 2>&1 | head", "curl -s -r 0-12 $U/leak",
    "curl -sL \"$U/redirect?to=/leak\" -v 2>&1",
]  # fmt: skip


@pytest.mark.parametrize("script", LOOKS)
async def test_the_script_never_sees_the_secret(script: str, site: Website) -> None:
    network = Network(allow=[Allow(url=site.url, private=True, headers=SECRET)])
    async with virtual(network=network, env={"U": site.url}) as sandbox:
        result = await sandbox.exec(script)
    assert "s3cr3t" not in result.stdout + result.stderr
    for told in site.seen:
        headers = told["headers"]
        assert isinstance(headers, dict) and headers["Authorization"] == f"Bearer {TOKEN}"


async def test_a_secret_that_is_cut_between_two_reads_is_found(site: Website) -> None:
    allow = Allow(url=site.url, private=True, headers=SECRET, methods=["POST"])
    filling = 64 * 1024 - 200
    for shift in range(0, 60, 7):
        script = f"head -c {filling + shift} /dev/zero | tr '\\0' x | curl -s -d @- {site.url}/echo"
        assert "s3cr3t" not in (await ask(script, allow)).stdout


async def test_the_secret_can_be_shown_where_the_owner_says_so(site: Website) -> None:
    allow = Allow(url=site.url, private=True, headers=SECRET)
    assert TOKEN in (await ask(f"curl -s {site.url}/leak", allow, scrub=False)).stdout


HEADERS = [
    "Host: evil",
    "Transfer-Encoding: chunked",
    "X-HTTP-Method-Override: DELETE",
    "a: b\rc: d",
]


@pytest.mark.parametrize("header", HEADERS)
async def test_headers_that_would_change_the_message_are_refused(
    header: str, site: Website
) -> None:
    script = f"curl -sS -H $'{header}' {site.url}/".replace("\r", "\\r")
    result = await ask(script, Allow(url=site.url, private=True))
    assert result.exit_code == 43
    assert site.seen == []


async def test_a_response_longer_than_allowed_is_cut_off_with_an_error(site: Website) -> None:
    allow = Allow(url=site.url, private=True)
    script = f"curl -sS -o f {site.url}/big?n=100001; echo $?; ls"
    result = await ask(script, allow, max_response_bytes=100_000)
    assert result.stdout == "63\n"
    assert "100000 bytes allowed" in result.stderr


async def test_plain_commands_right_after_a_request_never_hold_the_script(site: Website) -> None:
    allow = Allow(url=site.url, private=True)
    script = f"curl -sS -o f {site.url}/big?n=100001; echo $?; ls"
    for _ in range(150):
        assert (await ask(script, allow, max_response_bytes=100_000)).stdout == "63\n"


async def test_a_request_longer_than_allowed_is_not_sent(site: Website) -> None:
    allow = Allow(url=site.url, private=True, methods=["POST"])
    result = await ask(f"curl -sS -d 12345 {site.url}/", allow, max_request_bytes=4)
    assert result.exit_code == 55
    assert site.seen == []


@pytest.mark.parametrize("option", ["-m 0.2", ""])
async def test_a_server_that_hangs_is_left_in_time(option: str, site: Website) -> None:
    allow = Allow(url=site.url, private=True)
    result = await ask(f"curl -sS {option} {site.url}/hang", allow, timeout=0.4)
    assert result.exit_code == 28
    assert "timed out" in result.stderr


async def test_a_timeout_of_the_script_ends_a_hanging_request(site: Website) -> None:
    network = Network(allow=[Allow(url=site.url, private=True)])
    async with virtual(network=network) as sandbox:
        result = await sandbox.exec(f"echo a; curl -s {site.url}/hang; echo b", timeout=0.3)
        assert (result.exit_code, result.stdout) == (124, "a\n")
        assert (await sandbox.exec(f"curl -s {site.url}/big?n=1")).stdout == "x"


async def test_cancelling_ends_a_hanging_request(site: Website) -> None:
    network = Network(allow=[Allow(url=site.url, private=True)])
    async with virtual(network=network) as sandbox:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await sandbox.exec(f"curl -s {site.url}/hang")
        assert (await sandbox.exec("echo alive")).stdout == "alive\n"


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A key and a certificate for 127.0.0.1, signed by nobody."""
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


async def test_certificates_are_checked(certificate: Path, tmp_path: Path) -> None:
    running = Running("https")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    running.server.socket = context.wrap_socket(running.server.socket, server_side=True)
    site = running.start()
    try:
        allow = Allow(url=site.url, private=True)
        unknown = await ask(f"curl -sS {site.url}/big?n=1", allow)
        assert unknown.exit_code == 60
        assert "certificate" in unknown.stderr
        known = await ask(f"curl -s {site.url}/big?n=1", allow, ca_file=str(tmp_path / "cert.pem"))
        assert known.stdout == "x"
    finally:
        running.stop()
