"""Buckets as directories of a Linux sandbox: mounted by FUSE, served from outside of it."""
