"""What an MCP server answered, as the model is shown it."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
from typing import TYPE_CHECKING

from smokebox.agents.tools.images import image_type
from smokebox.agents.tools.returned import as_result
from smokebox.agents.tools.tool import ToolImage, ToolResult

if TYPE_CHECKING:
    from mcp_types import CallToolResult, ContentBlock

    from smokebox.sandbox.api import SandboxApi


async def shown(tool: str, answer: CallToolResult, sandbox: SandboxApi | None) -> ToolResult:
    """The result of a call, with its images; long text is cut, and kept in the workspace."""
    parts = [_part(block) for block in answer.content]
    if not parts and answer.structured_content is not None:
        parts = [json.dumps(answer.structured_content, ensure_ascii=False)]
    words = "\n\n".join(part for part in parts if isinstance(part, str) and part)
    images = [part for part in parts if isinstance(part, ToolImage)]
    value = [words, *images] if images and words else images or words
    result = await as_result(tool, value, sandbox)
    return dataclasses.replace(result, is_error=result.is_error or answer.is_error)


def _part(block: ContentBlock) -> str | ToolImage:
    match block.type:
        case "text":
            return block.text
        case "image":
            return _decoded(block.data, "an image", block.mime_type)
        case "audio":
            return f"[audio, {block.mime_type}: it cannot be played here]"
        case "resource_link":
            about = f": {block.description}" if block.description else ""
            return f"[resource {block.name}, {block.uri}{about}]"
        case "resource":
            held = block.resource
            if hasattr(held, "text"):
                return f"{held.uri}:\n{held.text}"
            return _decoded(held.blob, str(held.uri), held.mime_type or "")


def _decoded(data: str, what: str, media_type: str) -> str | ToolImage:
    try:
        decoded = base64.b64decode(data, validate=True)
    except binascii.Error:
        return f"[{what} that is not base64]"
    kind = image_type(decoded)
    if kind is None:
        return f"[{what}: {media_type or 'binary data'}, {len(decoded)} bytes]"
    return ToolImage(media_type=kind, data=decoded)
