"""A proxy in front of a store that counts requests, and fails on demand."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Trouble = Literal["refuse", "cut", "cut early", "stall", "hold"]


@dataclass
class Request:
    """A request that came: what it asked for, and how many bytes of an answer were sent."""

    method: str
    path: str
    range: str | None
    sent: int = 0


@dataclass
class Fault:
    """A fault for the first `times` requests that match.

    `refuse` answers with status 500; `cut` closes the connection amid the answer, `cut early` before it; `stall` sends
    half of the answer and nothing more until the client gives up; `hold` passes nothing on and waits for that too.
    """

    trouble: Trouble
    times: int = 1
    method: str = "GET"
    fits: Callable[[Request], bool] = lambda _: True
    met: int = 0


@dataclass
class Proxy:
    """The state of a running proxy. `faults` may be changed at any time."""

    port: int
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reset(self) -> None:
        """No faults, nothing counted."""
        with self.lock:
            self.faults.clear()
            self.requests.clear()

    def note(self, request: Request) -> Fault | None:
        """Count a request; returns the fault that it should have."""
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.met < fault.times and fault.method == request.method and fault.fits(request):
                    fault.met += 1
                    return fault
        return None

    def sent(self, part_of_path: str = "") -> int:
        """Bytes of objects that were sent in answer to GET."""
        with self.lock:
            return sum(r.sent for r in self.requests if r.method == "GET" and part_of_path in r.path)


def start(store_port: int) -> tuple[Proxy, ThreadingHTTPServer]:
    """Run a proxy in front of a local server, until `shutdown` of the returned server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = Request(self.command, self.path, self.headers.get("Range"))
            fault = proxy.note(request)
            if fault is not None and fault.trouble == "refuse":
                self.answer(500, {"Content-Type": "application/xml"}, b"<Error><Code>InternalError</Code></Error>")
                return
            if fault is not None and fault.trouble in ("cut early", "hold"):
                if fault.trouble == "hold":
                    self.wait_for_the_client_to_go()
                self.hang_up()
                return
            upstream = http.client.HTTPConnection("127.0.0.1", store_port, timeout=120)
            try:
                upstream.request(self.command, self.path, body or None, dict(self.headers))
                response = upstream.getresponse()
                data = response.read()
                headers = dict(response.getheaders())
            finally:
                upstream.close()
            if fault is None:
                request.sent = len(data)
                self.answer(response.status, headers, data)
                return
            self.answer(response.status, headers, data, keep_back=-(-len(data) // 2) or 1)
            if fault.trouble == "stall":
                self.wait_for_the_client_to_go()
            self.hang_up()

        def wait_for_the_client_to_go(self) -> None:
            self.connection.settimeout(300)
            with suppress(OSError):
                self.connection.recv(1)

        def answer(self, status: int, headers: dict[str, str], data: bytes, keep_back: int = 0) -> None:
            self.send_response_only(status)
            length = headers.get("Content-Length") if self.command == "HEAD" else None
            for name, value in headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.send_header("Content-Length", length or str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[: len(data) - keep_back])
                self.wfile.flush()

        def hang_up(self) -> None:
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on  # noqa: N815

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Clients that hang up are expected here."""

    server = Server(("127.0.0.1", 0), Handler)
    proxy = Proxy(server.server_address[1])
    threading.Thread(target=server.serve_forever, name="proxy", daemon=True).start()
    return proxy, server
