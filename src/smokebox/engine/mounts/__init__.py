"""Buckets mounted as directories of a sandbox by FUSE, and served from outside."""
