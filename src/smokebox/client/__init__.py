"""The SDK: Linux sandboxes by id, wherever their server is."""
