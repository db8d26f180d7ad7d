"""Private names of torch that the package uses."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, TCPStore

from onecopy.common.torch_private import buffers_of, is_unreachable


def test_the_buffers_of_a_module_are_those_that_torch_finds() -> None:
    """In its order, each once, also those of shared submodules, added later, or registered as nothing."""
    shared, own = nn.BatchNorm2d(2), torch.zeros(1)
    inner = nn.Sequential(shared, nn.Linear(2, 2), shared)
    module = nn.Sequential(nn.BatchNorm1d(3), inner, nn.BatchNorm1d(4))
    module.register_buffer("own", own)
    module.register_buffer("nothing", None)
    module[2].register_buffer("again", own)
    module.register_module("no module", None)
    for _ in range(2):
        assert [id(buffer) for buffer in buffers_of(module)] == [id(buffer) for buffer in module.buffers()]
        inner.append(nn.BatchNorm1d(5))


def test_a_store_is_unreachable_if_nothing_answers() -> None:
    server = TCPStore("127.0.0.1", 0, 1, is_master=True)
    assert not is_unreachable(PrefixStore("prefix", server))
    assert not is_unreachable(HashStore())
    with socket.socket() as listener, contextlib.ExitStack() as waiting:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):  # the queue of connections is full, and the next one gets no answer
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        silent: Any = SimpleNamespace(host="127.0.0.1", port=listener.getsockname()[1])
        assert is_unreachable(silent, seconds=0.3)
    assert not is_unreachable(silent), "calls of a store whose host has ended raise at once"


def test_a_store_whose_file_was_removed_is_unreachable(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 1)
    store.set("key", "value")
    assert not is_unreachable(PrefixStore("prefix", store))
    (tmp_path / "store").unlink()
    assert is_unreachable(store)
