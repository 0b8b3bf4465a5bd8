"""What models cost, by the table of genai-prices, where it knows them. Imported on first use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, Provider

    from smokebox.agents.messages import Usage


@dataclass(frozen=True, slots=True)
class Price:
    """The price of one model, looked up once."""

    provider: Provider
    model: ModelInfo

    @property
    def context_window(self) -> int | None:
        """How many tokens the model reads, where the table says."""
        return self.model.context_window

    def cost(self, usage: Usage) -> float | None:
        """In US dollars; None where the table has no price for what was used."""
        from genai_prices import Usage as Counted

        counted: Any = Counted(
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            cache_read_tokens=usage.cache_read_tokens,
            cache_write_tokens=usage.cache_write_tokens,
        )
        try:
            return float(self.model.calc_price(counted, self.provider).total_price)
        except (LookupError, ValueError):
            return None


def find_price(provider: str, model: str) -> Price | None:
    """The price of a model, or None where nobody says."""
    from genai_prices.data_snapshot import get_snapshot

    try:
        found = get_snapshot().find_provider_model(
            model, provider=None, provider_id=provider, provider_api_url=None
        )
    except LookupError:
        return None
    return Price(*found)
