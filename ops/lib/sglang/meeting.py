"""Rendezvous of SGLang's process group: a store from dflow, and only the loopback interface.

By default rank 0 of SGLang opens a store at a port, even for one process, and torch lets it listen on all interfaces.
Any process that can write to it can replace a rank, and ranks unpickle what they send each other. SGLang reads another
rendezvous URL from its environment.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

from dsl.stage import LOOPBACK_ONLY
from ops.lib.training.peers import own_peers

SCHEME = "dflow-store"
_handed_over: ContextVar[dist.Store] = ContextVar("_handed_over")


@contextmanager
def meeting_in(store: dist.Store, rank: int) -> Iterator[None]:
    """Open a context in which SGLang's process group uses this store.

    All its ranks must be this user's processes. Raises as `own_peers` does.
    """
    handed = _handed_over.set(store)
    changes = {
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"{SCHEME}://",
        # Its queue, unused in process, would open a port, before the peers are checked.
        "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0",
        # On some CPUs SGLang names its shared memory after these two: each group needs its own names.
        "MASTER_ADDR": _name(store, rank),
        "MASTER_PORT": "0",
    }
    try:
        with environment(changes), own_peers():
            yield
    finally:
        _handed_over.reset(handed)


@contextmanager
def on_this_host() -> Iterator[None]:
    """Open a context in which gloo and nccl use only the loopback interface, whatever the environment says."""
    with environment({**LOOPBACK_ONLY, "NCCL_RAS_ENABLE": "0", "NCCL_COMM_ID": None}):
        yield


@contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Open a context with changed environment variables of this process. changes: name -> value, None to unset it."""
    before = {name: os.environ.get(name) for name in changes}
    try:
        _set(changes)
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _name(store: dist.Store, rank: int) -> str:
    """A name for a process group that no other group on this machine has."""
    if rank == 0:
        store.set("name", uuid.uuid4().hex)
    return store.get("name").decode()


def _hand_over(url: str, **_options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """The handler that torch calls for a URL of this scheme: yields the store, the rank, and the number of ranks."""
    query = dict(parse_qsl(urlsplit(url).query))
    yield _handed_over.get(), int(query["rank"]), int(query["world_size"])


register_rendezvous_handler(SCHEME, _hand_over)
