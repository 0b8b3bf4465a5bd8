"""The clients of providers' SDKs that requests go out by: no retries, and no work done twice.

The SDKs look at each message of each request, with its type at hand or to copy it: most of the
time of a request with 400 messages. Here messages go past that, by `extra_body`, as they are.
Their connections are aiohttp's, which takes half the time of what they use by themselves.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec
from openai import AsyncOpenAI, DefaultAioHttpClient
from openai.resources.chat import AsyncChat, AsyncCompletions

if TYPE_CHECKING:
    from ssl import SSLContext

    from anthropic import AsyncAnthropic

    from smokebox.agents.providers import Provider

# The loop has its own deadline for a model that falls silent: this is the last resort.
TIMEOUT = 600.0
# Servers without keys are sent one, because the SDK wants it.
NO_KEY = "none"


class _Completions(AsyncCompletions):
    async def create(self, **options: Any) -> Any:
        return await super().create(**_past(options))


class _Chat(AsyncChat):
    @functools.cached_property
    def completions(self) -> AsyncCompletions:
        return _Completions(self._client)


class _OpenAI(AsyncOpenAI):
    @functools.cached_property
    def chat(self) -> AsyncChat:
        return _Chat(self)


def _past(options: dict[str, Any]) -> dict[str, Any]:
    body = {**(options.get("extra_body") or {}), "messages": options["messages"]}
    return {**options, "messages": [], "extra_body": body}


def _fill(options: Any, body: dict[str, Any]) -> None:
    """Have a body sent as bytes, unless the SDK's own encoder has to see to some of it."""
    try:
        options.content, options.json_data = msgspec.json.encode(body), None
    except TypeError:
        options.json_data = body


@functools.cache
def _trusted() -> SSLContext:
    """Whom connections trust, read once: it takes longer than a turn."""
    import httpx2

    return httpx2.create_ssl_context()


def openai_client(provider: Provider) -> AsyncOpenAI:
    """A client for what speaks OpenAI's dialects."""
    return _OpenAI(
        api_key=provider.key() or NO_KEY,
        base_url=provider.base_url,
        default_headers=dict(provider.headers),
        max_retries=0,
        timeout=TIMEOUT,
        http_client=DefaultAioHttpClient(timeout=TIMEOUT, verify=_trusted()),
    )


def anthropic_client(provider: Provider) -> AsyncAnthropic:
    """A client for what speaks Anthropic's dialect."""
    from anthropic import AsyncAnthropic
    from anthropic.resources.beta import AsyncBeta
    from anthropic.resources.beta.messages import AsyncMessages

    class Messages(AsyncMessages):
        async def create(self, **options: Any) -> Any:
            return await super().create(**_past(options))

    class Beta(AsyncBeta):
        @functools.cached_property
        def messages(self) -> AsyncMessages:
            return Messages(self._client)

    class Anthropic(AsyncAnthropic):
        @functools.cached_property
        def beta(self) -> AsyncBeta:
            return Beta(self)

        async def _copy_and_prepare(self, options: Any) -> Any:
            # Copies all that is sent. Where an SDK has no such method, it is never called.
            extra = dict(options.extra_json or {})
            messages = extra.pop("messages", None)
            options.extra_json = extra or None
            prepared: Any = await super()._copy_and_prepare(options)
            if messages is not None:
                _fill(prepared, {**prepared.json_data, "messages": messages})
            return prepared

    return Anthropic(
        api_key=provider.key() or NO_KEY,
        base_url=provider.base_url,
        default_headers=dict(provider.headers),
        max_retries=0,
        timeout=TIMEOUT,
        http_client=DefaultAioHttpClient(timeout=TIMEOUT, verify=_trusted()),
    )
