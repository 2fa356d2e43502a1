"""Mistakes of an algorithm of the user's that only torch finds, before a run's first stage."""

from __future__ import annotations

from dsl.draft_folders import own_algorithms
from ops.train_dflash.op import TrainDflash


def unmet(config: TrainDflash) -> dict[str, str]:
    """Why the draft cannot be made of the algorithm's modules; torch is loaded by another process."""
    folder = own_algorithms().get(config.algorithm)
    if folder is None:
        return {}
    from ops.lib.drafts.own_modules import module_mistakes  # most trainings have no own algorithm

    fields = {} if config.terms is None else dict(config.terms.sizes())
    mistakes = module_mistakes(folder, config.block_size, min(config.num_layers, 2), fields)
    return {"algorithm": "\n".join(mistakes)} if mistakes else {}
