"""Anthropic's Messages API: checks of requests, and replies."""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

from smokebox.agents.messages import (
    AssistantMessage,
    ImagePart,
    NativePart,
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

_ERRORS: dict[ErrorKind, tuple[int, str]] = {
    "invalid": (400, "invalid_request_error"),
    "too_long": (400, "invalid_request_error"),
    "unauthorized": (401, "authentication_error"),
    "not_found": (404, "not_found_error"),
    "rate_limited": (429, "rate_limit_error"),
    "internal": (500, "api_error"),
    "overloaded": (529, "overloaded_error"),
}
_STOPS = {"end": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "refused": "refusal"}
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_ID = re.compile(r"[a-zA-Z0-9_-]+")
_IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_MAX_MARKS = 4
_MIN_BUDGET = 1024


class AnthropicApi:
    """The API of `POST /v1/messages`."""

    def authorized(self, headers: Mapping[str, str], key: str) -> bool:
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        return key in (headers.get("x-api-key"), bearer)

    def parse(self, body: dict[str, Any], headers: Mapping[str, str]) -> ParsedRequest:
        require("anthropic-version" in headers, "anthropic-version: header is required")
        for field in ("model", "max_tokens", "messages"):
            require(field in body, f"{field}: Field required")
        require(isinstance(body["max_tokens"], int), "max_tokens: Input should be a valid integer")
        require(body["max_tokens"] > 0, "max_tokens: Input should be greater than 0")
        turns = body["messages"]
        require(isinstance(turns, list) and turns, "messages: at least one message is required")
        tools = _tools(body.get("tools") or [])
        marks = _check_cache_marks(body)
        _check_thinking(body)
        system = _system(body.get("system") or "")
        blocks = [canonical(body.get("tools") or []), canonical(body.get("system") or "")]
        blocks += [canonical(turn) for turn in turns]
        config = (body.get("output_config") or {}).get("format") or body.get("output_format") or {}
        return ParsedRequest(
            request=ModelRequest(
                system=system,
                messages=_messages(turns),
                tools=tools,
                result=config.get("schema"),
                max_tokens=body["max_tokens"],
            ),
            model=str(body["model"]),
            stream=bool(body.get("stream")),
            blocks=tuple(blocks),
            caches="marked" if marks else "no",
        )

    def error(self, kind: ErrorKind, message: str) -> EncodedError:
        status, name = _ERRORS[kind]
        return EncodedError(status, {"type": "error", "error": {"type": name, "message": message}})

    def error_event(self, kind: ErrorKind, message: str) -> bytes:
        return _event("error", self.error(kind, message).body)

    def whole(self, reply: FakeReply) -> dict[str, Any]:
        return _envelope(reply) | {
            "content": [_block(part) for part in reply.parts],
            "stop_reason": _STOPS[reply.stop],
            "usage": _usage(reply) | {"output_tokens": reply.usage.output_tokens},
        }

    def first_events(self, reply: FakeReply) -> bytes:
        start = {"type": "message_start", "message": _envelope(reply)}
        return _event("message_start", start) + _event("ping", {"type": "ping"})

    def content_events(self, reply: FakeReply) -> Iterator[bytes]:
        for index, part in enumerate(reply.parts):
            start = {"type": "content_block_start", "index": index, "content_block": _empty(part)}
            yield _event("content_block_start", start)
            for delta in _deltas(part, reply.chunk):
                piece = {"type": "content_block_delta", "index": index, "delta": delta}
                yield _event("content_block_delta", piece)
            yield _event("content_block_stop", {"type": "content_block_stop", "index": index})

    def last_events(self, reply: FakeReply) -> bytes:
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": _STOPS[reply.stop], "stop_sequence": None},
            "usage": {"output_tokens": reply.usage.output_tokens},
        }
        return _event("message_delta", delta) + _event("message_stop", {"type": "message_stop"})


def sign(text: str) -> str:
    """Return a signature for thinking that has none, which detects changes to the text."""
    return "signed-" + hashlib.sha256(text.encode()).hexdigest()


def _event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def _envelope(reply: FakeReply) -> dict[str, Any]:
    return {
        "id": reply.id,
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(reply),
    }


def _usage(reply: FakeReply) -> dict[str, Any]:
    used = reply.usage
    return {
        # Anthropic does not count cached tokens as input.
        "input_tokens": used.input_tokens - used.cache_read_tokens - used.cache_write_tokens,
        "cache_read_input_tokens": used.cache_read_tokens,
        "cache_creation_input_tokens": used.cache_write_tokens,
        "output_tokens": 1,
    }


def _block(part: AssistantPart) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, Thinking):
        signature = part.signature or sign(part.text)
        return {"type": "thinking", "thinking": part.text, "signature": signature}
    if isinstance(part, ToolCall):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": _arguments(part)}
    return part.data


def _arguments(call: ToolCall) -> dict[str, Any]:
    try:
        value = json.loads(call.arguments or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _empty(part: AssistantPart) -> dict[str, Any]:
    block = _block(part)
    emptied = {"text": "", "thinking": "", "signature": "", "input": {}}
    return {
        key: emptied.get(key, value) if key != "type" else value for key, value in block.items()
    }


def _deltas(part: AssistantPart, size: int) -> Iterator[dict[str, Any]]:
    if isinstance(part, Text):
        for piece in split(part.text, size):
            yield {"type": "text_delta", "text": piece}
    elif isinstance(part, Thinking):
        for piece in split(part.text, size):
            yield {"type": "thinking_delta", "thinking": piece}
        yield {"type": "signature_delta", "signature": part.signature or sign(part.text)}
    elif isinstance(part, ToolCall):
        for piece in split(part.arguments, size):
            yield {"type": "input_json_delta", "partial_json": piece}


def _system(value: object) -> str:
    if isinstance(value, str):
        return value
    require(isinstance(value, list), "system: Input should be a valid list")
    assert isinstance(value, list)
    for at, block in enumerate(value):
        require(block.get("text"), f"system.{at}.text: text content blocks must be non-empty")
    return "".join(block["text"] for block in value)


def _tools(tools: list[dict[str, Any]]) -> tuple[ToolSpec, ...]:
    names = [tool.get("name", "") for tool in tools]
    require(len(set(names)) == len(names), "tools: Tool names must be unique.")
    specs = []
    for at, tool in enumerate(tools):
        where = f"tools.{at}.custom"
        require(
            _TOOL_NAME.fullmatch(tool.get("name", "")),
            f"{where}.name: String should match pattern '^[a-zA-Z0-9_-]{{1,128}}$'",
        )
        schema = tool.get("input_schema")
        require(isinstance(schema, dict), f"{where}.input_schema: Field required")
        assert isinstance(schema, dict)
        require(
            schema.get("type") == "object",
            f"{where}.input_schema.type: Input should be 'object'",
        )
        specs.append(ToolSpec(tool["name"], tool.get("description", ""), schema))
    return tuple(specs)


def _check_cache_marks(body: dict[str, Any]) -> int:
    marks = _count_cache_marks(body)
    require(
        marks <= _MAX_MARKS,
        f"A maximum of {_MAX_MARKS} blocks with cache_control may be provided. Found {marks}.",
    )
    return marks


def _count_cache_marks(value: object) -> int:
    if isinstance(value, dict):
        own = 1 if value.get("cache_control") else 0
        children = (item for key, item in value.items() if key != "input")
        return own + sum(map(_count_cache_marks, children))
    return sum(map(_count_cache_marks, value)) if isinstance(value, list) else 0


def _check_thinking(body: dict[str, Any]) -> None:
    thinking = body.get("thinking") or {}
    if thinking.get("type") != "enabled":
        return
    budget = thinking.get("budget_tokens", 0)
    require(
        budget >= _MIN_BUDGET,
        "thinking.enabled.budget_tokens: Input should be greater than or equal to 1024",
    )
    require(
        budget < body["max_tokens"],
        "`max_tokens` must be greater than `thinking.budget_tokens`.",
    )


def _messages(turns: list[dict[str, Any]]) -> tuple[Message, ...]:
    messages: list[Message] = []
    open_calls: dict[str, str] = {}
    seen: set[str] = set()
    require(turns[0].get("role") == "user", 'messages: first message must use the "user" role')
    for at, turn in enumerate(turns):
        role = turn.get("role")
        require(
            role in ("user", "assistant"),
            f"messages: Unexpected role {role!r}. The Messages API accepts a top-level `system` "
            'parameter, not "system" as an input message role.',
        )
        content = turn.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        require(blocks, f"messages.{at}: all messages must have non-empty content")
        assert isinstance(blocks, list)
        if role == "assistant":
            _check_results(at - 1, open_calls)
            message = _assistant(at, blocks)
            open_calls = {call.id: call.name for call in message.calls}
            require(not seen & open_calls.keys(), "messages: `tool_use` ids must be unique")
            seen |= open_calls.keys()
            messages.append(message)
        else:
            messages += _user(at, blocks, open_calls)
            _check_results(at - 1, open_calls)
            open_calls = {}
    _check_results(len(turns) - 1, open_calls)
    return tuple(messages)


def _check_results(at: int, open_calls: dict[str, str]) -> None:
    require(
        not open_calls,
        f"messages.{at}: `tool_use` ids were found without `tool_result` blocks immediately "
        f"after: {', '.join(open_calls)}. Each `tool_use` block must have a corresponding "
        "`tool_result` block in the next message.",
    )


def _assistant(at: int, blocks: list[dict[str, Any]]) -> AssistantMessage:
    parts: list[AssistantPart] = []
    for number, block in enumerate(blocks):
        where = f"messages.{at}.content.{number}"
        kind = block.get("type")
        if kind == "text":
            parts.append(Text(_text(block)))
        elif kind == "thinking":
            text, signature = block.get("thinking", ""), block.get("signature")
            genuine = signature and (not signature.startswith("signed-") or signature == sign(text))
            require(genuine, f"{where}: Invalid `signature` in `thinking` block")
            parts.append(Thinking(text, signature))
        elif kind == "tool_use":
            require(_ID.fullmatch(block.get("id", "")), f"{where}.tool_use.id: String should match")
            arguments = block.get("input")
            require(
                isinstance(arguments, dict),
                f"{where}.tool_use.input: Input should be a valid object",
            )
            parts.append(ToolCall(block["id"], block["name"], json.dumps(arguments)))
        else:
            parts.append(NativePart("anthropic", block))
    return AssistantMessage(parts=tuple(parts), model="anthropic/fake")


def _user(at: int, blocks: list[dict[str, Any]], open_calls: dict[str, str]) -> Iterator[Message]:
    returns: list[ToolReturn] = []
    parts: list[UserPart] = []
    for number, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            call_id = block.get("tool_use_id", "")
            require(
                call_id in open_calls,
                f"messages.{at}.content.{number}: unexpected `tool_use_id` found in `tool_result` "
                f"blocks: {call_id}. Each `tool_result` block must have a corresponding `tool_use` "
                "block in the previous message.",
            )
            require(
                not parts,
                f"messages.{at}: `tool_result` blocks must come first in the content of a message",
            )
            returns.append(_result(block, open_calls.pop(call_id)))
        else:
            parts.append(_part(at, block))
    if returns:
        yield ToolReturns(tuple(returns))
    if parts:
        yield UserMessage(tuple(parts))


def _result(block: dict[str, Any], name: str) -> ToolReturn:
    content = block.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    content_parts = [
        _part(0, part) for part in parts if part.get("type") != "text" or part.get("text")
    ]
    return ToolReturn(
        call_id=block["tool_use_id"],
        name=name,
        text="".join(part.text for part in content_parts if isinstance(part, Text)),
        is_error=bool(block.get("is_error")),
        images=tuple(part for part in content_parts if isinstance(part, ImagePart)),
    )


def _part(at: int, block: dict[str, Any]) -> UserPart:
    if block.get("type") == "text":
        return Text(_text(block))
    if block.get("type") == "image":
        source = block.get("source") or {}
        media = source.get("media_type")
        require(
            media in _IMAGE_TYPES,
            f"messages.{at}: image.source.media_type: Input should be an image type",
        )
        return ImagePart(str(media), hashlib.sha256(source.get("data", "").encode()).hexdigest())
    reject(f"messages.{at}: unexpected block of type {block.get('type')!r}")


def _text(block: dict[str, Any]) -> str:
    text = block.get("text", "")
    require(text, "messages: text content blocks must be non-empty")
    require(text.strip(), "messages: text content blocks must contain non-whitespace text")
    return str(text)
