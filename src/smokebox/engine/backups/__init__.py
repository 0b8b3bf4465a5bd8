"""Backups of directories of sandboxes: made, kept, restored, and removed in time."""
