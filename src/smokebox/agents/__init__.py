"""Agents over the sandbox contract. The tools that a model calls are in `agents.tools`."""
