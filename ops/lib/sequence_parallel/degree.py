"""Checks of the degree of sequence parallelism, and of the exchange's name. Torch-free: the op's declaration
needs it.
"""

from __future__ import annotations

import math

from dsl.errors import ConfigError

EXCHANGES = ("auto", "ulysses", "gather")
_RING = (
    'sp_exchange: "ring" is not available. Its schedule balances queries against keys around the ring, but here the '
    "queries are the blocks and the context has no queries of its own, so it balances nothing; "
    '"gather" and "ulysses" are exact and send less'
)


def known_exchange(_instance: object, _attribute: object, name: str) -> None:
    """The validator of sp_exchange. Raises ValueError."""
    mistakes = _exchange_mistakes(name)
    if mistakes:
        raise ValueError(mistakes[0])


def check_degree(
    *,
    world_size: int,
    sp_degree: int,
    sp_exchange: str,
    query_heads: int,
    kv_heads: int,
    shortest: int,
    pad_multiple: int,
) -> None:
    """Raises one ConfigError with everything that forbids the degree; needs no process group.

    shortest is the length in tokens of the shortest sample, pad_multiple the multiple that lengths are padded to.
    """
    if sp_degree < 1:
        mistakes = [f"sp_degree: must be at least 1, got {sp_degree}"]
    else:
        mistakes = [
            *rank_mistakes(world_size, sp_degree),
            *_length_mistakes(sp_degree, shortest, pad_multiple),
        ]
        if sp_exchange == "ulysses":
            mistakes += _head_mistakes(sp_degree, query_heads, kv_heads)
    mistakes += _exchange_mistakes(sp_exchange)
    if mistakes:
        raise ConfigError("sequence parallelism:\n" + "\n".join(f"  {mistake}" for mistake in mistakes))


def rank_mistakes(world_size: int, sp_degree: int) -> list[str]:
    if world_size % sp_degree == 0:
        return []
    return [
        f"sp_degree: {world_size} ranks are fewer than the mesh of "
        f"dp {math.ceil(world_size / sp_degree)} x sp {sp_degree}; start a multiple of {sp_degree} ranks, "
        f"or set sp_degree to a divisor of {world_size}"
    ]


def _length_mistakes(sp_degree: int, shortest: int, pad_multiple: int) -> list[str]:
    mistakes = []
    if sp_degree > shortest:
        mistakes.append(
            f"sp_degree: {sp_degree} ranks cannot share the shortest sample, which has {shortest} tokens; "
            f"set sp_degree to at most {shortest}, or drop short samples"
        )
    if pad_multiple % sp_degree:
        mistakes.append(
            f"sp_degree: {sp_degree} does not divide pad_multiple = {pad_multiple}, and every rank gets an equal "
            f"slice; set pad_multiple of shard_sequence to a multiple of {sp_degree}"
        )
    return mistakes


def _head_mistakes(sp_degree: int, query_heads: int, kv_heads: int) -> list[str]:
    exchanged = math.lcm(kv_heads, sp_degree)
    if query_heads % exchanged == 0:
        return []
    return [
        f'sp_exchange: "ulysses" at sp_degree = {sp_degree} needs {exchanged} key/value heads '
        f"(lcm of {kv_heads} and {sp_degree}), which do not divide {query_heads} query heads; "
        'use sp_exchange = "gather", which does not depend on heads'
    ]


def _exchange_mistakes(name: str) -> list[str]:
    if name == "ring":
        return [_RING]
    return [] if name in EXCHANGES else [f'sp_exchange: "{name}" is not one of {", ".join(EXCHANGES)}']
