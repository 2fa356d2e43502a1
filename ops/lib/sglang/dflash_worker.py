"""SGLang's own worker for drafts in this process: a target and its draft, and prompts decoded with both.

The worker drafts, verifies and keeps both caches; this module replaces SGLang's scheduler around it, without its
queues: a prefill, and one verification step after the other until every request of a batch is done.

A draft that reads the end of its context (`ReadsContext`) is decoded in batches of one. The worker keeps those ends by
the rows of the last batch: when a request leaves it, the others' next block is made without them, or with CUDA graphs
with each other's, and their accepted lengths are not those of `evaluate`.

    S tokens of a prompt, T tokens of a pass, F = layers * hidden size, K block size
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from attrs import define, frozen
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers import mm_schedule
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.server_args import ServerArgs
from torch import Tensor

from dsl.errors import ConfigError, DataError
from ops.lib.data.batching import padded_length
from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.algorithms import ReadsContext
from ops.lib.drafts.backbone.config import algorithm_of
from ops.lib.drafts.backbone.load import read_config
from ops.lib.drafts.decoding.decode import Decoded, until_eos
from ops.lib.sglang.adapter import adapter
from ops.lib.sglang.draft_workers import WORKERS, DraftWorker
from ops.lib.sglang.meeting import environment
from ops.lib.sglang.process import NO_PORT, enter, leave, make_server_args
from ops.lib.sglang.requests import VisionTokens, make_request
from ops.lib.sglang.runtime import clear_pools, fitting_groups, prefill_batch
from ops.lib.sglang.serve_command import REFUSAL
from ops.lib.sglang.version import require_sglang
from ops.lib.target.no_memory import lacks_memory

MAX_REQUESTS = 16
NO_ROOM = ("leave no GPU memory for the KV cache", "Not enough memory")  # SGLang raises plain errors for these
# When a request stops, the worker has reserved two blocks after the one that it verifies.
RESERVED_BLOCKS = 3


class DflashRefused(DataError):
    """An error: SGLang does not support the draft's algorithm on this device."""


class DraftRefused(DataError):
    """An error: SGLang does not start with this target and this draft."""


class NoRoom(DataError):
    """An error: memory is too small for the target, the draft or their pools."""


@frozen(eq=False)
class SeenContext:
    """The context that a worker passed to its draft for one prompt and the accepted tokens of its answer.

    features_SF: the target's features. positions_S: their positions. answer: as decoded. An answer's last token is not
    included.
    """

    features_SF: Tensor
    positions_S: Tensor
    answer: Decoded


@define(eq=False)
class DflashEngine:
    """A target and a draft, run by SGLang in this process; a context manager, as only one engine can be open.

    pool_tokens, max_requests: the most of a batch.
    """

    server_args: ServerArgs
    target: TpModelWorker
    worker: DraftWorker
    model_config: ModelConfig
    vision: VisionTokens | None
    pool_tokens: int
    max_requests: int

    @classmethod
    def start(
        cls,
        target_dir: Path,
        draft_dir: Path,
        *,
        device: str,
        dtype: str,
        pool_tokens: int,
        context_length: int | None = None,
        max_requests: int = MAX_REQUESTS,
        server_args: Mapping[str, Any] | None = None,
    ) -> Self:
        """Load the target of a checkpoint directory and the draft of a serving directory, and allocate their memory
        pools.

        dtype: of both, "float32", "bfloat16" or "float16". pool_tokens: tokens of all requests of a batch together, see
        `tokens_of`. context_length: default: the target's own. server_args: further arguments of SGLang's ServerArgs.
        Raises DflashRefused if SGLang does not serve the draft's algorithm on this device, DraftRefused if it rejects
        draft or target, NoRoom if memory is short, and DataError if SGLang is missing or unsupported, or this process
        holds an open runtime.
        """
        require_sglang("serving a draft")
        algorithm = algorithm_of(read_config(draft_dir))
        kind = WORKERS[algorithm.engine]
        arguments = _arguments(
            kind,
            target_dir,
            draft_dir,
            device=device,
            dtype=dtype,
            pool_tokens=pool_tokens,
            context_length=context_length,
            max_requests=max_requests,
            **(server_args or {}),
        )
        place = enter(arguments)
        try:
            with ExitStack() as undo, environment({"SGLANG_MAMBA_CONV_DTYPE": dtype}):  # else rounded to bfloat16
                undo.callback(leave)
                common = {"server_args": arguments, "gpu_id": place.gpu_id, "nccl_port": NO_PORT}
                target = TpModelWorker(**common)
                worker = kind(kind.algorithm.create_worker(arguments)(**common, target_worker=target))
                _allocate(target, worker.own)
                vision = VisionTokens.of(place.model_config.hf_config)
                together = 1 if isinstance(algorithm, ReadsContext) else max_requests
                requests = min(together, target.model_runner.max_running_requests)
                engine = cls(arguments, target, worker, target.model_runner.model_config, vision, pool_tokens, requests)
                undo.pop_all()
        except (ValueError, RuntimeError, AssertionError) as error:  # the last one for tensors of other shapes
            if lacks_memory(error) or any(said in str(error) for said in NO_ROOM):
                raise NoRoom(str(error)) from error
            if not isinstance(error, RuntimeError):
                raise DraftRefused(f"SGLang refuses to start with {draft_dir}: {error}") from error
            raise
        return engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release everything, so that another model can be started in this process."""
        del self.target, self.worker
        leave()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the forward passes of target and draft."""
        return self.model_config.dtype

    @property
    def block_size(self) -> int:
        """The number of tokens that the worker drafts and verifies at once, including the anchor."""
        return self.worker.block_size

    @property
    def mask_token_id(self) -> int:
        return self.worker.mask_token_id

    @property
    def layer_ids(self) -> list[int]:
        """The target layers whose features SGLang gives the draft, numbered as in the draft's config."""
        return list(self.target.model_runner.spec_aux_config.dflash_target_layer_ids)

    def decode(
        self, samples: Sequence[TokenSample], max_new_tokens: int, eos_token_ids: Collection[int]
    ) -> list[Decoded]:
        """Greedy answers to the samples' prompts, made with the draft, in batches that fit the pool.

        An answer counts as in `ops.lib.drafts.decoding.decode.decode_speculative`: at most `max_new_tokens` after the
        first token, including EOS. The accepted tokens of each step include those after EOS. Raises DataError for a
        prompt that does not fit the pool or the context.
        """
        answers: list[Decoded] = []
        mm_schedule.embedding_cache.clear()
        for group in self._groups(samples, max_new_tokens):
            answers += self._decode_together(group, max_new_tokens, frozenset(eos_token_ids))
        return answers

    def context_of(
        self, sample: TokenSample, max_new_tokens: int = 0, eos_token_ids: Collection[int] = ()
    ) -> SeenContext:
        """The draft's inputs for a sample's prompt and answer: the features and positions that its keys are
        made from.
        """
        features: list[Tensor] = []
        seen_positions: list[Tensor] = []

        def record(features_SF: Tensor, positions_S: Tensor) -> None:
            features.append(features_SF)
            seen_positions.append(positions_S)

        mm_schedule.embedding_cache.clear()
        with self.worker.recorded(record):
            (answer,) = self._decode_together([sample], max_new_tokens, frozenset(eos_token_ids))
        return SeenContext(torch.cat(features), torch.cat(seen_positions), answer)

    @torch.inference_mode()
    def _decode_together(
        self, samples: Sequence[TokenSample], max_new_tokens: int, eos: frozenset[int]
    ) -> list[Decoded]:
        """The answers to prompts decoded as one batch; a finished request leaves the batch."""
        try:
            requests = [
                make_request(sample, sample.input_ids[: sample.prompt_tokens], self.vision, max_new_tokens + 1)
                for sample in samples
            ]
            batch = prefill_batch(self.target.model_runner, requests, self.worker.algorithm)
            result = self.worker.own.forward_batch_generation(batch)
            tokens = [[token] for token in result.next_token_ids.tolist()]
            accepted: list[list[int]] = [[] for _ in samples]
            running = list(range(len(samples)))
            batch.forward_iter = 0  # SGLang's scheduler counts its passes
            while True:
                batch.spec_info, batch.seq_lens, batch.input_ids = result.next_draft_input, result.new_seq_lens, None
                kept = [row for row, at in enumerate(running) if not _is_done(tokens[at], max_new_tokens, eos)]
                if not kept:
                    return [
                        Decoded(tuple(answer[: max_new_tokens + 1]), accepted=tuple(steps))
                        for answer, steps in zip(tokens, accepted, strict=True)
                    ]
                batch.filter_batch(keep_indices=kept)
                running = [running[row] for row in kept]
                batch.forward_iter += 1
                batch.prepare_for_decode()
                result = self.worker.own.forward_batch_generation(batch)
                blocks = result.next_token_ids.view(len(running), -1).tolist()
                for row, (at, yielded) in enumerate(zip(running, result.accept_lens.tolist(), strict=True)):
                    batch.reqs[row].kv.kv_committed_len += yielded
                    accepted[at].append(yielded - 1)
                    tokens[at] = until_eos([*tokens[at], *blocks[row][:yielded]], eos)
        finally:
            clear_pools(self.target.model_runner)

    def _groups(self, samples: Sequence[TokenSample], max_new_tokens: int) -> Iterator[list[TokenSample]]:
        """The samples in order, in groups that fit the pool."""

        def tokens(sample: TokenSample) -> int:
            count = tokens_of(sample, max_new_tokens, self.block_size, self.target.model_runner.page_size)
            if count > self.pool_tokens or count > self.model_config.context_len:
                raise DataError(
                    f"sample {sample.id}: its prompt of {sample.prompt_tokens} tokens, {max_new_tokens} new ones and "
                    f"the blocks after them need {count}, but the engine was started for {self.pool_tokens} in total "
                    f"and {self.model_config.context_len} per request"
                )
            return count

        return fitting_groups(samples, tokens, self.pool_tokens, self.max_requests)


def tokens_of(sample: TokenSample, max_new_tokens: int, block_size: int, page_size: int = 1) -> int:
    """The pool tokens that a request needs until it is done."""
    return padded_length(sample.prompt_tokens + max_new_tokens + RESERVED_BLOCKS * block_size, page_size)


def _is_done(tokens: Sequence[int], max_new_tokens: int, eos: frozenset[int]) -> bool:
    return tokens[-1] in eos or len(tokens) > max_new_tokens


def _arguments(kind: type[DraftWorker], target_dir: Path, draft_dir: Path, **further: Any) -> ServerArgs:
    """The server's arguments. Raises DflashRefused where SGLang rejects the algorithm on this device."""
    name = kind.algorithm.name
    try:
        return make_server_args(
            target_dir, speculative_algorithm=name, speculative_draft_model_path=str(draft_dir), **further
        )
    except ConfigError as error:
        if not REFUSAL.search(str(error)):
            raise DraftRefused(str(error)) from error
        raise DflashRefused(f"SGLang refuses {name} on a {further['device'].upper()}: {error.__cause__}") from error


def _allocate(target: TpModelWorker, worker: Any) -> None:
    """Allocate the memory pools, which draft and target share slot by slot, then attention and graphs of both.

    Initialising the attention also sets the layers whose states the target keeps.
    """
    adapter().patch_setter(target.model_runner.model)
    target.alloc_memory_pool()
    requests, slots = target.get_memory_pool()
    worker.alloc_memory_pool(
        memory_pool_config=target.model_runner.memory_pool_config,
        req_to_token_pool=requests,
        token_to_kv_pool_allocator=slots,
    )
    for one in (target, worker):
        one.init_attention_backends()
    for one in (target, worker):
        one.init_cuda_graphs()
