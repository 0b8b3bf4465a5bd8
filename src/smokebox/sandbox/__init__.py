"""Sandboxes: the contract that all of them keep, and the ones that need no server.

Nothing is imported here: the first process of every Linux sandbox passes through.
"""
