"""One ASGI app over an engine: the native API, and protocols that other clients speak."""
