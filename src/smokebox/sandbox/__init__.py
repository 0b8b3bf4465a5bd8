"""Sandboxes: their common contract, and the implementations that need no server.

Nothing is imported here: the first process of every Linux sandbox imports this package.
"""
