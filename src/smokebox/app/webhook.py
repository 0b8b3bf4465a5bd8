"""Signatures of webhooks."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from smokebox.errors import InvalidOption, Unauthorized
from smokebox.options import refuse_unknown

PRESETS = ("github", "slack", "stripe", "standard", "hmac")
# Maximum age of a request whose signature covers the time.
WINDOW_SECONDS = 300.0
_STAMP_DIGITS = 15
_OPTIONS = ("verify", "secret", "header", "algorithm", "window")
# Options by preset. Only these presets sign the time.
_PRESET_OPTIONS = {
    "github": frozenset[str](),
    "slack": frozenset(("window",)),
    "stripe": frozenset(("window",)),
    "standard": frozenset(("window",)),
    "hmac": frozenset(("header", "algorithm")),
}
_ALGORITHMS = ("sha256", "sha512", "sha1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Signature scheme of a webhook; `secret` is the name of the variable that holds the secret."""

    preset: str
    secret: str
    header: str = "x-signature"
    algorithm: str = "sha256"
    window: float = WINDOW_SECONDS

    def check(self, headers: Mapping[str, str], body: bytes, secret: str) -> Delivery:
        """Return the delivery. Raises `Unauthorized` if it is not signed."""
        return _CHECKS[self.preset](self, headers, body, secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A signed request. Its URL is not signed, so it is accepted for one target only.

    `key` identifies it. With `repeats`, the sender may send the same one again and mean another.
    """

    key: str
    repeats: bool = False


def parse_signature(options: object, where: str) -> Signature:
    """Parse `triggers = {"webhook": {"verify": "github", "secret": "NAME"}}`."""
    if not isinstance(options, Mapping):
        raise InvalidOption(
            f"{where}: webhook must be True, False or a dict, not {options!r:.80}.",
            hint='Write {"verify": "github", "secret": "GITHUB_WEBHOOK_SECRET"}.',
            option="webhook",
            value=options,
        )
    refuse_unknown(f"{where}: webhook", options, _OPTIONS)
    preset, secret = options.get("verify"), options.get("secret")
    if preset not in PRESETS:
        raise InvalidOption(
            f"{where}: verify must be one of {', '.join(PRESETS)}, not {preset!r:.80}.",
            hint="Use 'hmac' for senders that are not listed.",
            option="verify",
            value=preset,
        )
    if not (isinstance(secret, str) and secret.isidentifier()):
        raise InvalidOption(
            f"{where}: secret must be the name of a variable that holds the secret.",
            hint='Write "secret": "WEBHOOK_SECRET", and put WEBHOOK_SECRET=... into .env.',
            option="secret",
        )
    for option in options.keys() - _PRESET_OPTIONS[str(preset)] - {"verify", "secret"}:
        raise InvalidOption(
            f"{where}: {preset} does not take {option}.",
            hint="Leave it out.",
            option=str(option),
            value=options[option],
        )
    algorithm = options.get("algorithm", "sha256")
    window = options.get("window", WINDOW_SECONDS)
    if algorithm not in _ALGORITHMS or not isinstance(window, (int, float)) or window <= 0:
        raise InvalidOption(
            f"{where}: algorithm must be one of {', '.join(_ALGORITHMS)}, and window seconds.",
            hint="Leave them out for sha256 and five minutes.",
            option="algorithm",
            value=algorithm,
        )
    return Signature(
        preset=str(preset),
        secret=secret,
        header=str(options.get("header", "x-signature")).lower(),
        algorithm=str(algorithm),
        window=float(window),
    )


def _github(scheme: Signature, headers: Mapping[str, str], body: bytes, secret: str) -> Delivery:
    expected = _hex(secret.encode(), body)
    _compare(headers.get("x-hub-signature-256", "").removeprefix("sha256="), expected)
    # GitHub signs neither the time nor the delivery's id: the same body is accepted once.
    return Delivery(key=expected)


def _slack(scheme: Signature, headers: Mapping[str, str], body: bytes, secret: str) -> Delivery:
    stamp = headers.get("x-slack-request-timestamp", "")
    _check_age(stamp, scheme.window)
    expected = _hex(secret.encode(), b"v0:" + stamp.encode() + b":" + body)
    _compare(headers.get("x-slack-signature", "").removeprefix("v0="), expected)
    # Slack resends a delivery that got no timely response, with the same signature.
    return Delivery(key=expected)


def _stripe(scheme: Signature, headers: Mapping[str, str], body: bytes, secret: str) -> Delivery:
    pairs = [part.partition("=") for part in headers.get("stripe-signature", "").split(",")]
    stamp = next((value for name, _, value in pairs if name.strip() == "t"), "")
    _check_age(stamp, scheme.window)
    expected = _hex(secret.encode(), stamp.encode() + b"." + body)
    signatures = [value for name, _, value in pairs if name.strip() == "v1"]
    if not any([hmac.compare_digest(one.encode(), expected.encode()) for one in signatures]):
        raise _invalid_signature()
    return Delivery(key=expected)


def _standard(scheme: Signature, headers: Mapping[str, str], body: bytes, secret: str) -> Delivery:
    id, stamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    _check_age(stamp, scheme.window)
    if not id:
        raise Unauthorized(
            "this webhook has no id.", hint="Send the header webhook-id, and sign it."
        )
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except ValueError:
        raise Unauthorized("the secret of this webhook is not base64.") from None
    signed = f"{id}.{stamp}.".encode() + body
    expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest())
    signatures = [one.partition(",")[2] for one in headers.get("webhook-signature", "").split(" ")]
    if not any([hmac.compare_digest(one.encode(), expected) for one in signatures]):
        raise _invalid_signature()
    return Delivery(key=id)


def _hmac(scheme: Signature, headers: Mapping[str, str], body: bytes, secret: str) -> Delivery:
    signature = headers.get(scheme.header, "").removeprefix(f"{scheme.algorithm}=")
    expected = _hex(secret.encode(), body, scheme.algorithm)
    _compare(signature, expected)
    return Delivery(key=expected, repeats=True)


_CHECKS: dict[str, Callable[[Signature, Mapping[str, str], bytes, str], Delivery]] = {
    "github": _github,
    "slack": _slack,
    "stripe": _stripe,
    "standard": _standard,
    "hmac": _hmac,
}


def _hex(key: bytes, body: bytes, algorithm: str = "sha256") -> str:
    return hmac.new(key, body, algorithm).hexdigest()


def _compare(signature: str, expected: str) -> None:
    if not hmac.compare_digest(signature.lower().encode(), expected.encode()):
        raise _invalid_signature()


def _check_age(stamp: str, window: float) -> None:
    # Longer numbers are no times, and too large for a float or for `int`.
    if not (stamp.isascii() and stamp.isdigit() and len(stamp) <= _STAMP_DIGITS):
        raise Unauthorized(
            f"this webhook has no valid timestamp: {stamp!r:.80}.",
            hint="Send and sign the time in seconds since 1970.",
        )
    if abs(time.time() - int(stamp)) > window:
        raise Unauthorized(
            f"this webhook was signed more than {window:g} seconds from the present time.",
            hint="Send it again, and check that both clocks agree.",
        )


def _invalid_signature() -> Unauthorized:
    return Unauthorized(
        "this webhook has no valid signature.",
        hint="Check that sender and app have the same secret.",
    )
