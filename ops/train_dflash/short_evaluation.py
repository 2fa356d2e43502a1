"""tau of the draft while it trains: real, greedy speculative decoding of the same few prompts of the split val.

The prompts are cut into batches before these are dealt over the ranks, so a batch, and with it each answer, is the same
on any number of ranks. The draft decodes from a copy of its weights, whole and in the dtype of the training, that lives
on every rank: the layers that train are sharded, and compiled for other shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from attrs import asdict, frozen
from torch import nn

from dsl.stage import Stage
from ops.evaluate.prompts import Prompt, check_lengths, first_of_each
from ops.evaluate.statistics import acceptance_length
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.drafts.decoding.decode_batch import DecodeSettings, decode_speculative_batch
from ops.lib.target.model import Target, check_images_fit, text_config
from ops.lib.training import rank_group
from ops.lib.training.dtensors import gathered, reshard
from ops.train_dflash.inputs import Inputs
from ops.train_dflash.op import PROMPTS_AT_ONCE, TrainDflash

RESAMPLINGS = 2000

# Grants exclusive use of the target.
Lend = Callable[[], AbstractContextManager[Target]]


@frozen(eq=False)
class ShortEvaluation:
    """The prompts in batches, the target, and the draft's copy; every rank makes one."""

    batches: Sequence[Sequence[TokenSample]]
    lend: Lend
    draft: DraftModel
    settings: DecodeSettings
    rank: int
    world_size: int

    @classmethod
    def open(
        cls, config: TrainDflash, stage: Stage, inputs: Inputs, device: torch.device, lend: Lend | None
    ) -> ShortEvaluation | None:
        """None if the config requests none, or if the split is empty (`conflicts` refuses to select by it).

        lend: of an already loaded target; otherwise it is loaded here, in the dtype of the capture. Raises DataError
        for images that the target cannot read, and for prompts whose answers could exceed the positions of target or
        draft.
        """
        if not config.measures_tau:
            return None
        reader = TokenReader(stage.inputs["tokens"], "val")
        prompts = first_of_each(Prompt.held_out(reader), config.eval_prompts)
        prompts.sort(key=lambda prompt: prompt.length)
        if not prompts:
            return None
        text = text_config(stage.inputs["target"])
        check_lengths(prompts, text, inputs.draft, config.eval_new_tokens, "eval_new_tokens")
        chosen = [prompt.sample() for prompt in prompts]
        if lend is None:
            target = Target.load(stage.inputs["target"], str(device), getattr(torch, inputs.captured["dtype"]))
            check_images_fit(reader, target.family)
            lend = _always(target)
        draft = DraftModel(inputs.draft).to(device, getattr(torch, config.dtype)).eval().requires_grad_(False)
        return cls(
            batches=[chosen[start : start + PROMPTS_AT_ONCE] for start in range(0, len(chosen), PROMPTS_AT_ONCE)],
            lend=lend,
            draft=draft,
            settings=DecodeSettings(max_new_tokens=config.eval_new_tokens),
            rank=stage.rank,
            world_size=stage.world_size,
        )

    def measure(self, model: nn.Module) -> dict[str, dict[str, Any]]:
        """tau of the model's current weights, over all prompts under "all", and by category; a collective.

        Each with its 95 % interval, prompts, steps and generated tokens, as in the report of `evaluate`.
        """
        self._copy(model)
        own = range(self.rank, len(self.batches), self.world_size)
        with self.lend() as target:
            answers = {
                place: decode_speculative_batch(target, self.draft, self.batches[place], self.settings) for place in own
            }
        everywhere = {place: decoded for part in rank_group.collected(answers) for place, decoded in part.items()}
        groups: dict[str, list[Decoded]] = {"all": []}
        for place, batch in enumerate(self.batches):
            for sample, answer in zip(batch, everywhere[place], strict=True):
                groups["all"].append(answer)
                groups.setdefault(sample.category, []).append(answer)
        size = self.draft.config.block_size
        return {name: asdict(acceptance_length(group, RESAMPLINGS, 0, size)) for name, group in groups.items()}

    @torch.no_grad()
    def _copy(self, model: nn.Module) -> None:
        """Copies the weights, gathered if they are sharded."""
        reshard(model)
        own = dict(self.draft.named_parameters())
        for name, parameter in model.named_parameters():
            own[name].copy_(gathered(parameter))


def _always(target: Target) -> Lend:
    """A target without other users."""
    return lambda: nullcontext(target)
