"""OpenAI's chat completions, as many providers speak it: what requests must be, and the answers."""

from __future__ import annotations

import hashlib
import json
import re
import time
from typing import TYPE_CHECKING, Any

from smokebox.agents.messages import (
    AssistantMessage,
    Image,
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

_ERRORS: dict[Trouble, tuple[int, str, str | None]] = {
    "invalid": (400, "invalid_request_error", None),
    "too_long": (400, "invalid_request_error", "context_length_exceeded"),
    "unauthorized": (401, "invalid_request_error", "invalid_api_key"),
    "not_found": (404, "invalid_request_error", "model_not_found"),
    "rate_limited": (429, "requests", "rate_limit_exceeded"),
    "broken": (500, "server_error", None),
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


class OpenAIDialect:
    """The dialect of `POST /v1/chat/completions`.

    With `reasoning`, thoughts come as OpenRouter tells them; else as most others do.
    """

    def __init__(self, *, reasoning: bool = False) -> None:
        self._reasoning = reasoning

    def authorized(self, headers: Mapping[str, str], key: str) -> bool:
        return headers.get("authorization", "").removeprefix("Bearer ") == key

    def parse(self, body: dict[str, Any], headers: Mapping[str, str]) -> ParsedRequest:
        need(body.get("model"), "you must provide a model parameter")
        turns = body.get("messages")
        need(isinstance(turns, list), "Missing required parameter: 'messages'.")
        need(turns, "Invalid 'messages': empty array. Expected an array with minimum length 1.")
        assert isinstance(turns, list)
        blocks = [canonical(body.get("tools") or []), *map(canonical, turns)]
        return ParsedRequest(
            request=ModelRequest(
                system="\n\n".join(_words(turn) for turn in turns if _instructs(turn)),
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

    def failure(self, trouble: Trouble, message: str) -> DialectError:
        status, kind, code = _ERRORS[trouble]
        error = {"message": message, "type": kind, "param": None, "code": code}
        return DialectError(status, {"error": error})

    def error_event(self, trouble: Trouble, message: str) -> bytes:
        return _event(self.failure(trouble, message).body)

    def whole(self, reply: FakeReply) -> dict[str, Any]:
        made = [_call(part) for part in reply.parts if isinstance(part, ToolCall)]
        message: dict[str, Any] = {"role": "assistant", "content": _said(reply, Text) or None}
        if thought := _said(reply, Thinking):
            message |= self._thought(thought, 0)
        if made:
            message["tool_calls"] = made
        choice = {"index": 0, "message": message, "finish_reason": _STOPS[reply.stop]}
        return _shell(reply, "chat.completion", [choice]) | {"usage": _usage(reply)}

    def opening(self, reply: FakeReply) -> bytes:
        return _chunk(reply, {"role": "assistant", "content": ""})

    def pieces(self, reply: FakeReply) -> Iterator[bytes]:
        calls = 0
        for index, part in enumerate(reply.parts):
            if isinstance(part, Text):
                for piece in cut(part.text, reply.chunk):
                    yield _chunk(reply, {"content": piece})
            elif isinstance(part, Thinking):
                for piece in cut(part.text, reply.chunk):
                    yield _chunk(reply, self._thought(piece, index))
            elif isinstance(part, ToolCall):
                begun = _call(part) | {"index": calls}
                begun["function"] = {"name": part.name, "arguments": ""}
                yield _chunk(reply, {"tool_calls": [begun]})
                for piece in cut(part.arguments, reply.chunk):
                    more = {"index": calls, "function": {"arguments": piece}}
                    yield _chunk(reply, {"tool_calls": [more]})
                calls += 1

    def closing(self, reply: FakeReply) -> bytes:
        end = _chunk(reply, {}, finish=_STOPS[reply.stop])
        usage = _shell(reply, "chat.completion.chunk", []) | {"usage": _usage(reply)}
        return end + _event(usage) + b"data: [DONE]\n\n"

    def _thought(self, text: str, index: int) -> dict[str, Any]:
        if not self._reasoning:
            return {"reasoning_content": text}
        detail = {"type": "reasoning.text", "text": text, "index": index, "format": "unknown"}
        return {"reasoning": text, "reasoning_details": [detail]}


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def _shell(reply: FakeReply, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": reply.id,
        "object": kind,
        "created": int(time.time()),
        "model": reply.model,
        "choices": choices,
    }


def _chunk(reply: FakeReply, delta: dict[str, Any], *, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return _event(_shell(reply, "chat.completion.chunk", [choice]))


def _usage(reply: FakeReply) -> dict[str, Any]:
    used = reply.usage
    return {
        "prompt_tokens": used.input_tokens,
        "completion_tokens": used.output_tokens,
        "total_tokens": used.total_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cache_read_tokens},
    }


def _said(reply: FakeReply, kind: type[Text] | type[Thinking]) -> str:
    return "".join(part.text for part in reply.parts if isinstance(part, kind))


def _call(part: ToolCall) -> dict[str, Any]:
    return {
        "id": part.id,
        "type": "function",
        "function": {"name": part.name, "arguments": part.arguments},
    }


def _instructs(turn: dict[str, Any]) -> bool:
    return turn.get("role") in ("system", "developer")


def _words(turn: dict[str, Any]) -> str:
    content = turn.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def _tools(body: dict[str, Any]) -> tuple[ToolSpec, ...]:
    made = []
    for at, tool in enumerate(body.get("tools") or []):
        function = tool.get("function") or {}
        name = function.get("name", "")
        need(
            _NAME.fullmatch(name),
            f"Invalid 'tools[{at}].function.name': string does not match pattern. Expected a "
            "string that matches the pattern '^[a-zA-Z0-9_-]+$'.",
        )
        schema = function.get("parameters") or {"type": "object"}
        need(
            schema.get("type") == "object",
            f"Invalid schema for function '{name}': schema must be a JSON Schema of 'type: "
            f'"object"\', got \'type: "{schema.get("type")}"\'.',
        )
        made.append(ToolSpec(name, function.get("description", ""), schema))
    return tuple(made)


def _schema(form: dict[str, Any]) -> dict[str, Any] | None:
    if form.get("type") != "json_schema":
        return None
    told = form.get("json_schema") or {}
    need(told.get("name"), "Missing required parameter: 'response_format.json_schema.name'.")
    schema: dict[str, Any] = told.get("schema") or {}
    if told.get("strict"):
        need(
            schema.get("additionalProperties") is False,
            f"Invalid schema for response_format '{told['name']}': In context=(), "
            "'additionalProperties' is required to be supplied and to be false.",
        )
    return schema


def _messages(turns: list[dict[str, Any]]) -> tuple[Message, ...]:
    messages: list[Message] = []
    waiting: dict[str, str] = {}
    returns: list[ToolReturn] = []
    for at, turn in enumerate(turns):
        role = turn.get("role")
        need(role in _ROLES, f"Invalid value: {role!r}. Supported values are: {', '.join(_ROLES)}.")
        if role == "tool":
            wanted = turn.get("tool_call_id", "")
            need(
                wanted in waiting,
                f"Invalid parameter: messages with role 'tool' must be a response to a "
                f"preceeding message with 'tool_calls'. (messages.[{at}].role)",
            )
            need(turn.get("content") is not None, f"Invalid value for 'messages.[{at}].content'.")
            name = waiting.pop(wanted)
            returns.append(ToolReturn(call_id=wanted, name=name, text=_words(turn)))
            continue
        _check_answered(waiting)
        if returns:
            messages.append(ToolReturns(tuple(returns)))
            returns = []
        if role == "assistant":
            message = _assistant(at, turn)
            waiting = {made.id: made.name for made in message.calls}
            messages.append(message)
        elif role == "user":
            messages.append(_user(at, turn))
    _check_answered(waiting)
    if returns:
        messages.append(ToolReturns(tuple(returns)))
    return tuple(messages)


def _check_answered(waiting: dict[str, str]) -> None:
    need(
        not waiting,
        "An assistant message with 'tool_calls' must be followed by tool messages responding to "
        "each 'tool_call_id'. The following tool_call_ids did not have response messages: "
        f"{', '.join(waiting)}",
    )


def _assistant(at: int, turn: dict[str, Any]) -> AssistantMessage:
    parts: list[AssistantPart] = []
    if thought := turn.get("reasoning_content") or turn.get("reasoning"):
        parts.append(Thinking(thought))
    if said := _words(turn):
        parts.append(Text(said))
    for made in turn.get("tool_calls") or []:
        function = made.get("function") or {}
        arguments = function.get("arguments")
        need(isinstance(arguments, str), f"Invalid type for 'messages[{at}].tool_calls': a string.")
        parts.append(ToolCall(made["id"], function["name"], str(arguments)))
    need(parts, f"Invalid value for 'content': expected a string, got null. (messages.[{at}])")
    return AssistantMessage(parts=tuple(parts), model="openai/fake")


def _user(at: int, turn: dict[str, Any]) -> UserMessage:
    content = turn.get("content")
    need(content is not None, f"Invalid value for 'content': got null. (messages.[{at}].content)")
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
        need(media and data, f"Invalid 'messages[{at}].content': not a picture's data URL.")
        return Image(media, hashlib.sha256(data.encode()).hexdigest())
    reject(f"Invalid value: {part.get('type')!r}. Supported values are: 'text', 'image_url'.")
