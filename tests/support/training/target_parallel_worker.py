"""One rank of the parity test of targets, one of four.

tests/ops/lib/sequence_parallel/test_target_parallel.py starts them.

The four ranks take the layouts of four; then two pairs, side by side, those of two, each pair half of the families;
then each rank is a process of its own. What a rank saw goes into rank-N.json, and into stuck-N.json what happened
without the dummy image.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from attrs import frozen
from target_parallel_bugs import BUGS, Bug, no_dummy_image
from target_parallel_cases import (
    BATCHES,
    ON_FOUR,
    ON_TWO,
    ONE,
    OPTIONS_AT,
    TEXT,
    Layout,
    batch_of,
    dealt,
    layouts_of,
    model_of,
)
from torch import Tensor
from transformers import PreTrainedModel

from ops.lib.sequence_parallel.target import ParallelTarget, answer_tokens
from ops.lib.target.model import Target
from ops.lib.training.dtensors import gathered
from ops.lib.training.rank_group import meeting_store
from ops.lib.vision.batch import ModelInputs

RANKS, CPU = 4, torch.device("cpu")
# More than a case takes on any machine, and little enough for a test to wait for a rank that never comes.
TIMEOUT, SHORT = timedelta(minutes=5), timedelta(seconds=10)

Gradients = dict[str, Tensor]
Outcome = tuple[float, Gradients]
Figures = dict[str, dict[str, Any]]


@contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """Open a context in which, for float64, the models' own code computes in float64 where it would use float32.

    That concerns norms and angles.
    """
    convert = Tensor.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wide = torch.float32 in args or kwargs.get("dtype") == torch.float32
        return tensor.double() if wide else convert(tensor, *args, **kwargs)

    if dtype == torch.float64:
        with patch.object(Tensor, "to", to), patch.object(Tensor, "float", Tensor.double):
            yield
    else:
        yield


def reference(model: PreTrainedModel, batch: ModelInputs) -> Outcome:
    """The mean cross-entropy of the answer tokens, and its gradients."""
    model.zero_grad()
    loss = reference_loss(model, batch)
    loss.backward()
    return float(loss.detach()), gradients(model)


def reference_loss(model: PreTrainedModel, batch: ModelInputs) -> Tensor:
    """The mean cross-entropy of the answer tokens, from the logits of all positions, token by token."""
    logits_BSV = model(**Target(model, {}, CPU).model_arguments(batch), use_cache=False).logits
    losses = [
        -logits_BSV[row, token - 1].log_softmax(-1)[batch.input_ids[row, token]]
        for row, token in batch.loss_mask.nonzero().tolist()
        if token > 0
    ]
    return torch.stack(losses).mean()


@cache
def expected(family: str, kind: str, dtype: torch.dtype) -> Outcome:
    with precision(dtype):
        return reference(copy.deepcopy(model_of(family)).to(dtype), batch_of(kind))


def step(parallel: ParallelTarget, batches: Sequence[ModelInputs | None], count: int) -> Outcome:
    """Run one step as a training does: the micro-batches of this rank's dp row. count: answer tokens on all ranks."""
    model, world = parallel.target.model, parallel.world_size
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    with precision(parallel.dtype):
        for number, batch in enumerate(batches):
            if number == len(batches) - 1:
                parallel.release()
            else:
                parallel.hold()
            loss = world * parallel.answer_loss(batch) / count
            loss.backward()
            total += loss.detach() / world
    if world > 1:
        dist.all_reduce(total)
    return float(total), gradients(model)


def gradients(model: PreTrainedModel) -> Gradients:
    """The whole gradient of every parameter in float64; zero where the batch does not use the parameter."""
    return {
        name: torch.zeros(parameter.shape, dtype=torch.float64)
        if parameter.grad is None
        else gathered(parameter.grad).double().clone()
        for name, parameter in model.named_parameters()
    }


def farthest(expected: Outcome, got: Outcome) -> dict[str, float]:
    """The relative difference of the loss, and the largest difference of an element of any parameter's gradient.

    It is relative to the largest element of the same gradient, or to a thousandth of the largest of all gradients. The
    latter is for gradients that are 0 except for rounding, such as that of a bias of keys.
    """
    (loss, wanted), (other, found) = expected, got
    if wanted.keys() != found.keys():
        raise ValueError(f"{wanted.keys() ^ found.keys()} on one side only")
    floor = 1e-3 * max(float(tensor.abs().max()) for tensor in wanted.values())
    off = [(found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=floor) for name, tensor in wanted.items()]
    return {"loss": abs(other / loss - 1), "gradient": float(torch.stack(off).max())}


def norm_off(expected: Outcome, got: Outcome) -> float:
    """The norm of the difference of all gradients over the norm of the expected ones."""
    off = torch.stack([(got[1][name] - tensor).norm() for name, tensor in expected[1].items()]).norm()
    return float(off / torch.stack([tensor.norm() for tensor in expected[1].values()]).norm())


@frozen
class Cases:
    """The computations of one rank at one layout."""

    layout: Layout
    rank: int

    @property
    def dp_rank(self) -> int:
        return self.rank // self.layout.sp

    def made(self, family: str, dtype: torch.dtype, *, frozen_part: str = "", **options: bool) -> ParallelTarget:
        """A new target, sharded over the ranks; parameters whose names contain frozen_part are not trained."""
        model = copy.deepcopy(model_of(family))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen_part or frozen_part not in name)
        return ParallelTarget.make(
            Target(model, {}, CPU),
            world_size=self.layout.ranks,
            rank=self.rank,
            sp_degree=self.layout.sp,
            device=CPU,
            dtype=dtype,
            **options,
        )

    def one_batch(self, parallel: ParallelTarget, kind: str) -> Outcome:
        batch = batch_of(kind)
        return step(parallel, [dealt(batch, self.layout, self.dp_rank)], answer_tokens(batch))

    def parity(self, family: str) -> Figures:
        """Compare every batch with the reference in float64, the last one also in float32."""
        parallel = self.made(family, torch.float64)
        figures = {}
        for kind in BATCHES[family]:
            figures[f"{family} | {kind} | {self.layout}"] = farthest(
                expected(family, kind, torch.float64), self.one_batch(parallel, kind)
            )
        parallel = self.made(family, torch.float32)
        rounded = farthest(expected(family, kind, torch.float32), self.one_batch(parallel, kind))
        figures[f"{family} | {kind} | {self.layout}"]["float32"] = rounded["gradient"]
        return figures

    def options(self) -> Figures:
        """Compare checkpointing, accumulation, bfloat16, frozen parts and measuring, for the family with deepstack."""
        family, exact = "qwen3_vl", expected("qwen3_vl", "mixed", torch.float64)
        checkpointing = self.made(family, torch.float64, gradient_checkpointing=True)
        bfloat16 = self.made(family, torch.bfloat16)
        rounded = norm_off(exact, self.one_batch(bfloat16, "mixed"))
        return {
            f"gradient checkpointing | {self.layout}": farthest(exact, self.one_batch(checkpointing, "mixed")),
            f"frozen vision | {self.layout}": self.frozen_part(family, "visual"),
            f"frozen text | {self.layout}": self.frozen_part(family, "language_model"),
            f"bfloat16 | {self.layout}": {
                "gradient": rounded,
                "masters": sorted({str(parameter.grad.dtype) for parameter in bfloat16.target.model.parameters()}),
            },
            f"micro-batches | {self.layout}": self.micro_batches(family),
            f"measured | {self.layout}": self.measured(family),
        }

    def frozen_part(self, family: str, part: str) -> dict[str, float]:
        """Compare the gradients of the other parts, and report the frozen part's gradient, which must be zero."""
        loss, wanted = expected(family, "mixed", torch.float64)
        got = self.one_batch(self.made(family, torch.float64, frozen_part=part), "mixed")
        trained = [name for name in wanted if part not in name]
        return {
            **farthest(
                (loss, {name: wanted[name] for name in trained}), (got[0], {name: got[1][name] for name in trained})
            ),
            "frozen": max(float(got[1][name].abs().max()) for name in wanted if part in name),
        }

    def micro_batches(self, family: str) -> dict[str, float]:
        """Compare four samples one by one, and a pass without any, with all in one batch; twice."""
        batch = batch_of("mixed")
        own = [batch[[number]] for number in range(self.dp_rank, len(batch), self.layout.dp)]
        parallel = self.made(family, torch.float64)
        count = answer_tokens(batch)
        step(parallel, [*own, None], count)
        return farthest(expected(family, "mixed", torch.float64), step(parallel, [*own, None], count))

    def measured(self, family: str) -> dict[str, float]:
        """Measure the loss without gradients before and after all weights have changed, as a training does."""
        batch, parallel = batch_of("mixed"), self.made(family, torch.float64)
        own = dealt(batch, self.layout, self.dp_rank)
        with torch.no_grad(), precision(torch.float64):
            before = parallel.answer_loss(own)
            for parameter in parallel.target.model.parameters():
                parameter.mul_(1.25)
            after = parallel.answer_loss(own)
            expected_after = reference_loss(scaled(family, 1.25), batch) * answer_tokens(batch)
        for total in (before, after):
            if self.layout.ranks > 1:
                dist.all_reduce(total)
        exact, _ = expected(family, "mixed", torch.float64)
        return {
            "before": abs(float(before) / answer_tokens(batch) / exact - 1),
            "after": abs(float(after / expected_after) - 1),
        }

    def buggy(self, bug: Bug) -> dict[str, Any]:
        """The effect of a bug on loss and gradient, or how it fails."""
        batch = batch_of(bug.kind)
        own = dealt(batch, self.layout, self.dp_rank)
        parallel = self.made(bug.family, torch.float64)
        try:
            with bug.make():
                got = step(parallel, [own], bug.count(batch, own, self.layout))
        except RuntimeError as error:
            return {"failed": str(error)}
        return farthest(expected(bug.family, bug.kind, torch.float64), got)


def scaled(family: str, factor: float) -> PreTrainedModel:
    model = copy.deepcopy(model_of(family))
    for parameter in model.parameters():
        parameter.data.mul_(factor)
    return model


def parity(layouts: Sequence[Layout], rank: int, families: Sequence[str]) -> Figures:
    """The figures of each family at the layouts that it can use, and those of the options once."""
    figures: Figures = {}
    for layout in layouts:
        cases = Cases(layout, rank)
        for family in families:
            if layout in layouts_of(family):
                figures |= cases.parity(family)
        if "qwen3_vl" in families and layout in OPTIONS_AT:
            figures |= cases.options()
    return figures


@contextmanager
def pair_of(folder: Path, rank: int, name: str, timeout: timedelta) -> Iterator[None]:
    """Open a context in which ranks 0 and 1, or 2 and 3, form a process group."""
    store = dist.FileStore(str(folder / f"{name}-{rank // 2}"), 2)
    dist.init_process_group("gloo", store=store, rank=rank % 2, world_size=2, timeout=timeout)
    yield
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path) -> None:
    rank, families = int(os.environ["RANK"]), list(TEXT)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=meeting_store(rank, RANKS), rank=rank, world_size=RANKS, timeout=TIMEOUT)
    figures = parity(ON_FOUR, rank, families)
    figures |= {f"bug | {name}": Cases(bug.layout, rank).buggy(bug) for name, bug in BUGS.items()}
    dist.barrier()
    dist.destroy_process_group()
    with pair_of(folder, rank, "pair", TIMEOUT):
        figures |= parity(ON_TWO, rank % 2, families[rank // 2 :: 2])
    figures |= parity([ONE], 0, families[rank : rank + 1])
    (folder / f"stuck-{rank}.json").write_text(json.dumps({"failed": "ended without a word"}))
    (folder / f"rank-{rank}.json").write_text(json.dumps(figures))
    without_dummy_image(folder, rank)


def without_dummy_image(folder: Path, rank: int) -> None:
    """Run two ranks of which only one has an image, without the dummy image: they hang. Called last.

    A rank may be killed at any moment, so its figures take the place of what stuck-N.json says by one rename.
    """
    while len(list(folder.glob("rank-*.json"))) < RANKS:
        time.sleep(0.1)
    with pair_of(folder, rank, "stuck", SHORT):
        figures = Cases(Layout(2, 1), rank % 2).buggy(Bug(no_dummy_image, "qwen3_vl", "mixed"))
        unfinished = folder / f"unfinished-{rank}"
        unfinished.write_text(json.dumps(figures))
        unfinished.replace(folder / f"stuck-{rank}.json")
        os._exit(0)  # past the group's end, for which the ranks would wait


if __name__ == "__main__":
    main(Path(sys.argv[1]))
