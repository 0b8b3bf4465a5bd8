"""The clients of providers' SDKs that requests go out by: no retries, and no work done twice."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI
from openai.resources.chat import AsyncChat, AsyncCompletions

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

    from smokebox.agents.providers import Provider

# The loop has its own deadline for a model that falls silent: this is the last resort.
TIMEOUT = 600.0
# Servers without keys are sent one, because the SDK wants it.
NO_KEY = "none"


class _Completions(AsyncCompletions):
    """Sends messages as they are.

    The SDK walks through each message of each request with its type at hand, to rename keys
    that have no other name: nine tenths of the time of a request with 400 messages.
    """

    async def create(self, **options: Any) -> Any:
        body = {**(options.pop("extra_body", None) or {}), "messages": options["messages"]}
        return await super().create(**{**options, "messages": [], "extra_body": body})


class _Chat(AsyncChat):
    @functools.cached_property
    def completions(self) -> AsyncCompletions:
        return _Completions(self._client)


class _OpenAI(AsyncOpenAI):
    @functools.cached_property
    def chat(self) -> AsyncChat:
        return _Chat(self)


def openai_client(provider: Provider) -> AsyncOpenAI:
    """A client for what speaks OpenAI's dialects."""
    return _OpenAI(
        api_key=provider.key() or NO_KEY,
        base_url=provider.base_url,
        default_headers=dict(provider.headers),
        max_retries=0,
        timeout=TIMEOUT,
    )


def anthropic_client(provider: Provider) -> AsyncAnthropic:
    """A client for what speaks Anthropic's dialect."""
    from anthropic import AsyncAnthropic

    return AsyncAnthropic(
        api_key=provider.key() or NO_KEY,
        base_url=provider.base_url,
        default_headers=dict(provider.headers),
        max_retries=0,
        timeout=TIMEOUT,
    )
