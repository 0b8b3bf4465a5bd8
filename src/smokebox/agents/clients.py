"""Clients of the providers' SDKs, without retries and without per-message overhead.

The SDKs transform or copy every message of every request, which takes most of the time of a
request with 400 messages. Here messages bypass that through `extra_body`. Connections use
aiohttp, which takes half the time of the SDKs' default transport.
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

# The loop has its own deadline for a model that sends nothing: this is the last resort.
TIMEOUT = 600.0
# The SDK requires a key, even for a server that needs none.
NO_KEY = "none"


class _Completions(AsyncCompletions):
    async def create(self, **options: Any) -> Any:
        return await super().create(**_bypass_sdk(options))


class _Chat(AsyncChat):
    @functools.cached_property
    def completions(self) -> AsyncCompletions:
        return _Completions(self._client)


class _OpenAI(AsyncOpenAI):
    @functools.cached_property
    def chat(self) -> AsyncChat:
        return _Chat(self)


def _bypass_sdk(options: dict[str, Any]) -> dict[str, Any]:
    body = {**(options.get("extra_body") or {}), "messages": options["messages"]}
    return {**options, "messages": [], "extra_body": body}


def _set_body(options: Any, body: dict[str, Any]) -> None:
    """Encode the body here, unless it holds values that only the SDK's encoder handles."""
    try:
        options.content, options.json_data = msgspec.json.encode(body), None
    except TypeError:
        options.json_data = body


@functools.cache
def _ssl_context() -> SSLContext:
    """Return the TLS context, loaded once: loading the CA bundle takes longer than a turn."""
    import httpx2

    return httpx2.create_ssl_context()


def openai_client(provider: Provider) -> AsyncOpenAI:
    """Return a client for a server with OpenAI's APIs."""
    return _OpenAI(
        api_key=provider.key() or NO_KEY,
        base_url=provider.base_url,
        default_headers=dict(provider.headers),
        max_retries=0,
        timeout=TIMEOUT,
        http_client=DefaultAioHttpClient(timeout=TIMEOUT, verify=_ssl_context()),
    )


def anthropic_client(provider: Provider) -> AsyncAnthropic:
    """Return a client for a server with Anthropic's API."""
    from anthropic import AsyncAnthropic
    from anthropic.resources.beta import AsyncBeta
    from anthropic.resources.beta.messages import AsyncMessages

    class Messages(AsyncMessages):
        async def create(self, **options: Any) -> Any:
            return await super().create(**_bypass_sdk(options))

    class Beta(AsyncBeta):
        @functools.cached_property
        def messages(self) -> AsyncMessages:
            return Messages(self._client)

    class Anthropic(AsyncAnthropic):
        @functools.cached_property
        def beta(self) -> AsyncBeta:
            return Beta(self)

        async def _copy_and_prepare(self, options: Any) -> Any:
            # The SDK's method copies the whole body, so the messages are kept out of it. It is
            # private: in an SDK version without it, this override is never called.
            extra = dict(options.extra_json or {})
            messages = extra.pop("messages", None)
            options.extra_json = extra or None
            prepared: Any = await super()._copy_and_prepare(options)
            if messages is not None:
                _set_body(prepared, {**prepared.json_data, "messages": messages})
            return prepared

    return Anthropic(
        api_key=provider.key() or NO_KEY,
        base_url=provider.base_url,
        default_headers=dict(provider.headers),
        max_retries=0,
        timeout=TIMEOUT,
        http_client=DefaultAioHttpClient(timeout=TIMEOUT, verify=_ssl_context()),
    )
