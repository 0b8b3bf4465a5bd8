"""Models of providers by name, through pydantic-ai, which is imported on first use.

Only the model classes of pydantic-ai are used: they convert messages to a provider's format,
and its response to events. The loop, the retries and the tools are Smokebox's.
"""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from smokebox.agents.messages import (
    AssistantMessage,
    NativePart,
    Text,
    Thinking,
    ToolCall,
    Usage,
    UserMessage,
)
from smokebox.agents.model import CallDelta, ModelInfo, TextDelta, ThinkingDelta
from smokebox.agents.providers import find_model
from smokebox.errors import (
    ContextOverflow,
    MissingDependency,
    ModelError,
    ModelRefused,
    ModelUnavailable,
    SmokeboxError,
)
from smokebox.project import load_config

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from openai import AsyncOpenAI
    from pydantic_ai.messages import (
        ModelMessage,
        ModelResponse,
        ModelResponsePart,
        ModelResponseStreamEvent,
    )
    from pydantic_ai.models import Model as TheirModel
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.providers import Provider as TheirProvider
    from pydantic_ai.settings import ModelSettings

    from smokebox.agents.messages import AssistantPart, Image, Message, StopReason
    from smokebox.agents.model import Delta, Model, ModelRequest
    from smokebox.agents.pricing import Price
    from smokebox.agents.providers import Named

_STOPS: dict[str | None, StopReason] = {"length": "length", "content_filter": "refused"}
_NOTHING = "(nothing)"
_UNSEEN = "(a picture, which this model cannot see)"
_KEPT_PARAMETERS = 8
_LONGEST_REASON = 500
# Status of a request with too many bytes: compaction fixes that too.
_TOO_LARGE = 413
_WITH_WAYS_OF_THEIR_OWN = ("deepseek", "fireworks", "moonshotai", "ollama", "together")


def open_model(spec: str | Model, config: Mapping[str, Mapping[str, Any]] | None = None) -> Model:
    """Return the model named `provider/model`; a `Model` is returned as it is.

    Nothing is imported and no request is sent before the model is used.

    Args:
        config: The `[models]` table, by default that of smokebox.toml.

    Raises:
        InvalidOption: The provider is unknown.
        ModelRefused: The provider's key is missing.
    """
    if not isinstance(spec, str):
        return spec
    named = find_model(spec, load_config().models if config is None else config)
    named.provider.key()
    return ProviderModel(named)


class ProviderModel:
    """A model that a provider serves."""

    def __init__(self, named: Named) -> None:
        self._named = named
        self._lock = threading.Lock()
        self._link: _Link | None = None
        self._held: AsyncGenerator[None, None] | None = None

    @property
    def name(self) -> str:
        return self._named.name

    @property
    def info(self) -> ModelInfo:
        return self._linked().info

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Delta | AssistantMessage, None]:
        # The first import takes about a second: do it outside the event loop.
        link = self._link
        if link is None:
            link = await asyncio.to_thread(self._linked)
        if self._held is None:
            self._held = self._hold(link)
            await anext(self._held)
        names: dict[int, str] = {}
        try:
            messages = await link.messages(request)
            settings, parameters = link.settings(request), link.parameters(request)
            async with link.model.request_stream(messages, settings, parameters) as answer:
                async for event in answer:
                    if (delta := _delta(event, names)) is not None:
                        yield delta
                response = answer.get()
            message = link.message(response, self.name)
        except SmokeboxError:
            raise
        except Exception as error:
            raise _ours(error, self._named) from error
        yield message

    async def aclose(self) -> None:
        link, self._link = self._link, None
        if self._held is not None:
            await self._held.aclose()
        elif link is not None:
            await link.close()

    async def _hold(self, link: _Link) -> AsyncGenerator[None, None]:
        """Close the connections on `aclose`, or when the event loop shuts its generators down.

        Connections belong to one event loop; in another the model opens its own.
        """
        try:
            yield
        finally:
            self._link = self._held = None
            await link.close()

    def _linked(self) -> _Link:
        with self._lock:
            if self._link is None:
                self._link = _connect(self._named)
            return self._link

    def __repr__(self) -> str:
        return f"<model {self.name}>"


@dataclass(slots=True)
class _Link:
    """A pydantic-ai model, with caches of converted messages and parameters."""

    model: TheirModel
    info: ModelInfo
    price: Price | None
    close: Callable[[], Awaitable[None]]
    # Anthropic takes tool arguments as an object, the others as text: parse once, not each turn.
    objects: bool
    lenient: bool
    max_tokens: int | None
    _converted: dict[int, tuple[weakref.ref[Message], ModelMessage]] = field(default_factory=dict)
    _parameters: dict[tuple[object, ...], tuple[object, ModelRequestParameters]] = field(
        default_factory=dict
    )

    async def messages(self, request: ModelRequest) -> list[ModelMessage]:
        """Convert the conversation. Each message is converted once while it lives."""
        messages = []
        for message in request.messages:
            known = self._converted.get(id(message))
            if known is None or known[0]() is not message:
                known = (self._reference(message), await self._convert(message, request))
                self._converted[id(message)] = known
            messages.append(known[1])
        return messages

    def _reference(self, message: Message) -> weakref.ref[Message]:
        converted, key = self._converted, id(message)
        return weakref.ref(message, lambda _: converted.pop(key, None))

    async def _convert(self, message: Message, request: ModelRequest) -> ModelMessage:
        from pydantic_ai.messages import ModelRequest as TheirRequest
        from pydantic_ai.messages import ToolReturnPart, UserPromptPart

        if isinstance(message, AssistantMessage):
            return self._said(message)
        if isinstance(message, UserMessage):
            pictures = [part for part in message.parts if not isinstance(part, Text)]
            words = [part.text for part in message.parts if isinstance(part, Text)]
            content = await self._content("\n".join(words), pictures, request)
            return TheirRequest(parts=[UserPromptPart(content=content)])
        return TheirRequest(
            parts=[
                ToolReturnPart(
                    tool_name=back.name,
                    content=await self._content(back.text, back.images, request),
                    tool_call_id=back.call_id,
                    outcome="failed" if back.is_error else "success",
                )
                for back in message.returns
            ]
        )

    async def _content(self, text: str, pictures: Sequence[Image], request: ModelRequest) -> Any:
        from pydantic_ai.messages import BinaryContent

        # Providers reject text that is empty or only whitespace.
        if not pictures:
            return text if text.strip() else _NOTHING
        content: list[str | BinaryContent] = [text] if text.strip() else []
        for picture in pictures:
            if request.load is None or not self.info.images:
                content.append(_UNSEEN)
            else:
                data = await request.load(picture)
                content.append(BinaryContent(data=data, media_type=picture.media_type))
        return content

    def _said(self, message: AssistantMessage) -> ModelResponse:
        from pydantic_ai.messages import ModelResponse

        provider, _, name = message.model.partition("/")
        parts = [self._part(part, provider) for part in message.parts]
        return ModelResponse(parts=parts, model_name=name, provider_name=provider)

    def _part(self, part: AssistantPart, provider: str) -> ModelResponsePart:
        from pydantic import TypeAdapter
        from pydantic_ai import messages as theirs

        if isinstance(part, NativePart):
            kind: TypeAdapter[ModelResponsePart] = TypeAdapter(theirs.ModelResponsePart)
            return kind.validate_python(part.data)
        extra = part.extra or {}
        more: dict[str, Any] = {
            "id": extra.get("id"),
            "provider_name": provider,
            "provider_details": extra.get("details"),
        }
        if isinstance(part, Text):
            return theirs.TextPart(part.text, **more)
        if isinstance(part, Thinking):
            return theirs.ThinkingPart(part.text, signature=part.signature, **more)
        given = _arguments(part.arguments)
        args = given if self.objects else _as_sent(part.arguments, given)
        return theirs.ToolCallPart(part.name, args, tool_call_id=part.id, **more)

    def settings(self, request: ModelRequest) -> ModelSettings:
        """Return the settings of a request: caching, output limit and thinking."""
        # Some providers cache tools, instructions and messages only on request.
        settings: ModelSettings = {"cache": True}
        if (most := request.max_tokens or self.max_tokens) is not None:
            settings["max_tokens"] = most
        if request.thinking is not None and self.info.thinking:
            settings["thinking"] = False if request.thinking == "off" else request.thinking
        return settings

    def parameters(self, request: ModelRequest) -> ModelRequestParameters:
        """Return instructions, tools and schema, cached because most turns repeat them."""
        from pydantic_ai.messages import InstructionPart
        from pydantic_ai.models import ModelRequestParameters
        from pydantic_ai.output import OutputObjectDefinition
        from pydantic_ai.tools import ToolDefinition

        key = (request.system, *map(id, request.tools), id(request.result))
        if (known := self._parameters.get(key)) is not None:
            return known[1]
        made = ModelRequestParameters(
            function_tools=[
                ToolDefinition(
                    name=tool.name,
                    description=tool.description,
                    parameters_json_schema=dict(tool.parameters),
                )
                for tool in request.tools
            ],
            instruction_parts=[InstructionPart(content=request.system)] if request.system else [],
        )
        if request.result is not None:
            made.output_mode = "native"
            made.output_object = OutputObjectDefinition(json_schema=dict(request.result))
        while len(self._parameters) >= _KEPT_PARAMETERS:
            del self._parameters[next(iter(self._parameters))]
        # Keep the objects whose ids are in the key, so that no other object gets those ids.
        self._parameters[key] = ((tuple(request.tools), request.result), made)
        return made

    def message(self, response: ModelResponse, name: str) -> AssistantMessage:
        """Convert a response. Raises `ModelUnavailable` if the stream was cut off."""
        parts = tuple(part for each in response.parts if (part := _heard(each)) is not None)
        used, details = response.usage, response.provider_details or {}
        # A stream that ends without a finish reason was cut off. Small servers send none, but
        # end with their usage.
        ended = bool(used.input_tokens) if self.lenient else response.finish_reason is not None
        if not ended and "finish_reason" not in details:
            raise ModelUnavailable(
                f"{name} stopped in the middle of its answer.",
                hint="Send the prompt again.",
                model=name,
                retry_after=None,
                status=None,
            )
        usage = Usage(
            requests=1,
            input_tokens=used.input_tokens,
            output_tokens=used.output_tokens,
            cache_read_tokens=used.cache_read_tokens,
            cache_write_tokens=used.cache_write_tokens,
            cost=None,
        )
        # A cost that the provider reports is more accurate than the price table.
        cost = details.get("cost")
        if not isinstance(cost, int | float):
            cost = self.price.cost(usage) if self.price else None
        calls = any(isinstance(part, ToolCall) for part in parts)
        return AssistantMessage(
            parts=parts,
            model=name,
            stop=_STOPS.get(response.finish_reason, "tool_calls" if calls else "end"),
            usage=msgspec.structs.replace(usage, cost=cost),
        )


def _delta(event: ModelResponseStreamEvent, names: dict[int, str]) -> Delta | None:
    from pydantic_ai import messages as theirs

    if isinstance(event, theirs.PartDeltaEvent):
        delta = event.delta
        if isinstance(delta, theirs.TextPartDelta):
            return TextDelta(delta.content_delta) if delta.content_delta else None
        if isinstance(delta, theirs.ThinkingPartDelta):
            return ThinkingDelta(delta.content_delta) if delta.content_delta else None
        return CallDelta(names.get(event.index, ""))
    if isinstance(event, theirs.PartStartEvent):
        part = event.part
        if isinstance(part, theirs.TextPart):
            return TextDelta(part.content) if part.content else None
        if isinstance(part, theirs.ThinkingPart):
            return ThinkingDelta(part.content) if part.content else None
        if isinstance(part, theirs.ToolCallPart):
            names[event.index] = part.tool_name
            return CallDelta(part.tool_name)
    return None


def _heard(part: ModelResponsePart) -> AssistantPart | None:
    from pydantic import TypeAdapter
    from pydantic_ai import messages as theirs

    if isinstance(part, theirs.TextPart):
        return Text(part.content, _extra(part.id, part.provider_details)) if part.content else None
    if isinstance(part, theirs.ThinkingPart):
        extra = _extra(part.id, part.provider_details)
        return Thinking(part.content, part.signature, extra)
    if isinstance(part, theirs.ToolCallPart):
        extra = _extra(part.id, part.provider_details)
        arguments = part.args if isinstance(part.args, str) else part.args_as_json_str()
        return ToolCall(part.tool_call_id, part.tool_name, arguments or "{}", extra)
    kind: TypeAdapter[ModelResponsePart] = TypeAdapter(theirs.ModelResponsePart)
    return NativePart(part.provider_name or "", kind.dump_python(part, mode="json"))


def _extra(identity: str | None, details: dict[str, Any] | None) -> dict[str, Any] | None:
    extra = {"id": identity, "details": details}
    return {key: value for key, value in extra.items() if value} or None


def _arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call; invalid JSON is wrapped in an object."""
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    return given if isinstance(given, dict) else {"not_valid_json": text}


def _as_sent(text: str, given: dict[str, Any]) -> str:
    """Return the arguments as valid JSON: some servers reject a conversation with broken JSON."""
    return json.dumps(given) if "not_valid_json" in given else text


def _connect(named: Named) -> _Link:
    try:
        model, close = _open(named)
    except ImportError as error:
        raise MissingDependency(
            f"{named.name} needs a package that is not installed: {error.name or error}.",
            hint="Run: pip install 'smokebox[models]'"
            + (" 'pydantic-ai-slim[google]'." if named.provider.api == "google" else "."),
            package=error.name or "pydantic-ai-slim",
            extra="models",
        ) from error
    from smokebox.agents.pricing import find_price

    provider, profile = named.provider, model.profile
    price = find_price(provider.name, named.model)
    known = profile.get("context_window") or (price.context_window if price else None)
    thinks = bool(profile.get("supports_thinking", False))
    holds = bool(profile.get("supports_json_schema_output", False))
    sees = profile.get("supports_image_input", True)
    return _Link(
        model=model,
        info=ModelInfo(
            context_window=provider.context_window or known,
            max_output=provider.max_output,
            images=sees if provider.images is None else provider.images,
            thinking=thinks if provider.thinking is None else provider.thinking,
            native_results=holds if provider.native_results is None else provider.native_results,
        ),
        price=price,
        close=close,
        objects=provider.api == "anthropic",
        lenient=provider.api in ("chat", "openrouter"),
        max_tokens=provider.max_output,
    )


def _open(named: Named) -> tuple[TheirModel, Callable[[], Awaitable[None]]]:
    """Return a pydantic-ai model, and the function that closes its connections."""
    provider, name = named.provider, named.model
    if provider.api == "google":
        return _open_google(named)
    if provider.api == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        from smokebox.agents.clients import anthropic_client

        theirs = anthropic_client(provider)
        return AnthropicModel(
            name, provider=AnthropicProvider(anthropic_client=theirs)
        ), theirs.close
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.models.openrouter import OpenRouterModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.providers.openrouter import OpenRouterProvider

    from smokebox.agents.clients import openai_client

    client = openai_client(provider)
    if provider.api == "openrouter":
        return OpenRouterModel(
            name, provider=OpenRouterProvider(openai_client=client)
        ), client.close
    kind = OpenAIResponsesModel if provider.api == "responses" else OpenAIChatModel
    if provider.name == "openai":
        return kind(name, provider=OpenAIProvider(openai_client=client)), client.close
    return kind(name, provider=_compatible(provider.name, client)), client.close


def _compatible(name: str, client: AsyncOpenAI) -> TheirProvider[AsyncOpenAI]:
    """Return a provider with OpenAI's chat API, with its known deviations from it."""
    from pydantic_ai.providers import infer_provider_class
    from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider

    if name in _WITH_WAYS_OF_THEIR_OWN:
        kind: Any = infer_provider_class(name)
        provider: TheirProvider[AsyncOpenAI] = kind(openai_client=client)
        return provider
    return OpenAICompatibleProvider(name, openai_client=client)


def _open_google(named: Named) -> tuple[TheirModel, Callable[[], Awaitable[None]]]:
    from google.genai import Client
    from google.genai.types import HttpOptions, HttpRetryOptions
    from pydantic_ai.models.google import GoogleModel
    from pydantic_ai.providers.google import GoogleProvider

    provider = named.provider
    client = Client(
        api_key=provider.key(),
        http_options=HttpOptions(
            base_url=provider.base_url,
            headers=dict(provider.headers),
            retry_options=HttpRetryOptions(attempts=1),
        ),
    )
    return GoogleModel(named.model, provider=GoogleProvider(client=client)), client.aio.aclose


def _ours(error: Exception, named: Named) -> ModelError:
    """Convert an error of pydantic-ai or an SDK to a `ModelError`."""
    from pydantic_ai import exceptions as theirs

    status = getattr(error, "status_code", None)
    retry_after = getattr(error, "retry_after", None)
    fields: dict[str, Any] = {"model": named.name, "status": status}
    said = _reason(error)
    if isinstance(error, theirs.ModelContextWindowExceededError) or status == _TOO_LARGE:
        return ContextOverflow(
            f"the conversation is too long for {named.name}: {said}",
            hint="Compact the session, or start another.",
            **fields,
        )
    if isinstance(error, theirs.ModelAuthenticationError):
        variable = " or ".join(named.provider.api_key_env) or "the key"
        return ModelRefused(
            f"{named.name} rejected the key: {said}", hint=f"Check {variable}.", **fields
        )
    if isinstance(error, theirs.ModelNotFoundError):
        near = getattr(error, "suggested_model_id", None)
        hint = f"Did you mean {near.replace(':', '/')!r}?" if near else "Check its name."
        return ModelRefused(f"there is no model {named.name}: {said}", hint=hint, **fields)
    if isinstance(error, _refusals()):
        hint = "The same request will be refused again: change it, or use another model."
        return ModelRefused(f"{named.name} refused the request: {said}", hint=hint, **fields)
    return ModelUnavailable(
        f"{named.name} gave no answer: {said}",
        hint="Try again later, or give the agent a list of models to fall back on.",
        retry_after=retry_after,
        **fields,
    )


def _refusals() -> tuple[type[Exception], ...]:
    from pydantic_ai import exceptions as theirs

    return (
        theirs.ModelRequestRejectedError,
        theirs.ModelQuotaExceededError,
        theirs.ContentFilterError,
        theirs.UserError,
        TypeError,
    )


def _reason(error: Exception) -> str:
    """Return the message in the body of an error response, or that of the exception."""
    body = getattr(error, "body", None)
    if isinstance(body, dict):
        told = body.get("error", body)
        if isinstance(told, dict) and isinstance(message := told.get("message"), str):
            return message[:_LONGEST_REASON]
    return (str(error) or type(error).__name__)[:_LONGEST_REASON]
