"""Backups of directories of sandboxes: creation, storage, restore and expiry."""
