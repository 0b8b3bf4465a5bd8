"""Cloning repositories into a sandbox that has no network."""
