"""A server in a sandbox that breaks HTTP, in the way that the path of a request names."""

import contextlib
import itertools
import socket
import sys
import threading
import time

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
# The start of a response, and what is sent after it until the peer closes the connection.
ENDLESS = {
    "status-line": (b"HTTP/1.1 200 ", b"a" * 65536),
    "field": (OK + b"x: ", b"a" * 65536),
    "fields": (OK, b"x: y\r\n" * 4096),
    "interim": (b"", b"HTTP/1.1 103 Early Hints\r\nx: y\r\n\r\n" * 1024),
    "trailers": (CHUNKED + b"0\r\n", b"x: y\r\n" * 4096),
    "extensions": (CHUNKED, (b"1;" + b"a" * 4000 + b"\r\nx\r\n") * 16),
    "tiny-chunks": (CHUNKED, b"1\r\nx\r\n" * 8192),
    "chunk-size": (CHUNKED, b"0" * 65536),
}
# The same, a byte at a time.
SLOW = {
    "slow-head": OK + b"x: " + b"a" * 60_000,
    "slow-interim": b"HTTP/1.1 100 Continue\r\n\r\n" * 4096,
}
connections = itertools.count(1)


def respond(client: socket.socket, body: bytes) -> None:
    client.sendall(OK + b"content-length: %d\r\n\r\n%b" % (len(body), body))


def serve(client: socket.socket, number: int) -> None:
    with client:
        while request := client.recv(65536):
            name = request.split()[1].decode().partition("?")[0].strip("/")
            if name in ENDLESS:
                start, more = ENDLESS[name]
                client.sendall(start)
                while True:
                    client.sendall(more)
            elif name in SLOW:
                for byte in SLOW[name]:
                    client.sendall(bytes([byte]))
                    time.sleep(0.005)
            elif name == "silent":
                time.sleep(1000)
            elif name == "silent-body":
                client.sendall(OK + b"content-length: 10\r\n\r\nx")
                time.sleep(1000)
            elif name == "two-at-once":
                client.sendall((OK + b"content-length: 3\r\n\r\none") * 2)
            elif name == "two":
                respond(client, b"one")
                time.sleep(0.1)
                respond(client, b"of another request")
            else:
                respond(client, b"%s on %d" % (name.encode(), number))


def serve_quietly(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        serve(client, next(connections))


if __name__ == "__main__":
    server = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=128)
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    while True:
        threading.Thread(target=serve_quietly, args=server.accept()[:1], daemon=True).start()
