"""The server itself: sockets, a script, and a memory of what it was asked."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from aiohttp import web

from smokebox.agents.messages import Usage
from smokebox.testing.fake.anthropic import Anthropic
from smokebox.testing.fake.dialect import Rejected, Reply
from smokebox.testing.fake.endpoint import Endpoint, lower_headers
from smokebox.testing.fake.openai import OpenAI
from smokebox.testing.loopback import LoopbackServer
from smokebox.testing.turns import (
    Turn,
    estimate_tokens,
    last_text,
    parts_of,
    stop_of,
    written,
)

if TYPE_CHECKING:
    from smokebox.agents.model import ModelRequest
    from smokebox.testing.fake.dialect import Parsed
    from smokebox.testing.fake.endpoint import Received, Scripted


class FakeModelServer(LoopbackServer):
    """Real HTTP on the loopback that speaks Anthropic's Messages and OpenAI's chat completions.

        async with FakeModelServer(call("bash", command="ls"), "One file.") as server:
            model = open_model("openai/gpt", config=server.config)

    Turns are those of `ScriptedModel`, and the faults of `smokebox.testing.faults` besides.
    What the real ones reject is rejected, in their words. `received` has every request.
    `with` instead of `async with` runs it on a thread of its own.

    `context_window` is how many tokens it reads before it says that they are too many, and
    `models` the names that it knows, by default any.
    """

    api_key = "test-key"

    def __init__(
        self,
        *script: Scripted,
        then: Scripted | None = None,
        models: tuple[str, ...] | None = None,
        context_window: int | None = None,
        chunk: int = 16,
    ) -> None:
        self._script = script
        self._then = then
        self._models = models
        self._window = context_window
        self._chunk = max(1, chunk)
        self._asked = itertools.count(1)
        self._cached: set[int] = set()
        self.received: list[Received] = []

    @property
    def url(self) -> str:
        """Where it listens, without a path."""
        return self._origin

    @property
    def config(self) -> dict[str, dict[str, str]]:
        """What `open_model` takes, so that requests to the providers come here."""
        urls = {"anthropic": "", "openai": "/v1", "openrouter": "/api/v1"}
        return {
            name: {"base_url": self._origin + path, "api_key": self.api_key}
            for name, path in urls.items()
        }

    @property
    def requests(self) -> list[ModelRequest]:
        """What it was asked and did not reject."""
        return [one.request for one in self.received if one.request is not None]

    def routes(self, router: web.UrlDispatcher) -> None:
        """What a proxy of a company does, too: providers are found below any prefix."""
        for path, name, dialect in (
            ("/v1/messages", "anthropic", Anthropic()),
            ("/v1/chat/completions", "openai", OpenAI()),
            ("/api/v1/chat/completions", "openrouter", OpenAI(reasoning=True)),
        ):
            router.add_post(path, Endpoint(self, name, dialect).answer)
        for path in ("/v1/models", "/api/v1/models"):
            router.add_get(path, self._list_models)

    def next_turn(self, request: ModelRequest) -> tuple[int, Scripted]:
        """The number of the turn that is asked for, and what is written for it."""
        number = next(self._asked)
        if number <= len(self._script):
            return number, self._script[number - 1]
        if self._then is not None:
            return number, self._then
        # A status that no client tries again: the test is to end, and to say why.
        raise Rejected(
            f"the script of FakeModelServer has {len(self._script)} turns, and was asked for turn "
            f"{number}. It was told last: {last_text(request)[:200]!r}. Write one more turn, or "
            "give then= what answers all further requests."
        )

    def reply(self, number: int, turn: Turn, parsed: Parsed) -> Reply:
        """A turn as what is answered, with what it takes."""
        parts = parts_of(turn, number=number)
        return Reply(
            id=f"msg_{number}",
            model=parsed.model,
            parts=parts,
            stop=stop_of(turn, parts),
            usage=turn.usage or self._usage(parsed, estimate_tokens(written(parts))),
            chunk=self._chunk,
        )

    def check(self, parsed: Parsed) -> None:
        """Reject a model that is not known, and more than it can read."""
        if self._models is not None and parsed.model not in self._models:
            raise Rejected(f"model: {parsed.model}", "not_found")
        tokens = sum(map(estimate_tokens, parsed.blocks))
        if self._window is not None and tokens > self._window:
            raise Rejected(
                f"prompt is too long: {tokens} tokens > {self._window} maximum. This model's "
                f"maximum context length is {self._window} tokens.",
                "too_long",
            )

    def _usage(self, parsed: Parsed, output: int) -> Usage:
        """As a provider counts that has cached every request up to now."""
        seen, total, cached = 0, 0, 0
        for block in parsed.blocks:
            seen = hash((seen, block))
            total += estimate_tokens(block)
            cached = total if seen in self._cached else cached
        self._cached.add(seen)
        cached = cached if parsed.caches != "no" else 0
        return Usage(
            requests=1,
            input_tokens=total,
            output_tokens=output,
            cache_read_tokens=cached,
            cache_write_tokens=total - cached if parsed.caches == "marked" else 0,
        )

    async def _list_models(self, request: web.Request) -> web.Response:
        if not OpenAI().authorized(lower_headers(request), self.api_key):
            failure = OpenAI().failure("unauthorized", "Incorrect API key provided.")
            return web.json_response(failure.body, status=failure.status)
        listed = [{"id": name, "object": "model"} for name in self._models or ("fake",)]
        return web.json_response({"object": "list", "data": listed})
