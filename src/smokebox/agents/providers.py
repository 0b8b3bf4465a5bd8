"""Providers of models: the known ones, those that a project configures, and their keys.

[models.local]                          # smokebox.toml: any server with OpenAI's chat API
base_url = "http://localhost:8000/v1"
context_window = 32768

[models.anthropic]                      # a known provider, through a gateway
base_url = "https://gateway.example.com/anthropic"
api_key_env = "GATEWAY_KEY"
headers = { x-team = "agents" }
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from smokebox.errors import InvalidOption, ModelRefused
from smokebox.options import refuse_unknown
from smokebox.project import load_config

if TYPE_CHECKING:
    from collections.abc import Mapping

Dialect: TypeAlias = Literal["anthropic", "chat", "responses", "openrouter", "google"]
DIALECTS: tuple[Dialect, ...] = ("anthropic", "chat", "responses", "openrouter", "google")
WITHOUT_A_KEY = (
    "Without any key, use smokebox.testing.ScriptedModel, or your own server with [models.NAME] "
    "base_url in smokebox.toml."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """Address, API and key of a provider, and capabilities of its models.

    The key is the first of the variables `api_key_env` that is set; a server without keys
    names none. Capabilities (the last five fields) that are None follow from the model's name.
    """

    name: str
    api: Dialect = "chat"
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    api_key_env: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    context_window: int | None = None
    max_output: int | None = None
    images: bool | None = None
    thinking: bool | None = None
    native_results: bool | None = None

    def key(self) -> str | None:
        """Return its key, or None if it needs none. Raises `ModelRefused` if it is not set."""
        if self.api_key:
            return self.api_key
        if not self.api_key_env:
            return None
        secrets = load_config().secrets
        for variable in self.api_key_env:
            if value := secrets.get(variable):
                return value
        raise ModelRefused(
            f"there is no key for {self.name}: {' or '.join(self.api_key_env)} is not set.",
            hint=f"Set {self.api_key_env[0]} in the environment or in .env. {WITHOUT_A_KEY}",
            model=self.name,
            variable=self.api_key_env[0],
        )


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A provider, and the name of a model there."""

    provider: Provider
    model: str

    @property
    def name(self) -> str:
        """`provider/model`."""
        return f"{self.provider.name}/{self.model}"


def _known(name: str, url: str | None, *keys: str, api: Dialect = "chat") -> Provider:
    return Provider(name=name, base_url=url, api_key_env=keys, api=api)


KNOWN: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        _known("anthropic", None, "ANTHROPIC_API_KEY", api="anthropic"),
        _known("openai", None, "OPENAI_API_KEY", api="responses"),
        _known(
            "openrouter", "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY", api="openrouter"
        ),
        _known("google", None, "GEMINI_API_KEY", "GOOGLE_API_KEY", api="google"),
        _known("cerebras", "https://api.cerebras.ai/v1", "CEREBRAS_API_KEY"),
        _known("deepseek", "https://api.deepseek.com", "DEEPSEEK_API_KEY"),
        _known("fireworks", "https://api.fireworks.ai/inference/v1", "FIREWORKS_API_KEY"),
        _known("groq", "https://api.groq.com/openai/v1", "GROQ_API_KEY"),
        _known("mistral", "https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
        _known("moonshotai", "https://api.moonshot.ai/v1", "MOONSHOTAI_API_KEY"),
        _known("ollama", "http://localhost:11434/v1"),
        _known("together", "https://api.together.xyz/v1", "TOGETHER_API_KEY"),
        _known("xai", "https://api.x.ai/v1", "XAI_API_KEY"),
        _known("zai", "https://api.z.ai/api/paas/v4", "ZAI_API_KEY"),
    )
}
_OPTIONS = tuple(each.name for each in fields(Provider) if each.name != "name")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "context_window": int,
    "max_output": int,
    "images": bool,
    "thinking": bool,
    "native_results": bool,
    "base_url": str,
    "api_key": str,
    "api": str,
    "headers": dict,
    "api_key_env": (str, list, tuple),
}


def find_model(spec: str, config: Mapping[str, Mapping[str, Any]]) -> NamedModel:
    """Resolve `provider/model`. Raises `InvalidOption` if the provider is unknown."""
    name, slash, model = spec.partition("/")
    if not slash or not name or not model:
        raise InvalidOption(
            f"model must be 'provider/model', not {spec!r}.",
            hint='Write "anthropic/claude-sonnet-4-6" or "openrouter/moonshotai/kimi-k2.6".',
            option="model",
            value=spec,
        )
    return NamedModel(find_provider(name, config), model)


def find_provider(name: str, config: Mapping[str, Mapping[str, Any]]) -> Provider:
    """Return a provider by name, with the project's changes. Raises `InvalidOption`."""
    configured = config.get(name)
    known = KNOWN.get(name)
    if configured is None and known is None:
        names = sorted({*KNOWN, *config})
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known providers: {', '.join(names)}."
        raise InvalidOption(
            f"there is no model provider {name!r}.",
            hint=f"{hint} To use your own server, add [models.{name}] to smokebox.toml.",
            option="model",
            value=name,
            nearest=near[0] if near else None,
        )
    provider = known or Provider(name=name)
    if configured is not None:
        provider = _configure(provider, f"[models.{name}]", configured)
    if provider.base_url is None and known is None:
        raise InvalidOption(
            f"[models.{name}] has no base_url.",
            hint='Add the address of its server: base_url = "http://localhost:8000/v1".',
            option="base_url",
        )
    return provider


def _configure(provider: Provider, where: str, options: Mapping[str, Any]) -> Provider:
    refuse_unknown(where, options, _OPTIONS)
    for option, value in options.items():
        kind = _TYPES[option]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InvalidOption(
                f"{where}: {option} cannot be {value!r}.",
                hint=f"It is {_describe(kind)}.",
                option=option,
                value=value,
            )
    api = options.get("api")
    if api is not None and api not in DIALECTS:
        raise InvalidOption(
            f"{where}: api cannot be {api!r}.",
            hint=f"It is one of: {', '.join(DIALECTS)}.",
            option="api",
            value=api,
        )
    changes: dict[str, Any] = dict(options)
    if isinstance(names := changes.get("api_key_env"), str):
        changes["api_key_env"] = (names,)
    elif names is not None:
        changes["api_key_env"] = tuple(names)
    if "base_url" in changes and api is None and provider.api == "responses":
        # Other servers with OpenAI's API have its older chat API.
        changes["api"] = "chat"
    return replace(provider, **changes)


def _describe(kind: type | tuple[type, ...]) -> str:
    names = {int: "a whole number", bool: "true or false", str: "text", dict: "a table of text"}
    return "a name, or a list of names" if isinstance(kind, tuple) else names[kind]
