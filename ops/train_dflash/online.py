"""Features captured while training, equal to stored ones, from tokens and target, a micro-batch at a time.

Labels and lengths come from the token shards, so anchors, order and dealing are those of a training on stored features.
The states of a micro-batch are computed just before it is prepared (`Capture.take`), by forward passes over whole
samples in batches by token budget, and stay on the device until then; nothing is written. Or the workers of a pool
compute them ahead, see capture_pool.py. A sequence-parallel rank
runs the samples of its slice, so a sample on the border of two slices is run by both. If the loss needs final hidden
states, it runs every sample of the micro-batch: its blocks are dealt from all of them.

Legend: B batch, S tokens of a sample, R requested rows of all samples, F features, L tokens of all samples, M hidden
size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from ops.artifacts import TargetModel, TokenShards
from ops.capture_targets.backend import device_batch
from ops.capture_targets.layers import check_layers, spread_layers
from ops.lib.data.batching import batches_by_length
from ops.lib.data.token_shards import TokenReader
from ops.lib.target.feature_shards import FINAL, check_finite, feature_info, layer_parts
from ops.lib.target.float8 import StateRows, StoredStates
from ops.lib.target.float8_errors import MeanErrors
from ops.lib.target.model import Target, target_info
from ops.train_dflash.batches import Rows
from ops.train_dflash.op import ONLINE_SPLITS, TrainDflash

SETTING = "capture_dtype of train_dflash"


def describe_features(config: TrainDflash, tokens: TokenShards, target: TargetModel) -> dict[str, Any]:
    """The content of features.json for features captured by this training, without the shards.

    Raises ConfigError for layers that the target does not have.
    """
    info = target_info(target)
    layer_ids = config.target_layer_ids
    if layer_ids is None:
        layer_ids = spread_layers(info["num_layers"], config.capture_layers, field="capture_layers")
    check_layers(layer_ids, info["num_layers"])
    return feature_info(
        target,
        tokens,
        layer_ids,
        config.capture_dtype,
        final_hidden=config.needs_teacher,
        feature_dtype=config.feature_dtype,
    )


class OnlineReader:
    """The samples of one split with the interface of FeatureReader, but without features."""

    def __init__(self, tokens: TokenShards, split: str, info: Mapping[str, Any]) -> None:
        self.info = info
        self.width: int = len(info["target_layer_ids"]) * info["hidden_size"]
        self._reader = TokenReader(tokens, split)
        self.lengths: list[int] = [record["tokens"] for record in self._reader.records]

    def __len__(self) -> int:
        return len(self.lengths)

    def labels(self, index: int) -> tuple[Tensor, Tensor]:
        """The input_ids int64 [S] and loss_mask bool [S] of a sample."""
        return self._reader.labels(index)


@frozen(eq=False)
class RowStates:
    """The states of several samples, in order: features [R, F] of the requested rows, final_hidden [L, M] of all
    tokens.

    final_hidden may be None. They are on the device that computed them, or on the CPU if another process did. errors:
    of float8, see `RoundingError`, at each layer and then of final_hidden; () in another dtype.
    """

    features: StoredStates
    final_hidden: StoredStates | None
    errors: tuple[float, ...] = ()


# Requests the states of a micro-batch's rows of a split; what it returns waits for them.
Ask = Callable[[str, Sequence[Rows]], Callable[[], RowStates]]


def measured(ask: Ask, errors: MeanErrors) -> Ask:
    """The same `ask`, whose states add their errors of float8 to `errors`."""

    def ask_and_add(split: str, rows: Sequence[Rows]) -> Callable[[], RowStates]:
        asked = ask(split, rows)

        def states() -> RowStates:
            found = asked()
            errors.add(len(found.features), found.errors)
            return found

        return states

    return ask_and_add


class Capture:
    """Captures features on this rank, as described by `info` (see `describe_features`).

    Several threads may call `take`; one forward pass runs at a time. `lend` grants exclusive use of the target.
    """

    def __init__(
        self,
        tokens: TokenShards,
        target: TargetModel,
        info: Mapping[str, Any],
        device: torch.device,
        batch_tokens: int,
    ) -> None:
        self._info = info
        self._batch_tokens = batch_tokens
        self._target = Target.load(target, str(device), getattr(torch, info["dtype"]))
        self._readers = {split: TokenReader(tokens, split) for split in ONLINE_SPLITS}
        self._device = device
        self._one_at_a_time = threading.Lock()

    @contextmanager
    def lend(self) -> Iterator[Target]:
        """Open a context that lends the target while nothing is captured: a capture would record foreign forward
        passes.
        """
        with self._one_at_a_time:
            yield self._target

    def ask(self, split: str, rows: Sequence[Rows]) -> Callable[[], RowStates]:
        """A request that captures only when it is called: this rank computes, so asking ahead gains nothing."""
        return partial(self.take, split, rows)

    def take(self, split: str, rows: Sequence[Rows]) -> RowStates:
        """Capture the states of these rows. Raises DataError for states that are not finite."""
        reader, layer_ids, kept = self._readers[split], self._info["target_layer_ids"], self._info["final_hidden"]
        hidden_size, dtype = self._info["hidden_size"], getattr(torch, self._info["dtype"])
        lengths = [reader.records[row.index]["tokens"] for row in rows]
        starts = [0, *accumulate(row.last - row.first for row in rows)]
        offsets = [0, *accumulate(lengths)]
        memory = partial(StateRows, dtype=dtype, device=self._device, float8="feature_dtype" in self._info)
        features = memory((starts[-1], len(layer_ids) * hidden_size), len(layer_ids))
        final_hidden = memory((offsets[-1], hidden_size), 1) if kept else None
        with self._one_at_a_time, _current(self._device):
            for batch in batches_by_length(lengths, self._batch_tokens):
                samples = [reader.sample(rows[place].index) for place in batch]
                features_BSF, final_BSM = device_batch(self._target, samples, layer_ids, final_hidden=kept)
                for number, place in enumerate(batch):
                    first, last = rows[place].first, rows[place].last
                    features.put(slice(starts[place], starts[place + 1]), features_BSF[number, first:last])
                    if final_hidden is not None and final_BSM is not None:
                        here = slice(offsets[place], offsets[place + 1])
                        final_hidden.put(here, final_BSM[number, : lengths[place]])
            ids = [reader.records[row.index]["id"] for row in rows]
            counts = (row.last - row.first for row in rows)
            named = list(zip(ids, counts, strict=True))
            check_finite(features.states, named, layer_parts(layer_ids), SETTING, dtype)
            if final_hidden is None:
                return RowStates(features.states, None, (*features.errors(),))
            check_finite(final_hidden.states, list(zip(ids, lengths, strict=True)), FINAL, SETTING, dtype)
            errors = (*features.errors(), *final_hidden.errors())
        return RowStates(features.states, final_hidden.states, errors)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """A context in which torch's current GPU is `device`. In a new thread it would be the first GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@define(eq=False)
class CapturedStates:
    """The states of a micro-batch's rows, for `batches.prepare`."""

    width: int
    _features: dict[int, tuple[int, StoredStates]] = field(factory=dict)  # sample -> its first row, and [rows, F]
    _final_hidden: dict[int, StoredStates] = field(factory=dict)

    @classmethod
    def cut(cls, states: RowStates, rows: Sequence[Rows], lengths: Sequence[int], width: int) -> CapturedStates:
        """Cut states into those of each row. lengths: the tokens of each row's sample. width: of a feature."""
        captured = cls(width)
        parts = states.features.split([row.last - row.first for row in rows])
        captured._features = {row.index: (row.first, part) for row, part in zip(rows, parts, strict=True)}
        if states.final_hidden is not None:
            indices = [row.index for row in rows]
            captured._final_hidden = dict(zip(indices, states.final_hidden.split(list(lengths)), strict=True))
        return captured

    def features(self, index: int, first: int, last: int) -> StoredStates:
        start, rows = self._features[index]
        return rows[first - start : last - start]

    def final_hidden(self, index: int, first: int, last: int) -> StoredStates:
        return self._final_hidden[index][first:last]


@frozen(eq=False)
class OnlineSource:
    """Requests the rows of one split that a micro-batch needs, of `Capture` or of a pool."""

    request: Ask
    reader: OnlineReader
    split: str

    def ask(self, rows: Sequence[Rows]) -> Callable[[], CapturedStates]:
        """Request the states of these rows; what it returns waits for them.

        Without `final_hidden`, only samples with a row are run. With it all of them are, because the blocks of a
        sequence-parallel rank come from all samples.
        """
        wanted = [row for row in rows if row.first < row.last or self.reader.info["final_hidden"]]
        if not wanted:
            return partial(CapturedStates, self.reader.width)
        lengths = [self.reader.lengths[row.index] for row in wanted]
        asked = self.request(self.split, wanted)
        return lambda: CapturedStates.cut(asked(), wanted, lengths, self.reader.width)
