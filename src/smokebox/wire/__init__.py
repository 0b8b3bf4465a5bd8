"""Every message on a socket, defined once, for the server and its clients.

Requests are `msgspec` structs that refuse fields they do not know; answers are the values of
`smokebox.types`. Paths begin with `API`.
"""

from __future__ import annotations

API = "/api"
# Seconds between signs of life on an answer that takes long, and without any until a client
# may take the server for dead.
HEARTBEAT = 5.0
SILENCE = 20.0
# What the client says of itself, and what makes a creating request safe to repeat.
REQUEST_ID = "x-request-id"
IDEMPOTENCY_KEY = "idempotency-key"
