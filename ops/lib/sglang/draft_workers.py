"""What differs between SGLang's workers for drafts: one interface, and a class for each of them.

S tokens, F captured feature width
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from attrs import frozen
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor


@frozen(eq=False)
class DraftWorker(ABC):
    """An interface to one of SGLang's workers for drafts. own: SGLang's worker object."""

    algorithm: ClassVar[SpeculativeAlgorithm]
    own: Any

    @property
    @abstractmethod
    def block_size(self) -> int:
        """The number of tokens verified at once, including the anchor."""

    @property
    @abstractmethod
    def queries(self) -> int:
        """The number of slots in a block that the draft computes."""

    @property
    def mask_token_id(self) -> int:
        return int(self.own._mask_token_id)

    @property
    @abstractmethod
    def _writer(self) -> tuple[Any, str]:
        """The method that writes the context's keys and values from the target's features, as its object and name."""

    @abstractmethod
    def write_context(self, features_SF: Tensor, slots_S: Tensor, positions_S: Tensor) -> None:
        """Write the draft's keys and values of some tokens into slots of its cache."""

    @contextmanager
    def recorded(self, record: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
        """Open a context that passes on the features [S, F] and positions [S] which the draft receives for one request.

        Only those of accepted tokens are passed on, in the order in which they arrive.
        """
        place, name = self._writer
        write, model = getattr(place, name), self.own.draft_model
        project = model.project_target_hidden
        projected: list[Tensor] = []

        def writing(*, positions: Tensor, commit_lens: Tensor | None = None, **others: Any) -> None:
            write(positions=positions, commit_lens=commit_lens, **others)
            kept = len(positions) if commit_lens is None else int(commit_lens[0])
            record(projected.pop()[:kept], positions[:kept].to("cpu", copy=True))  # the worker fills it again

        def projecting(target_hidden: Tensor) -> Tensor:
            projected.append(target_hidden.float().to("cpu", copy=True))  # its inputs become the keys
            return project(target_hidden)

        setattr(place, name, writing)
        model.project_target_hidden = projecting
        try:
            yield
        finally:
            delattr(place, name)
            del model.project_target_hidden


class DflashWorker(DraftWorker):
    """SGLang's worker for DFlash and DFlash2."""

    algorithm = SpeculativeAlgorithm.DFLASH

    @property
    def block_size(self) -> int:
        return int(self.own.block_size)

    @property
    def queries(self) -> int:
        return self.block_size

    @property
    def _writer(self) -> tuple[Any, str]:
        return self.own, "_append_target_hidden_to_draft_kv_by_loc"

    def write_context(self, features_SF: Tensor, slots_S: Tensor, positions_S: Tensor) -> None:
        self.own._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=features_SF, cache_loc=slots_S, positions=positions_S
        )


class DsparkWorker(DraftWorker):
    """SGLang's worker for DSpark."""

    algorithm = SpeculativeAlgorithm.DSPARK

    @property
    def block_size(self) -> int:
        return int(self.own.verify_num_draft_tokens)

    @property
    def queries(self) -> int:
        return int(self.own.query_token_num)

    @property
    def _writer(self) -> tuple[Any, str]:
        return self.own.draft_model, "write_target_hidden_kv"

    def write_context(self, features_SF: Tensor, slots_S: Tensor, positions_S: Tensor) -> None:
        self.own._kv_injector.inject_target_hidden(target_hidden=features_SF, cache_loc=slots_S, positions=positions_S)


WORKERS: dict[str, type[DraftWorker]] = {each.algorithm.name: each for each in (DflashWorker, DsparkWorker)}
