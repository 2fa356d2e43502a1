"""What a node needs of a machine, told before it runs; and what is foreseen of its output for the nodes that read it.

An op names a function with `@op(..., resources="module:function")`. It gets an Outlook, returns Resources, loads no
torch and computes nothing large: `dflow plan` calls it. Memory is that of one rank, disk that of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.launch import Launch
from dsl.named_function import named_function
from dsl.op import OpSpec


@frozen(kw_only=True)
class Outlook:
    """What a node can be told by before anything runs.

    inputs: edge -> what its producer foresees, None where it foresees nothing, a tuple for a `tuple` edge.
    artifact: what the node made, where the store holds it. root: the folder that the pipeline's paths start from.
    free_disk: bytes that are free where the store lies.
    """

    config: Any
    launch: Launch
    inputs: Mapping[str, Any]
    artifact: Path | None
    root: Path
    free_disk: int


@frozen(kw_only=True)
class Resources:
    """What a node needs, each part by its name in bytes.

    memory: of the rank that needs most, on its GPU where it has one. disk: what the node leaves in the store; disk_per:
    the amount of data that it is told for ("a million tokens") where the amount is not known, "" for the whole.
    notes: sentences for the user. foreseen: anything that the readers' own functions understand.
    """

    memory: Mapping[str, int] = {}
    disk: Mapping[str, int] = {}
    disk_per: str = ""
    notes: tuple[str, ...] = ()
    foreseen: Any = None


def load_resources(spec: OpSpec) -> Callable[[Outlook], Resources] | None:
    """The function that an op names, None where it names none."""
    if spec.resources is None:
        return None
    function: Callable[[Outlook], Resources] = named_function(spec.resources)
    return function
