"""Terminals: programs of a sandbox with interactive input and output."""
