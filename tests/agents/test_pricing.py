"""Tests of prices of models."""

from __future__ import annotations

import pytest
from genai_prices import Usage as PriceUsage
from genai_prices import calc_price

from smokebox.agents.messages import Usage
from smokebox.agents.pricing import find_price

USAGE = Usage(
    requests=1,
    input_tokens=300_000,
    output_tokens=2_000,
    cache_read_tokens=100_000,
    cache_write_tokens=50_000,
)


@pytest.mark.parametrize(
    ("provider", "model"),
    [
        ("anthropic", "claude-sonnet-4-6"),
        ("anthropic", "claude-haiku-4-5"),
        ("openai", "gpt-5.2"),
        ("openai", "gpt-4o"),
        ("google", "gemini-2.5-pro"),
        ("openrouter", "moonshotai/kimi-k2.6"),
        ("deepseek", "deepseek-chat"),
    ],
)
def test_cost_equals_that_of_the_table(provider: str, model: str) -> None:
    price = find_price(provider, model)
    assert price is not None
    counted = PriceUsage(
        input_tokens=USAGE.input_tokens,
        output_tokens=USAGE.output_tokens,
        cache_read_tokens=USAGE.cache_read_tokens,
        cache_write_tokens=USAGE.cache_write_tokens,
    )
    expected = float(calc_price(counted, model, provider_id=provider).total_price)
    assert price.cost(USAGE) == pytest.approx(expected)


def test_unknown_model_has_no_price() -> None:
    assert find_price("openai", "not-a-model") is None
    assert find_price("unknown", "gpt-4o") is None
