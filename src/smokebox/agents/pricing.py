"""Prices of models, from the table of genai-prices, which is imported on first use."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genai_prices.types import ModelPrice

    from smokebox.agents.messages import Usage

_MILLION = 1_000_000
# Prices per token. If none depends on the number of tokens, the table is not consulted again.
_RATES = ("input_mtok", "output_mtok", "cache_read_mtok", "cache_write_mtok")


@dataclass(frozen=True, slots=True)
class Rates:
    """US dollars per token of each kind."""

    input: float
    output: float
    cache_read: float
    cache_write: float

    def cost(self, usage: Usage) -> float:
        """Return the cost in US dollars."""
        fresh = usage.input_tokens - usage.cache_read_tokens - usage.cache_write_tokens
        return (
            fresh * self.input
            + usage.output_tokens * self.output
            + usage.cache_read_tokens * self.cache_read
            + usage.cache_write_tokens * self.cache_write
        )


@dataclass(frozen=True, slots=True)
class Price:
    """Price of one model, looked up once. `rates` is None if it depends on the token count."""

    table: ModelPrice
    rates: Rates | None
    context_window: int | None

    def cost(self, usage: Usage) -> float | None:
        """Return the cost in US dollars, or None if the table has no price for this usage."""
        if self.rates is not None:
            return self.rates.cost(usage)
        from genai_prices import Usage as PriceUsage

        counted: Any = PriceUsage(
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            cache_read_tokens=usage.cache_read_tokens,
            cache_write_tokens=usage.cache_write_tokens,
        )
        try:
            return float(self.table.calc_price(counted)["total_price"])
        except (LookupError, ValueError):
            return None


def find_price(provider: str, model: str) -> Price | None:
    """Return today's price of a model, or None if the table does not have it."""
    from genai_prices.data_snapshot import get_snapshot

    try:
        _, found = get_snapshot().find_provider_model(
            model, provider=None, provider_id=provider, provider_api_url=None
        )
    except LookupError:
        return None
    table = found.get_prices(datetime.now(UTC))
    return Price(table, _rates(table), found.context_window)


def _rates(table: ModelPrice) -> Rates | None:
    prices = [getattr(table, name, None) for name in _RATES]
    simple = all(value is None or isinstance(value, Decimal) for value in prices)
    if not simple or prices[0] is None or prices[1] is None or table.requests_kcount is not None:
        return None
    # Cached tokens without a separate price cost as much as other input.
    return Rates(*(float(prices[0] if value is None else value) / _MILLION for value in prices))
