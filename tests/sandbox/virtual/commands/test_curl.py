"""Options, output and exit codes of `curl`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from sandbox.virtual.commands.website import reach
from smokebox import virtual

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sandbox.virtual.commands.gnu import Run
    from sandbox.virtual.commands.website import Website


@pytest.fixture
async def run(site: Website) -> AsyncIterator[Run]:
    """Run a script that may send any request to the site; `$U` is its URL."""
    async with virtual(egress=reach(site), env={"U": site.url}) as sandbox:
        yield sandbox.exec


async def received(run: Run, script: str) -> dict[str, Any]:
    """Return the request that the site received, from its own response."""
    result = await run(script)
    assert result.exit_code == 0, result.stderr
    request: dict[str, Any] = json.loads(result.stdout)
    return request


REQUESTS = [
    ("curl -s $U/echo", "GET", "/echo", ""),
    ("curl -sSL $U/echo?a=1", "GET", "/echo?a=1", ""),
    ("curl -s -X DELETE $U/echo", "DELETE", "/echo", ""),
    ("curl -sXPUT -d x $U/echo", "PUT", "/echo", "x"),
    ("curl -s -d a=1 -d b=2 $U/echo", "POST", "/echo", "a=1&b=2"),
    ("curl -s --data-raw @x $U/echo", "POST", "/echo", "@x"),
    ("printf 'a\\nb' > f; curl -s -d @f $U/echo", "POST", "/echo", "ab"),
    ("printf 'a\\nb' > f; curl -s --data-binary @f $U/echo", "POST", "/echo", "a\nb"),
    ("printf 'in' | curl -s --data-binary @- $U/echo", "POST", "/echo", "in"),
    ("curl -s --data-urlencode 'q=a b&c' $U/echo", "POST", "/echo", "q=a%20b%26c"),
    ("curl -sG -d a=1 --data-urlencode 'q=x y' $U/echo", "GET", "/echo?a=1&q=x%20y", ""),
    ("curl -s --json '{\"a\":1}' $U/echo", "POST", "/echo", '{"a":1}'),
    ("echo up > f; curl -s -T f $U/echo/", "PUT", "/echo/f", "up\n"),
    ("curl -sL \"$U/redirect?to=/echo\"", "GET", "/echo", ""),
    ("curl -sL -d x \"$U/redirect?to=/echo\"", "GET", "/echo", ""),
    ("curl -sL -d x \"$U/redirect?status=307&to=/echo\"", "POST", "/echo", "x"),
    ("curl -sL -X POST -d x \"$U/redirect?to=/echo\"", "POST", "/echo", "x"),
    ("curl -sL \"$U/redirect?to=../echo\"", "GET", "/echo", ""),
    ("curl -s -- $U/echo", "GET", "/echo", ""),
    ("wget -qO- $U/echo", "GET", "/echo", ""),
    ("wget -q -O - --post-data=x $U/echo", "POST", "/echo", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "method", "path", "body"), REQUESTS)
async def test_options_shape_the_request(
    script: str, method: str, path: str, body: str, run: Run
) -> None:
    request = await received(run, script)
    assert (request["method"], request["path"], request["body"]) == (method, path, body)


HEADERS = [
    ("-H 'X-A: 1'", "X-A", "1"),
    ("-H 'X-A;'", "X-A", ""),
    ("-H 'Accept:'", "Accept", None),
    ("-A me/1", "User-Agent", "me/1"),
    ("-b 'a=1; b=2'", "Cookie", "a=1; b=2"),
    ("-e http://r/", "Referer", "http://r/"),
    ("-u user:pass", "Authorization", "Basic dXNlcjpwYXNz"),
    ("-d x", "Content-Type", "application/x-www-form-urlencoded"),
    ("-d x -H 'content-type: text/plain'", "content-type", "text/plain"),
    ("--json 1", "Accept", "application/json"),
    ("--compressed", "Accept-Encoding", "gzip, deflate"),
    ("-r 0-9", "Range", "bytes=0-9"),
]


@pytest.mark.parametrize(("options", "name", "value"), HEADERS)
async def test_headers_are_set(options: str, name: str, value: str | None, run: Run) -> None:
    request = await received(run, f"curl -s {options} $U/echo")
    assert request["headers"].get(name) == value


async def test_form_is_sent_in_parts(run: Run) -> None:
    request = await received(
        run, "echo data > f.txt; curl -s -F a=b -F 'f=@f.txt;type=text/x' -F 'g=<f.txt' $U/echo"
    )
    assert request["headers"]["Content-Type"].startswith("multipart/form-data; boundary=")
    assert 'name="a"\r\n\r\nb\r\n' in request["body"]
    assert 'filename="f.txt"\r\nContent-Type: text/x\r\n\r\ndata\n' in request["body"]
    assert 'name="g"\r\n\r\ndata\n' in request["body"]


OUTCOMES = [
    ("curl -s $U/status/404", 0, "status body\n"),
    ("curl -sf $U/status/404", 22, ""),
    ("curl -s --fail-with-body $U/status/500", 22, "status body\n"),
    ("curl -s -o /dev/null -w '%{http_code}' $U/status/404", 0, "404"),
    ("curl -s -w '\\n%{size_download} %{content_type}\\n' $U/big?n=3", 0, "xxx\n3 \n"),
    ("curl -s -o out -w '%{filename_effective}' $U/big?n=3; cat out", 0, "outxxx"),
    ("curl -s -O $U/big?n=3; cat big", 0, "xxx"),
    ("curl -s -o a $U/big?n=1 -o b $U/big?n=2; cat a b", 0, "xxx"),
    ("curl -s --create-dirs -o d/e/f $U/big?n=2; cat d/e/f", 0, "xx"),
    ("curl -s -o d/e/f $U/big?n=2", 23, ""),
    ("curl -s -O $U/", 23, ""),
    ("curl -sL \"$U/redirect?to=/big?n=1\" -w ' %{num_redirects}'", 0, "x 1"),
    ("curl -s \"$U/redirect?to=/x\" -w '%{redirect_url}' -o /dev/null | grep -c /x", 0, "1\n"),
    ("curl -sL --max-redirs 1 \"$U/redirect?to=/redirect?to=/redirect?to=/x\"", 47, ""),
    ("curl -s -d @nothere $U/echo", 26, ""),
    ("curl -s $U/cut", 18, "short"),
    ("curl -s http://127.0.0.1:1/", 7, ""),
    ("curl -s ftp://x/", 3, ""),
    ("curl -s 'http://a b/'", 3, ""),
    ("curl -s", 2, ""),
    ("curl --nonsense $U/", 2, ""),
    ("curl -m x $U/", 2, ""),
    ("curl -o", 2, ""),
    ("wget -q $U/status/404", 8, ""),
    ("wget -q $U/big?n=3 && cat big", 0, "xxx"),
    ("wget -q $U/big?n=3 $U/big?n=3 && ls", 0, "big\nbig.1\n"),
    ("wget -q -P d $U/big?n=3 && cat d/big", 0, "xxx"),
    ("wget -q --spider $U/echo", 0, ""),
    ("wget", 2, ""),
]  # fmt: skip


@pytest.mark.parametrize(("script", "code", "output"), OUTCOMES)
async def test_exit_codes_match_curl(script: str, code: int, output: str, run: Run) -> None:
    result = await run(script)
    assert (result.exit_code, result.stdout) == (code, output), result.stderr


async def test_errors_are_silent_only_with_the_option(run: Run) -> None:
    quiet, loud = await run("curl -sf $U/status/404"), await run("curl -sSf $U/status/404")
    assert quiet.stderr == ""
    assert loud.stderr == "curl: (22) The requested URL returned error: 404\n"


async def test_response_headers_are_shown_with_the_option(run: Run) -> None:
    shown = (await run("curl -si $U/big?n=1")).stdout
    assert shown.startswith("HTTP/1.1 200 OK\r\n") and shown.endswith("\r\n\r\nx")
    only = (await run("curl -sI $U/big?n=1")).stdout
    assert "Content-Length: 1\r\n" in only and only.endswith("\r\n\r\n")
    dumped = (await run("curl -s -D heads -o /dev/null $U/big?n=1; head -1 heads")).stdout
    assert dumped == "HTTP/1.1 200 OK\r\n"


async def test_verbose_prints_both_sides_on_stderr(run: Run) -> None:
    result = await run("curl -sv $U/big?n=1")
    assert result.stdout == "x"
    assert "> GET /big?n=1 HTTP/1.1\n" in result.stderr and "< HTTP/1.1 200 OK\n" in result.stderr


async def test_compressed_responses_are_decoded_with_the_option(run: Run) -> None:
    assert (await received(run, "curl -s --compressed $U/gzip"))["path"] == "/gzip"
    assert (await received(run, "curl -s $U/gzip | gunzip"))["path"] == "/gzip"


async def test_transient_failures_are_retried(run: Run, site: Website) -> None:
    result = await run("curl -sf --retry 2 --retry-delay 0.01 $U/status/503")
    assert result.exit_code == 22
    assert len(site.seen) == 3


@pytest.mark.parametrize("option", ["-k", "-x p:1", "--resolve a:1:b", "--unix-socket s", "-K f"])
async def test_options_that_bypass_the_policy_are_refused(
    option: str, run: Run, site: Website
) -> None:
    result = await run(f"curl {option} $U/echo")
    assert result.exit_code == 2
    assert "is refused" in result.stderr
    assert site.seen == []


async def test_large_body_streams_through_a_pipe(run: Run) -> None:
    assert (await run("curl -s $U/big?n=5000000 | wc -c")).stdout.strip() == "5000000"
