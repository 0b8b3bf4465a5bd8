"""OpenAI's chat completions API, which many providers have: checks of requests, and replies."""

from __future__ import annotations

import hashlib
import json
import re
import time
from typing import TYPE_CHECKING, Any

from smokebox.agents.messages import (
    AssistantMessage,
    ImagePart,
    Text,
    Thinking,
    ToolCall,
    ToolReturn,
    ToolReturns,
    UserMessage,
)
from smokebox.agents.model import ModelRequest, ToolSpec
from smokebox.testing.fake.provider_api import (
    EncodedError,
    ParsedRequest,
    canonical,
    reject,
    require,
    split,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from smokebox.agents.messages import AssistantPart, Message, UserPart
    from smokebox.testing.fake.provider_api import ErrorKind, FakeReply

_ERRORS: dict[ErrorKind, tuple[int, str, str | None]] = {
    "invalid": (400, "invalid_request_error", None),
    "too_long": (400, "invalid_request_error", "context_length_exceeded"),
    "unauthorized": (401, "invalid_request_error", "invalid_api_key"),
    "not_found": (404, "invalid_request_error", "model_not_found"),
    "rate_limited": (429, "requests", "rate_limit_exceeded"),
    "internal": (500, "server_error", None),
    "overloaded": (503, "service_unavailable_error", None),
}
_STOPS = {
    "end": "stop",
    "tool_calls": "tool_calls",
    "length": "length",
    "refused": "content_filter",
}
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ROLES = ("system", "developer", "user", "assistant", "tool")


class OpenAIApi:
    """The API of `POST /v1/chat/completions`.

    With `reasoning`, thinking is in OpenRouter's fields, else in those of most other providers.
    """

    def __init__(self, *, reasoning: bool = False) -> None:
        self._reasoning = reasoning

    def authorized(self, headers: Mapping[str, str], key: str) -> bool:
        return headers.get("authorization", "").removeprefix("Bearer ") == key

    def parse(self, body: dict[str, Any], headers: Mapping[str, str]) -> ParsedRequest:
        require(body.get("model"), "you must provide a model parameter")
        turns = body.get("messages")
        require(isinstance(turns, list), "Missing required parameter: 'messages'.")
        require(turns, "Invalid 'messages': empty array. Expected an array with minimum length 1.")
        assert isinstance(turns, list)
        blocks = [canonical(body.get("tools") or []), *map(canonical, turns)]
        return ParsedRequest(
            request=ModelRequest(
                system="\n\n".join(_content_text(turn) for turn in turns if _is_system(turn)),
                messages=_messages(turns),
                tools=_tools(body),
                result=_schema(body.get("response_format") or {}),
                max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
            ),
            model=str(body["model"]),
            stream=bool(body.get("stream")),
            blocks=tuple(blocks),
            caches="always",
        )

    def error(self, kind: ErrorKind, message: str) -> EncodedError:
        status, name, code = _ERRORS[kind]
        error = {"message": message, "type": name, "param": None, "code": code}
        return EncodedError(status, {"error": error})

    def error_event(self, kind: ErrorKind, message: str) -> bytes:
        return _event(self.error(kind, message).body)

    def whole(self, reply: FakeReply) -> dict[str, Any]:
        calls = [_call(part) for part in reply.parts if isinstance(part, ToolCall)]
        message: dict[str, Any] = {"role": "assistant", "content": _text_of(reply, Text) or None}
        if thinking := _text_of(reply, Thinking):
            message |= self._thinking_fields(thinking, 0)
        if calls:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "finish_reason": _STOPS[reply.stop]}
        return _envelope(reply, "chat.completion", [choice]) | {"usage": _usage(reply)}

    def first_events(self, reply: FakeReply) -> bytes:
        return _chunk(reply, {"role": "assistant", "content": ""})

    def content_events(self, reply: FakeReply) -> Iterator[bytes]:
        calls = 0
        for index, part in enumerate(reply.parts):
            if isinstance(part, Text):
                for piece in split(part.text, reply.chunk):
                    yield _chunk(reply, {"content": piece})
            elif isinstance(part, Thinking):
                for piece in split(part.text, reply.chunk):
                    yield _chunk(reply, self._thinking_fields(piece, index))
            elif isinstance(part, ToolCall):
                start = _call(part) | {"index": calls}
                start["function"] = {"name": part.name, "arguments": ""}
                yield _chunk(reply, {"tool_calls": [start]})
                for piece in split(part.arguments, reply.chunk):
                    more = {"index": calls, "function": {"arguments": piece}}
                    yield _chunk(reply, {"tool_calls": [more]})
                calls += 1

    def last_events(self, reply: FakeReply) -> bytes:
        end = _chunk(reply, {}, finish=_STOPS[reply.stop])
        usage = _envelope(reply, "chat.completion.chunk", []) | {"usage": _usage(reply)}
        return end + _event(usage) + b"data: [DONE]\n\n"

    def _thinking_fields(self, text: str, index: int) -> dict[str, Any]:
        if not self._reasoning:
            return {"reasoning_content": text}
        detail = {"type": "reasoning.text", "text": text, "index": index, "format": "unknown"}
        return {"reasoning": text, "reasoning_details": [detail]}


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def _envelope(reply: FakeReply, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": reply.id,
        "object": kind,
        "created": int(time.time()),
        "model": reply.model,
        "choices": choices,
    }


def _chunk(reply: FakeReply, delta: dict[str, Any], *, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return _event(_envelope(reply, "chat.completion.chunk", [choice]))


def _usage(reply: FakeReply) -> dict[str, Any]:
    used = reply.usage
    return {
        "prompt_tokens": used.input_tokens,
        "completion_tokens": used.output_tokens,
        "total_tokens": used.total_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cache_read_tokens},
    }


def _text_of(reply: FakeReply, kind: type[Text] | type[Thinking]) -> str:
    return "".join(part.text for part in reply.parts if isinstance(part, kind))


def _call(part: ToolCall) -> dict[str, Any]:
    return {
        "id": part.id,
        "type": "function",
        "function": {"name": part.name, "arguments": part.arguments},
    }


def _is_system(turn: dict[str, Any]) -> bool:
    return turn.get("role") in ("system", "developer")


def _content_text(turn: dict[str, Any]) -> str:
    content = turn.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def _tools(body: dict[str, Any]) -> tuple[ToolSpec, ...]:
    specs = []
    for at, tool in enumerate(body.get("tools") or []):
        function = tool.get("function") or {}
        name = function.get("name", "")
        require(
            _NAME.fullmatch(name),
            f"Invalid 'tools[{at}].function.name': string does not match pattern. Expected a "
            "string that matches the pattern '^[a-zA-Z0-9_-]+$'.",
        )
        schema = function.get("parameters") or {"type": "object"}
        require(
            schema.get("type") == "object",
            f"Invalid schema for function '{name}': schema must be a JSON Schema of 'type: "
            f'"object"\', got \'type: "{schema.get("type")}"\'.',
        )
        specs.append(ToolSpec(name, function.get("description", ""), schema))
    return tuple(specs)


def _schema(form: dict[str, Any]) -> dict[str, Any] | None:
    if form.get("type") != "json_schema":
        return None
    wrapper = form.get("json_schema") or {}
    require(wrapper.get("name"), "Missing required parameter: 'response_format.json_schema.name'.")
    schema: dict[str, Any] = wrapper.get("schema") or {}
    if wrapper.get("strict"):
        require(
            schema.get("additionalProperties") is False,
            f"Invalid schema for response_format '{wrapper['name']}': In context=(), "
            "'additionalProperties' is required to be supplied and to be false.",
        )
    return schema


def _messages(turns: list[dict[str, Any]]) -> tuple[Message, ...]:
    messages: list[Message] = []
    waiting: dict[str, str] = {}
    returns: list[ToolReturn] = []
    for at, turn in enumerate(turns):
        role = turn.get("role")
        require(
            role in _ROLES, f"Invalid value: {role!r}. Supported values are: {', '.join(_ROLES)}."
        )
        if role == "tool":
            call_id = turn.get("tool_call_id", "")
            require(
                call_id in waiting,
                f"Invalid parameter: messages with role 'tool' must be a response to a "
                f"preceeding message with 'tool_calls'. (messages.[{at}].role)",
            )
            require(
                turn.get("content") is not None, f"Invalid value for 'messages.[{at}].content'."
            )
            name = waiting.pop(call_id)
            returns.append(ToolReturn(call_id=call_id, name=name, text=_content_text(turn)))
            continue
        _check_results(waiting)
        if returns:
            messages.append(ToolReturns(tuple(returns)))
            returns = []
        if role == "assistant":
            message = _assistant(at, turn)
            waiting = {call.id: call.name for call in message.calls}
            messages.append(message)
        elif role == "user":
            messages.append(_user(at, turn))
    _check_results(waiting)
    if returns:
        messages.append(ToolReturns(tuple(returns)))
    return tuple(messages)


def _check_results(waiting: dict[str, str]) -> None:
    require(
        not waiting,
        "An assistant message with 'tool_calls' must be followed by tool messages responding to "
        "each 'tool_call_id'. The following tool_call_ids did not have response messages: "
        f"{', '.join(waiting)}",
    )


def _assistant(at: int, turn: dict[str, Any]) -> AssistantMessage:
    parts: list[AssistantPart] = []
    if thinking := turn.get("reasoning_content") or turn.get("reasoning"):
        parts.append(Thinking(thinking))
    if text := _content_text(turn):
        parts.append(Text(text))
    for call in turn.get("tool_calls") or []:
        function = call.get("function") or {}
        arguments = function.get("arguments")
        require(
            isinstance(arguments, str), f"Invalid type for 'messages[{at}].tool_calls': a string."
        )
        parts.append(ToolCall(call["id"], function["name"], str(arguments)))
    require(parts, f"Invalid value for 'content': expected a string, got null. (messages.[{at}])")
    return AssistantMessage(parts=tuple(parts), model="openai/fake")


def _user(at: int, turn: dict[str, Any]) -> UserMessage:
    content = turn.get("content")
    require(
        content is not None, f"Invalid value for 'content': got null. (messages.[{at}].content)"
    )
    if isinstance(content, str):
        return UserMessage((Text(content),))
    assert isinstance(content, list)
    return UserMessage(tuple(_part(at, part) for part in content))


def _part(at: int, part: dict[str, Any]) -> UserPart:
    if part.get("type") == "text":
        return Text(part.get("text", ""))
    if part.get("type") == "image_url":
        url = (part.get("image_url") or {}).get("url", "")
        media, _, data = url.removeprefix("data:").partition(";base64,")
        require(media and data, f"Invalid 'messages[{at}].content': not a data URL of an image.")
        return ImagePart(media, hashlib.sha256(data.encode()).hexdigest())
    reject(f"Invalid value: {part.get('type')!r}. Supported values are: 'text', 'image_url'.")
