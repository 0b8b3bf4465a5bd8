"""A server that speaks as model providers do: their dialects, their checks, their faults."""
