"""A real S3 server on loopback, behind a proxy that counts and fails on demand; and a store in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.remote import troubled_proxy
from tests.remote.troubled_proxy import Proxy
from ucp import settings


@pytest.fixture(scope="session")
def _proxy(s3_port: int) -> Iterator[Proxy]:
    proxy, server = troubled_proxy.start(s3_port)
    patch = pytest.MonkeyPatch()
    patch.setenv("AWS_ACCESS_KEY_ID", "test")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    patch.setenv("AWS_MAX_ATTEMPTS", "1")  # it is our attempts that are tested
    patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    yield proxy
    patch.undo()
    server.shutdown()
    server.server_close()


@pytest.fixture
def proxy(_proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The proxy in front of the S3 server, which works until a fault is configured."""
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setattr(settings, "REMOTE_RETRY_SECONDS", 0.001)
    _proxy.reset()
    yield _proxy
    _proxy.reset()


@pytest.fixture
def bucket(proxy: Proxy) -> str:
    """The URL of an empty bucket."""
    import s3fs

    name = f"bucket-{uuid4().hex}"
    s3fs.S3FileSystem().mkdir(name)
    proxy.reset()
    return f"s3://{name}"


@pytest.fixture
def memory() -> Iterator[str]:
    """The URL of an empty folder in a store in this process's memory."""
    fsspec = pytest.importorskip("fsspec")
    name = f"memory://{uuid4().hex}"
    yield name
    fs = fsspec.filesystem("memory")
    if fs.exists(name):
        fs.rm(name, recursive=True)


def upload(folder: Path, url: str) -> str:
    """Copy a folder into a store unchanged, as any tool would; returns its URL."""
    from fsspec.core import url_to_fs

    fs, _ = url_to_fs(url)
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            fs.pipe_file(f"{url}/{folder.name}/{file.relative_to(folder).as_posix()}", file.read_bytes())
    return f"{url}/{folder.name}"
