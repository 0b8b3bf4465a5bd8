"""Terminals: programs of a sandbox that are typed to and watched."""
