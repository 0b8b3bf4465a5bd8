"""The server in the sandboxes of these tests, which returns the request it received."""

import base64
import hashlib
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def log(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class App(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    connections = 0

    def setup(self) -> None:
        super().setup()
        App.connections += 1

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        action = getattr(self, f"show_{path.strip('/').replace('-', '_')}", None)
        if action is not None:
            action()
            return
        body = self.read()
        received = {
            "method": self.command,
            "path": self.path,
            "headers": [[name.lower(), value] for name, value in self.headers.items()],
            "size": len(body),
            "hash": hashlib.sha256(body).hexdigest(),
            "connections": App.connections,
        }
        self.respond(json.dumps(received).encode(), ("content-type", "application/json"))

    do_POST = do_PUT = do_DELETE = do_OPTIONS = do_HEAD = do_GET

    def read(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def respond(self, body: bytes, *headers: tuple[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def show_cookies(self) -> None:
        self.respond(
            b"",
            ("set-cookie", "a=1; Domain=localhost; Path=/x; HttpOnly"),
            ("set-cookie", "b=2"),
            ("set-cookie", "smokebox_key=stolen; Path=/"),
            ("set-cookie", "__Host-smokebox-token=stolen; Path=/; Secure"),
            ("set-cookie", "c=3; Secure;  DOMAIN =.preview.example.com"),
        )

    def show_policy(self) -> None:
        self.respond(b"", ("referrer-policy", self.path.partition("?")[2]))

    def show_redirect(self) -> None:
        self.respond(b"", ("location", self.path.partition("?")[2]), status=302)

    def show_hops(self) -> None:
        self.respond(
            b"",
            ("connection", "x-secret, keep-alive"),
            ("x-secret", "1"),
            ("keep-alive", "timeout=5"),
            ("alt-svc", 'h3=":443"'),
            ("x-kept", "1"),
        )

    def show_events(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            for number in range(10_000):
                data = f"data: {number}\n\n".encode()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
                time.sleep(0.02)
        except OSError:
            log("the client left")

    def show_endless(self) -> None:
        """Send a body that ends with the connection."""
        self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")
        self.close_connection = True

    def show_broken(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
        self.close_connection = True

    def show_nothing(self) -> None:
        self.close_connection = True

    def show_nonsense(self) -> None:
        self.wfile.write(b"what is HTTP?\r\n\r\n")
        self.close_connection = True

    def show_two_lengths(self) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n"
        self.wfile.write(head + b"2\r\nhi\r\n0\r\n\r\n")
        self.close_connection = True

    def show_early(self) -> None:
        """Respond before the request has ended."""
        self.respond(b"too much", status=413)
        self.read()

    def show_interim(self) -> None:
        self.wfile.write(b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n")
        self.respond(b"done")

    def show_big(self) -> None:
        size = int(self.path.partition("?")[2])
        self.send_response(200)
        self.send_header("content-length", str(size))
        self.end_headers()
        piece = bytes(1 << 16)
        while size and self.command != "HEAD":
            size -= self.wfile.write(piece[:size])

    def show_ws(self) -> None:
        """Echo WebSocket messages, in frames of up to 125 bytes."""
        key = self.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.send_response(101)
        self.send_header("connection", "Upgrade")
        self.send_header("upgrade", "websocket")
        self.send_header("sec-websocket-accept", accept)
        self.end_headers()
        self.close_connection = True
        while head := self.rfile.read(2):
            mask, size = self.rfile.read(4), head[1] & 0x7F
            data = bytes(byte ^ mask[index % 4] for index, byte in enumerate(self.rfile.read(size)))
            self.wfile.write(bytes([head[0], size]) + data)
            if head[0] & 0xF == 8:
                return

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


if __name__ == "__main__":
    server = Server(("127.0.0.1", int(sys.argv[1])), App)
    log("listening")
    server.serve_forever()
