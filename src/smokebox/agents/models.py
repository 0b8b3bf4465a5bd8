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
    from pydantic_ai.models import Model as PydanticModel
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.providers import Provider as PydanticProvider
    from pydantic_ai.settings import ModelSettings

    from smokebox.agents.messages import AssistantPart, ImagePart, Message, StopReason
    from smokebox.agents.model import Delta, Model, ModelRequest
    from smokebox.agents.pricing import Price
    from smokebox.agents.providers import NamedModel

_STOPS: dict[str | None, StopReason] = {"length": "length", "content_filter": "refused"}
_EMPTY = "(nothing)"
_UNSUPPORTED_IMAGE = "(an image, which this model cannot see)"
_MAX_CACHED_PARAMETERS = 8
_MAX_REASON = 500
# Status of a request with too many bytes: compaction fixes that too.
_TOO_LARGE = 413
_DEVIATING_PROVIDERS = ("deepseek", "fireworks", "moonshotai", "ollama", "together")


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

    def __init__(self, named: NamedModel) -> None:
        self._named = named
        self._lock = threading.Lock()
        self._adapter: _Adapter | None = None
        self._holder: AsyncGenerator[None, None] | None = None

    @property
    def name(self) -> str:
        return self._named.name

    @property
    def info(self) -> ModelInfo:
        return self._open_adapter().info

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Delta | AssistantMessage, None]:
        # The first import takes about a second: do it outside the event loop.
        adapter = self._adapter
        if adapter is None:
            adapter = await asyncio.to_thread(self._open_adapter)
        if self._holder is None:
            self._holder = self._hold(adapter)
            await anext(self._holder)
        names: dict[int, str] = {}
        try:
            messages = await adapter.messages(request)
            settings, parameters = adapter.settings(request), adapter.parameters(request)
            async with adapter.model.request_stream(messages, settings, parameters) as stream:
                async for event in stream:
                    if (delta := _delta(event, names)) is not None:
                        yield delta
                response = stream.get()
            message = adapter.message(response, self.name)
        except SmokeboxError:
            raise
        except Exception as error:
            raise _translate(error, self._named) from error
        yield message

    async def aclose(self) -> None:
        adapter, self._adapter = self._adapter, None
        if self._holder is not None:
            await self._holder.aclose()
        elif adapter is not None:
            await adapter.close()

    async def _hold(self, adapter: _Adapter) -> AsyncGenerator[None, None]:
        """Close the connections on `aclose`, or when the event loop shuts its generators down.

        Connections belong to one event loop; in another the model opens its own.
        """
        try:
            yield
        finally:
            self._adapter = self._holder = None
            await adapter.close()

    def _open_adapter(self) -> _Adapter:
        with self._lock:
            if self._adapter is None:
                self._adapter = _connect(self._named)
            return self._adapter

    def __repr__(self) -> str:
        return f"<model {self.name}>"


@dataclass(slots=True)
class _Adapter:
    """A pydantic-ai model, with caches of converted messages and parameters."""

    model: PydanticModel
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
        from pydantic_ai.messages import ModelRequest as PydanticRequest
        from pydantic_ai.messages import ToolReturnPart, UserPromptPart

        if isinstance(message, AssistantMessage):
            return self._convert_reply(message)
        if isinstance(message, UserMessage):
            images = [part for part in message.parts if not isinstance(part, Text)]
            texts = [part.text for part in message.parts if isinstance(part, Text)]
            content = await self._content("\n".join(texts), images, request)
            return PydanticRequest(parts=[UserPromptPart(content=content)])
        return PydanticRequest(
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

    async def _content(self, text: str, images: Sequence[ImagePart], request: ModelRequest) -> Any:
        from pydantic_ai.messages import BinaryContent

        # Providers reject text that is empty or only whitespace.
        if not images:
            return text if text.strip() else _EMPTY
        content: list[str | BinaryContent] = [text] if text.strip() else []
        for image in images:
            if request.load is None or not self.info.images:
                content.append(_UNSUPPORTED_IMAGE)
            else:
                data = await request.load(image)
                content.append(BinaryContent(data=data, media_type=image.media_type))
        return content

    def _convert_reply(self, message: AssistantMessage) -> ModelResponse:
        from pydantic_ai.messages import ModelResponse

        provider, _, name = message.model.partition("/")
        parts = [self._convert_part(part, provider) for part in message.parts]
        return ModelResponse(parts=parts, model_name=name, provider_name=provider)

    def _convert_part(self, part: AssistantPart, provider: str) -> ModelResponsePart:
        from pydantic import TypeAdapter
        from pydantic_ai import messages as pydantic

        if isinstance(part, NativePart):
            kind: TypeAdapter[ModelResponsePart] = TypeAdapter(pydantic.ModelResponsePart)
            return kind.validate_python(part.data)
        extra = part.extra or {}
        common: dict[str, Any] = {
            "id": extra.get("id"),
            "provider_name": provider,
            "provider_details": extra.get("details"),
        }
        if isinstance(part, Text):
            return pydantic.TextPart(part.text, **common)
        if isinstance(part, Thinking):
            return pydantic.ThinkingPart(part.text, signature=part.signature, **common)
        arguments = _parse_arguments(part.arguments)
        args = arguments if self.objects else _valid_json(part.arguments, arguments)
        return pydantic.ToolCallPart(part.name, args, tool_call_id=part.id, **common)

    def settings(self, request: ModelRequest) -> ModelSettings:
        """Return the settings of a request: caching, output limit and thinking."""
        # Some providers cache tools, instructions and messages only on request. The system prompt
        # stays as it was written, unless a message contains what looks like the tags of one.
        settings: ModelSettings = {"cache": True, "framing_announcement": "when_needed"}
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
        parameters = ModelRequestParameters(
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
            parameters.output_mode = "native"
            parameters.output_object = OutputObjectDefinition(json_schema=dict(request.result))
        while len(self._parameters) >= _MAX_CACHED_PARAMETERS:
            del self._parameters[next(iter(self._parameters))]
        # Keep the objects whose ids are in the key, so that no other object gets those ids.
        self._parameters[key] = ((tuple(request.tools), request.result), parameters)
        return parameters

    def message(self, response: ModelResponse, name: str) -> AssistantMessage:
        """Convert a response. Raises `ModelUnavailable` if the stream was cut off."""
        parts = tuple(part for each in response.parts if (part := _read_part(each)) is not None)
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
    from pydantic_ai import messages as pydantic

    if isinstance(event, pydantic.PartDeltaEvent):
        delta = event.delta
        if isinstance(delta, pydantic.TextPartDelta):
            return TextDelta(delta.content_delta) if delta.content_delta else None
        if isinstance(delta, pydantic.ThinkingPartDelta):
            return ThinkingDelta(delta.content_delta) if delta.content_delta else None
        return CallDelta(names.get(event.index, ""))
    if isinstance(event, pydantic.PartStartEvent):
        part = event.part
        if isinstance(part, pydantic.TextPart):
            return TextDelta(part.content) if part.content else None
        if isinstance(part, pydantic.ThinkingPart):
            return ThinkingDelta(part.content) if part.content else None
        if isinstance(part, pydantic.ToolCallPart):
            names[event.index] = part.tool_name
            return CallDelta(part.tool_name)
    return None


def _read_part(part: ModelResponsePart) -> AssistantPart | None:
    from pydantic import TypeAdapter
    from pydantic_ai import messages as pydantic

    if isinstance(part, pydantic.TextPart):
        return Text(part.content, _extra(part.id, part.provider_details)) if part.content else None
    if isinstance(part, pydantic.ThinkingPart):
        extra = _extra(part.id, part.provider_details)
        return Thinking(part.content, part.signature, extra)
    if isinstance(part, pydantic.ToolCallPart):
        extra = _extra(part.id, part.provider_details)
        arguments = part.args if isinstance(part.args, str) else part.args_as_json_str()
        return ToolCall(part.tool_call_id, part.tool_name, arguments or "{}", extra)
    kind: TypeAdapter[ModelResponsePart] = TypeAdapter(pydantic.ModelResponsePart)
    return NativePart(part.provider_name or "", kind.dump_python(part, mode="json"))


def _extra(identity: str | None, details: dict[str, Any] | None) -> dict[str, Any] | None:
    extra = {"id": identity, "details": details}
    return {key: value for key, value in extra.items() if value} or None


def _parse_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call; invalid JSON is wrapped in an object."""
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"not_valid_json": text}


def _valid_json(text: str, arguments: dict[str, Any]) -> str:
    """Return the arguments as valid JSON: some servers reject a conversation with broken JSON."""
    return json.dumps(arguments) if "not_valid_json" in arguments else text


def _connect(named: NamedModel) -> _Adapter:
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
    thinking = bool(profile.get("supports_thinking", False))
    native_results = bool(profile.get("supports_json_schema_output", False))
    images = profile.get("supports_image_input", True)
    return _Adapter(
        model=model,
        info=ModelInfo(
            context_window=provider.context_window or known,
            max_output=provider.max_output,
            images=images if provider.images is None else provider.images,
            thinking=thinking if provider.thinking is None else provider.thinking,
            native_results=native_results
            if provider.native_results is None
            else provider.native_results,
        ),
        price=price,
        close=close,
        objects=provider.api == "anthropic",
        lenient=provider.api in ("chat", "openrouter"),
        max_tokens=provider.max_output,
    )


def _open(named: NamedModel) -> tuple[PydanticModel, Callable[[], Awaitable[None]]]:
    """Return a pydantic-ai model, and the function that closes its connections."""
    provider, name = named.provider, named.model
    if provider.api == "google":
        return _open_google(named)
    if provider.api == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        from smokebox.agents.clients import anthropic_client

        client = anthropic_client(provider)
        return AnthropicModel(
            name, provider=AnthropicProvider(anthropic_client=client)
        ), client.close
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.models.openrouter import OpenRouterModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.providers.openrouter import OpenRouterProvider

    from smokebox.agents.clients import openai_client

    openai = openai_client(provider)
    if provider.api == "openrouter":
        return OpenRouterModel(
            name, provider=OpenRouterProvider(openai_client=openai)
        ), openai.close
    kind = OpenAIResponsesModel if provider.api == "responses" else OpenAIChatModel
    if provider.name == "openai":
        return kind(name, provider=OpenAIProvider(openai_client=openai)), openai.close
    return kind(name, provider=_compatible(provider.name, openai)), openai.close


def _compatible(name: str, client: AsyncOpenAI) -> PydanticProvider[AsyncOpenAI]:
    """Return a provider with OpenAI's chat API, with its known deviations from it."""
    from pydantic_ai.providers import infer_provider_class
    from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider

    if name in _DEVIATING_PROVIDERS:
        kind: Any = infer_provider_class(name)
        provider: PydanticProvider[AsyncOpenAI] = kind(openai_client=client)
        return provider
    return OpenAICompatibleProvider(name, openai_client=client)


def _open_google(named: NamedModel) -> tuple[PydanticModel, Callable[[], Awaitable[None]]]:
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


def _translate(error: Exception, named: NamedModel) -> ModelError:
    """Convert an error of pydantic-ai or an SDK to a `ModelError`."""
    from pydantic_ai import exceptions

    status = getattr(error, "status_code", None)
    retry_after = getattr(error, "retry_after", None)
    fields: dict[str, Any] = {"model": named.name, "status": status}
    reason = _reason(error)
    if isinstance(error, exceptions.ModelContextWindowExceededError) or status == _TOO_LARGE:
        return ContextOverflow(
            f"the conversation is too long for {named.name}: {reason}",
            hint="Compact the session, or start another.",
            **fields,
        )
    if isinstance(error, exceptions.ModelAuthenticationError):
        variable = " or ".join(named.provider.api_key_env) or "the key"
        return ModelRefused(
            f"{named.name} rejected the key: {reason}", hint=f"Check {variable}.", **fields
        )
    if isinstance(error, exceptions.ModelNotFoundError):
        near = getattr(error, "suggested_model_id", None)
        hint = f"Did you mean {near.replace(':', '/')!r}?" if near else "Check its name."
        return ModelRefused(f"there is no model {named.name}: {reason}", hint=hint, **fields)
    refusals = (
        exceptions.ModelRequestRejectedError,
        exceptions.ModelQuotaExceededError,
        exceptions.ContentFilterError,
        exceptions.UserError,
        TypeError,
    )
    if isinstance(error, refusals):
        hint = "The same request will be refused again: change it, or use another model."
        return ModelRefused(f"{named.name} refused the request: {reason}", hint=hint, **fields)
    return ModelUnavailable(
        f"{named.name} did not answer: {reason}",
        hint="Try again later, or pass a list of models as fallbacks.",
        retry_after=retry_after,
        **fields,
    )


def _reason(error: Exception) -> str:
    """Return the message in the body of an error response, or that of the exception."""
    body = getattr(error, "body", None)
    if isinstance(body, dict):
        details = body.get("error", body)
        if isinstance(details, dict) and isinstance(message := details.get("message"), str):
            return message[:_MAX_REASON]
    return (str(error) or type(error).__name__)[:_MAX_REASON]
