"""Checkpoints on a local S3-compatible server that several processes use. ``make remote`` installs it."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from onecopy.checkpoint import load, save, storage, verify
from onecopy.checkpoint.storage import RemotePath
from tests.support import remote
from tests.support.harness import distributed

pytest.importorskip("s3fs", reason="s3fs is not installed: make remote")
pytest.importorskip("moto", reason="moto is not installed: make remote")

BUCKET = "s3://onecopy"
START_LIMIT = 60.0
"""Seconds that the server may take to start."""


def use(endpoint: str) -> None:
    """Let this process use the server."""
    os.environ.update(
        AWS_ENDPOINT_URL=endpoint,
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_DEFAULT_REGION="us-east-1",
    )


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server, which ends with this module."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    before = dict(os.environ)
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            deadline = time.monotonic() + START_LIMIT
            while not answers(port):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            use(f"http://127.0.0.1:{port}")
            fsspec.filesystem("s3").mkdir(BUCKET)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            os.environ.clear()
            os.environ.update(before)


@pytest.fixture
def root(endpoint: str, tmp_path: Path) -> str:
    return f"{BUCKET}/{tmp_path.name}/run"


@pytest.mark.parametrize(
    "check", [remote.check_round_trip, remote.check_keep, remote.check_existing, remote.check_leftovers]
)
def test_a_bucket_is_used_as_a_directory_is(check: Callable[[str], None], root: str) -> None:
    check(root)


def test_an_object_of_several_parts(root: str) -> None:
    """More bytes than one request of s3fs has."""
    big = torch.arange(14 << 20, dtype=torch.float32)
    path = save(root, 1, extra={"big": big})
    assert verify(path) > big.numel() * big.element_size()
    assert torch.equal(load(root).extra["big"], big)


def fail_half_way(path: RemotePath) -> None:
    with storage.create(path) as write:
        write(b"half")
        raise ZeroDivisionError


def test_an_upload_that_failed_is_not_completed_later(root: str) -> None:
    """The destructor of the store's file would do that after the prefix was removed."""
    folder = RemotePath(root)
    with pytest.raises(ZeroDivisionError):
        fail_half_way(folder / "it")
    storage.remove_checkpoint(folder)
    gc.collect()
    assert remote.objects(root) == {}


@distributed(1, 2)
def test_ranks_save_and_load(world_size: int, endpoint: str) -> None:
    use(endpoint)
    remote.check_ranks(f"{BUCKET}/ranks-{world_size}")
