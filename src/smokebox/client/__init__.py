"""The SDK: Linux sandboxes by id, on a local or remote server."""
