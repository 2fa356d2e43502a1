"""The start of a connection: both ends prove that they know a secret, then compare what they are about to do.

    server -> client    {"nonce": 32 random bytes}
    client -> server    {"nonce": 32 random bytes, "proof": HMAC-SHA256(secret, "client" + both nonces)}
    server -> client    {"proof": HMAC-SHA256(secret, "server" + both nonces), "facts": {...}}
    client -> server    {"facts": {...}}

Bytes are sent as hexadecimal digits. Neither end sends or uses facts before the other's proof, and the secret never
travels. What follows is neither encrypted nor signed: the network is one that docs/cluster.md requires to be private.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from typing import Any

from ops.lib.stream.frames import BrokenStream, Frames

NONCE_BYTES = 32
WITHIN_S = 20.0


class WrongSecret(BrokenStream):
    """The other end does not know the secret."""


def greet(frames: Frames, secret: bytes, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The server's side; returns the client's facts. Raises WrongSecret, or OSError for a broken connection."""
    frames.limit(WITHIN_S)
    own = secrets.token_bytes(NONCE_BYTES)
    frames.send({"nonce": own.hex()})
    answer = frames.receive()
    both = own + _bytes(answer, "nonce")
    _check(answer, secret, b"client", both)
    frames.send({"proof": _proof(secret, b"server", both).hex(), "facts": dict(facts)})
    theirs = _facts(frames.receive())
    frames.limit(None)
    return theirs


def answer_greeting(frames: Frames, secret: bytes, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The client's side; returns the server's facts. Raises as `greet` does."""
    frames.limit(WITHIN_S)
    own = secrets.token_bytes(NONCE_BYTES)
    both = _bytes(frames.receive(), "nonce") + own
    frames.send({"nonce": own.hex(), "proof": _proof(secret, b"client", both).hex()})
    answer = frames.receive()
    _check(answer, secret, b"server", both)
    frames.send({"facts": dict(facts)})
    frames.limit(None)
    return _facts(answer)


def _proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, role + nonces, "sha256")


def _check(message: Mapping[str, Any], secret: bytes, role: bytes, nonces: bytes) -> None:
    if not hmac.compare_digest(_bytes(message, "proof"), _proof(secret, role, nonces)):
        raise WrongSecret(f"the {role.decode()} does not know the secret of this attempt")


def _bytes(message: Mapping[str, Any], name: str) -> bytes:
    value = message.get(name)
    try:
        found = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        found = b""
    if len(found) != NONCE_BYTES:  # a proof has as many
        raise BrokenStream(f"a greeting without {NONCE_BYTES} bytes of {name}")
    return found


def _facts(message: Mapping[str, Any]) -> dict[str, Any]:
    facts = message.get("facts")
    if not isinstance(facts, dict):
        raise BrokenStream("a greeting without facts")
    return facts
