"""The mesh of ranks, (dp, sp).

The sp ranks of one dp row share every sample: each holds a slice of its context and a part of its blocks. They are
neighbours (sp is the inner dimension), so that they share a machine if it has sp_degree devices.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ops.lib.training.peers import own_peers

DP, SP, FLAT = "dp", "sp", "dp_sp"


def make_mesh(world_size: int, sp_degree: int, device: torch.device) -> DeviceMesh:
    """The mesh of all ranks with the dimensions "dp" and "sp", one process group for each.

    A collective: every rank calls it, after joining the default process group, with a degree that `check_degree` (see
    degree.py) accepted. Rank r is at (r // sp_degree, r % sp_degree).
    """
    with own_peers() as groups:
        mesh = init_device_mesh(device.type, (world_size // sp_degree, sp_degree), mesh_dim_names=(DP, SP))
        groups += mesh.get_all_groups()
    return mesh


def flat_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks in one dimension, "dp_sp", for FSDP2's fully_shard to shard over dp and sp at once.

    A collective. Averaging over it divides by the number of all ranks, those of sp included.
    """
    with own_peers() as groups:
        flat = init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=(FLAT,))
        groups += flat.get_all_groups()
    return flat
