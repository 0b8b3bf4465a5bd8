"""Representations of values by MIME type, as in Jupyter."""

from __future__ import annotations

import json
import sys
from binascii import b2a_base64

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PLAIN = "text/plain"
METHODS = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_pdf_": "application/pdf",
    "_repr_latex_": "text/latex",
    "_repr_json_": "application/json",
    "_repr_javascript_": "application/javascript",
}
# Limits of all representations of a value together, and of its text.
MAX_SIZE = 16 << 20
MAX_TEXT = 1 << 20


def bundle_of(value: Any) -> dict[str, Any]:
    """Return all representations of a value. Raises what its methods raise."""
    found = _mimebundle(value)
    if PLAIN not in found:
        found[PLAIN] = _shorten(repr(value))
    for name, mime in METHODS.items():
        if mime not in found and (shown := _call(value, name)) is not None:
            found[mime] = shown
    if isinstance(value, (dict, list)) and "application/json" not in found:
        found["application/json"] = value
    return limit(found)


def limit(bundle: dict[str, Any]) -> dict[str, Any]:
    """Return a bundle that JSON can hold and that is within the limit. Bytes become base64."""
    found: dict[str, Any] = {}
    size = 0
    for mime, value in bundle.items():
        plain = _to_json(mime, value)
        if plain is None:
            continue
        size += len(plain) if isinstance(plain, str) else len(json.dumps(plain))
        if size > MAX_SIZE:
            found[PLAIN] = f"{found.get(PLAIN, '')}\n[smokebox: {mime} is too large to display]"
            break
        found[mime] = plain
    return found


def _mimebundle(value: Any) -> dict[str, Any]:
    bundle = _call(value, "_repr_mimebundle_")
    if isinstance(bundle, tuple):
        bundle = bundle[0]
    if isinstance(bundle, dict):
        return dict(bundle)
    figures = sys.modules.get("matplotlib.figure")
    if figures is not None and isinstance(value, figures.Figure):
        from . import figures as drawing

        return drawing.bundle_of(value)
    return {}


def _call(value: Any, name: str) -> Any:
    # A class has the methods of its instances, and an object with every attribute (a mock, a
    # proxy) has none of these.
    if isinstance(value, type) or getattr(value, "_ipython_canary_method_", None) is not None:
        return None
    method = getattr(value, name, None)
    if not callable(method):
        return None
    try:
        shown = method()
    except NotImplementedError:
        return None
    # As in Jupyter, it may return data and metadata.
    return shown[0] if isinstance(shown, tuple) and name != "_repr_mimebundle_" else shown


def _to_json(mime: str, value: Any) -> Any:
    if isinstance(value, (bytes, bytearray)):
        return b2a_base64(value, newline=False).decode()
    if isinstance(value, str):
        return value.replace("\n", "") if mime in ("image/png", "image/jpeg") else value
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
    return value


def _shorten(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    left = len(text) - 2 * half
    return f"{text[:half]}\n[smokebox: {left} characters left out here]\n{text[-half:]}"
