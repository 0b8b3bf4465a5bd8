"""Every message on a socket, defined once, for the server and its clients.

Requests are `msgspec` structs that refuse unknown fields; responses are the values of
`smokebox.types`. Paths begin with `API`.
"""

from __future__ import annotations

API = "/api"
# Seconds between heartbeats on a slow response, and seconds of silence after which a client may
# take the server for dead.
HEARTBEAT = 5.0
SILENCE = 20.0
# Headers: the id of a request in logs, and the key that makes a creating request safe to repeat.
REQUEST_ID = "x-request-id"
IDEMPOTENCY_KEY = "idempotency-key"
# Header of responses: the version of the server.
VERSION = "x-smokebox-version"
