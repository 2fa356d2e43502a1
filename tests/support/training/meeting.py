"""Where the ranks that a test starts itself meet: a store of the test's own, whose port is never free in between."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def meeting(ranks: int) -> Iterator[dict[str, str]]:
    """Open a context with the environment variables that each rank needs besides RANK, as torchrun sets them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(ranks),
    }
