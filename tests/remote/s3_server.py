"""An S3 server in a process of its own: `python s3_server.py` says its port, and ends when its input does."""

from __future__ import annotations

import sys

from moto.server import ThreadedMotoServer


def serve() -> None:
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    serve()
