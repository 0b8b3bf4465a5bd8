"""Shells that remember from one command to the next."""
