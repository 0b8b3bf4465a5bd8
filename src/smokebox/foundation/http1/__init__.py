"""HTTP/1.1 for the proxies and the SDK: heads, bodies, connections and a pool.

`head` parses and writes heads, `body` reads and writes bodies, `connection` buffers one socket,
`client` sends a request over a pooled connection, `pool` keeps idle connections, and `dial` opens
sockets to addresses that were checked first. Nothing here knows a policy.
"""
