"""Protocols of other people's clients, answered by the same engine."""
