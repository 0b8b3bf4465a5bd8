"""Previews: HTTP and WebSocket access from outside to ports of sandboxes.

`protocol` tells their requests from those to the API, `names` knows their host names and URLs,
`access` checks tokens, and `proxy` forwards requests to the sandbox.
"""
