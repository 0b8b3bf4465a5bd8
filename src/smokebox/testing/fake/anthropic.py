"""Anthropic's Messages: what its requests must be, and what it answers."""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

from smokebox.agents.messages import (
    AssistantMessage,
    Image,
    NativePart,
    Text,
    Thinking,
    ToolCall,
    ToolReturn,
    ToolReturns,
    UserMessage,
)
from smokebox.agents.model import ModelRequest, ToolSpec
from smokebox.testing.fake.dialect import DialectError, ParsedRequest, canonical, cut, need, reject

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from smokebox.agents.messages import AssistantPart, Message, UserPart
    from smokebox.testing.fake.dialect import FakeReply, Trouble

_ERRORS: dict[Trouble, tuple[int, str]] = {
    "invalid": (400, "invalid_request_error"),
    "too_long": (400, "invalid_request_error"),
    "unauthorized": (401, "authentication_error"),
    "not_found": (404, "not_found_error"),
    "rate_limited": (429, "rate_limit_error"),
    "broken": (500, "api_error"),
    "overloaded": (529, "overloaded_error"),
}
_STOPS = {"end": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "refused": "refusal"}
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_ID = re.compile(r"[a-zA-Z0-9_-]+")
_PICTURES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_MOST_MARKS = 4
_LEAST_BUDGET = 1024


class AnthropicDialect:
    """The dialect of `POST /v1/messages`."""

    def authorized(self, headers: Mapping[str, str], key: str) -> bool:
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        return key in (headers.get("x-api-key"), bearer)

    def parse(self, body: dict[str, Any], headers: Mapping[str, str]) -> ParsedRequest:
        need("anthropic-version" in headers, "anthropic-version: header is required")
        for field in ("model", "max_tokens", "messages"):
            need(field in body, f"{field}: Field required")
        need(isinstance(body["max_tokens"], int), "max_tokens: Input should be a valid integer")
        need(body["max_tokens"] > 0, "max_tokens: Input should be greater than 0")
        turns = body["messages"]
        need(isinstance(turns, list) and turns, "messages: at least one message is required")
        tools = _tools(body.get("tools") or [])
        marks = _check_marks(body)
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

    def failure(self, trouble: Trouble, message: str) -> DialectError:
        status, kind = _ERRORS[trouble]
        return DialectError(status, {"type": "error", "error": {"type": kind, "message": message}})

    def error_event(self, trouble: Trouble, message: str) -> bytes:
        return _event("error", self.failure(trouble, message).body)

    def whole(self, reply: FakeReply) -> dict[str, Any]:
        return _shell(reply) | {
            "content": [_block(part) for part in reply.parts],
            "stop_reason": _STOPS[reply.stop],
            "usage": _usage(reply) | {"output_tokens": reply.usage.output_tokens},
        }

    def opening(self, reply: FakeReply) -> bytes:
        start = {"type": "message_start", "message": _shell(reply)}
        return _event("message_start", start) + _event("ping", {"type": "ping"})

    def pieces(self, reply: FakeReply) -> Iterator[bytes]:
        for index, part in enumerate(reply.parts):
            start = {"type": "content_block_start", "index": index, "content_block": _empty(part)}
            yield _event("content_block_start", start)
            for delta in _deltas(part, reply.chunk):
                piece = {"type": "content_block_delta", "index": index, "delta": delta}
                yield _event("content_block_delta", piece)
            yield _event("content_block_stop", {"type": "content_block_stop", "index": index})

    def closing(self, reply: FakeReply) -> bytes:
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": _STOPS[reply.stop], "stop_sequence": None},
            "usage": {"output_tokens": reply.usage.output_tokens},
        }
        return _event("message_delta", delta) + _event("message_stop", {"type": "message_stop"})


def sign(text: str) -> str:
    """The signature of a thought that has none: who changes the thought does not have it."""
    return "signed-" + hashlib.sha256(text.encode()).hexdigest()


def _event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def _shell(reply: FakeReply) -> dict[str, Any]:
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
        # Here, what came from the cache or went to it is not part of the input.
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
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": _object(part)}
    return part.data


def _object(made: ToolCall) -> dict[str, Any]:
    try:
        value = json.loads(made.arguments or "{}")
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
        for piece in cut(part.text, size):
            yield {"type": "text_delta", "text": piece}
    elif isinstance(part, Thinking):
        for piece in cut(part.text, size):
            yield {"type": "thinking_delta", "thinking": piece}
        yield {"type": "signature_delta", "signature": part.signature or sign(part.text)}
    elif isinstance(part, ToolCall):
        for piece in cut(part.arguments, size):
            yield {"type": "input_json_delta", "partial_json": piece}


def _system(given: object) -> str:
    if isinstance(given, str):
        return given
    need(isinstance(given, list), "system: Input should be a valid list")
    assert isinstance(given, list)
    for at, block in enumerate(given):
        need(block.get("text"), f"system.{at}.text: text content blocks must be non-empty")
    return "".join(block["text"] for block in given)


def _tools(given: list[dict[str, Any]]) -> tuple[ToolSpec, ...]:
    names = [tool.get("name", "") for tool in given]
    need(len(set(names)) == len(names), "tools: Tool names must be unique.")
    made = []
    for at, tool in enumerate(given):
        where = f"tools.{at}.custom"
        fits = _TOOL_NAME.fullmatch(tool.get("name", ""))
        need(
            fits, f"tools.{at}.custom.name: String should match pattern '^[a-zA-Z0-9_-]{{1,128}}$'"
        )
        schema = tool.get("input_schema")
        need(isinstance(schema, dict), f"{where}.input_schema: Field required")
        assert isinstance(schema, dict)
        need(
            schema.get("type") == "object",
            f"{where}.input_schema.type: Input should be 'object'",
        )
        made.append(ToolSpec(tool["name"], tool.get("description", ""), schema))
    return tuple(made)


def _check_marks(body: dict[str, Any]) -> int:
    marks = _marks(body)
    need(
        marks <= _MOST_MARKS,
        f"A maximum of {_MOST_MARKS} blocks with cache_control may be provided. Found {marks}.",
    )
    return marks


def _marks(value: object) -> int:
    if isinstance(value, dict):
        own = 1 if value.get("cache_control") else 0
        return own + sum(_marks(item) for key, item in value.items() if key != "input")
    return sum(map(_marks, value)) if isinstance(value, list) else 0


def _check_thinking(body: dict[str, Any]) -> None:
    thinking = body.get("thinking") or {}
    if thinking.get("type") != "enabled":
        return
    budget = thinking.get("budget_tokens", 0)
    need(
        budget >= _LEAST_BUDGET,
        "thinking.enabled.budget_tokens: Input should be greater than or equal to 1024",
    )
    need(
        budget < body["max_tokens"],
        "`max_tokens` must be greater than `thinking.budget_tokens`.",
    )


def _messages(turns: list[dict[str, Any]]) -> tuple[Message, ...]:
    messages: list[Message] = []
    open_calls: dict[str, str] = {}
    seen: set[str] = set()
    need(turns[0].get("role") == "user", 'messages: first message must use the "user" role')
    for at, turn in enumerate(turns):
        role = turn.get("role")
        need(
            role in ("user", "assistant"),
            f"messages: Unexpected role {role!r}. The Messages API accepts a top-level `system` "
            'parameter, not "system" as an input message role.',
        )
        content = turn.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        need(blocks, f"messages.{at}: all messages must have non-empty content")
        assert isinstance(blocks, list)
        if role == "assistant":
            _check_answered(at - 1, open_calls)
            message = _assistant(at, blocks)
            open_calls = {made.id: made.name for made in message.calls}
            need(not seen & open_calls.keys(), "messages: `tool_use` ids must be unique")
            seen |= open_calls.keys()
            messages.append(message)
        else:
            messages += _user(at, blocks, open_calls)
            _check_answered(at - 1, open_calls)
            open_calls = {}
    _check_answered(len(turns) - 1, open_calls)
    return tuple(messages)


def _check_answered(at: int, open_calls: dict[str, str]) -> None:
    need(
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
            need(genuine, f"{where}: Invalid `signature` in `thinking` block")
            parts.append(Thinking(text, signature))
        elif kind == "tool_use":
            need(_ID.fullmatch(block.get("id", "")), f"{where}.tool_use.id: String should match")
            given = block.get("input")
            need(isinstance(given, dict), f"{where}.tool_use.input: Input should be a valid object")
            parts.append(ToolCall(block["id"], block["name"], json.dumps(given)))
        else:
            parts.append(NativePart("anthropic", block))
    return AssistantMessage(parts=tuple(parts), model="anthropic/fake")


def _user(at: int, blocks: list[dict[str, Any]], open_calls: dict[str, str]) -> Iterator[Message]:
    returns: list[ToolReturn] = []
    parts: list[UserPart] = []
    for number, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            wanted = block.get("tool_use_id", "")
            need(
                wanted in open_calls,
                f"messages.{at}.content.{number}: unexpected `tool_use_id` found in `tool_result` "
                f"blocks: {wanted}. Each `tool_result` block must have a corresponding `tool_use` "
                "block in the previous message.",
            )
            need(
                not parts,
                f"messages.{at}: `tool_result` blocks must come first in the content of a message",
            )
            returns.append(_result(block, open_calls.pop(wanted)))
        else:
            parts.append(_part(at, block))
    if returns:
        yield ToolReturns(tuple(returns))
    if parts:
        yield UserMessage(tuple(parts))


def _result(block: dict[str, Any], name: str) -> ToolReturn:
    content = block.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    shown = [_part(0, part) for part in parts if part.get("type") != "text" or part.get("text")]
    return ToolReturn(
        call_id=block["tool_use_id"],
        name=name,
        text="".join(part.text for part in shown if isinstance(part, Text)),
        is_error=bool(block.get("is_error")),
        images=tuple(part for part in shown if isinstance(part, Image)),
    )


def _part(at: int, block: dict[str, Any]) -> UserPart:
    if block.get("type") == "text":
        return Text(_text(block))
    if block.get("type") == "image":
        source = block.get("source") or {}
        media = source.get("media_type")
        need(
            media in _PICTURES, f"messages.{at}: image.source.media_type: Input should be a picture"
        )
        return Image(str(media), hashlib.sha256(source.get("data", "").encode()).hexdigest())
    reject(f"messages.{at}: unexpected block of type {block.get('type')!r}")


def _text(block: dict[str, Any]) -> str:
    text = block.get("text", "")
    need(text, "messages: text content blocks must be non-empty")
    need(text.strip(), "messages: text content blocks must contain non-whitespace text")
    return str(text)
