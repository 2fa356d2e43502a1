"""SGLang's own model code in this process: a model runner, its memory pools, and a prefill that keeps hidden states.

The order of the calls follows SGLang's own sglang/benchmark/one_batch.py.

    S tokens of a sample, T tokens of a pass, F = layers * hidden size
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from attrs import define
from sglang.kernels.ops.mamba.triton_ops import initialize_mamba_selective_state_update_backend
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import get_tp_group
from sglang.srt.managers import mm_schedule
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

from dsl.errors import DataError
from ops.lib.data.batching import padded_length
from ops.lib.data.token_shards import TokenSample
from ops.lib.sglang.adapter import adapter
from ops.lib.sglang.layers import keep_no_layers, set_layers_to_capture
from ops.lib.sglang.process import MAX_REQUESTS, NO_PORT, enter, leave, make_server_args
from ops.lib.sglang.requests import VisionTokens, make_request
from ops.lib.sglang.version import require_sglang


@define(eq=False)
class SglangRuntime:
    """A model loaded by SGLang in this process, ready for prefills; a context manager, as only one can be open."""

    server_args: ServerArgs
    model_config: ModelConfig
    runner: ModelRunner
    vision: VisionTokens | None
    pool_tokens: int
    context_length: int
    max_requests: int

    @classmethod
    def start(
        cls,
        model_dir: Path,
        *,
        device: str,
        dtype: str,
        pool_tokens: int,
        context_length: int,
        server_args: Mapping[str, Any] | None = None,
        max_requests: int = MAX_REQUESTS,
        tp_rank: int = 0,
        tp_size: int = 1,
        store: dist.Store | None = None,
    ) -> Self:
        """Load the model of a checkpoint directory, and allocate its memory pools.

        dtype: "float32", "bfloat16" or "float16". pool_tokens: tokens that one pass can hold. context_length: the
        longest sample. server_args: further arguments of SGLang's ServerArgs. With tp_size > 1 every rank of the group
        calls this with one store, see `enter`. Raises DataError if SGLang is missing or unsupported, or if this process
        has an open runtime or a process group.
        """
        require_sglang("the sglang backend")
        arguments = make_server_args(
            model_dir,
            device=device,
            dtype=dtype,
            pool_tokens=pool_tokens,
            context_length=context_length,
            max_requests=max_requests,
            tp_size=tp_size,
            **(server_args or {}),
        )
        place = enter(arguments, tp_rank, store)
        with ExitStack() as undo:
            undo.callback(leave)
            runner = ModelRunner(
                model_config=place.model_config,
                mem_fraction_static=place.mem_fraction_static,
                gpu_id=place.gpu_id,
                nccl_port=NO_PORT,
                server_args=arguments,
            )
            runner.alloc_memory_pool()
            runner.init_attention_backends()
            if mambaish_config(place.model_config) is not None:
                initialize_mamba_selective_state_update_backend(arguments)
            runner.init_cuda_graphs()
            undo.pop_all()
        vision = VisionTokens.of(place.model_config.hf_config)
        page = runner.page_size
        capacity = min(-(-pool_tokens // page), runner.max_total_num_tokens // page) * page  # memory may limit it
        requests = min(max_requests, runner.max_running_requests)
        return cls(arguments, place.model_config, runner, vision, capacity, context_length, requests)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release everything, so that another model can be started in this process."""
        self.runner = None
        leave()

    @property
    def model(self) -> Any:
        """SGLang's model, an nn.Module."""
        return self.runner.model

    @property
    def hidden_size(self) -> int:
        return int(self.model_config.hidden_size)

    @property
    def num_layers(self) -> int:
        return int(self.model_config.num_hidden_layers)

    def capture(self, samples: Sequence[TokenSample], layer_ids: Sequence[int]) -> list[Tensor]:
        """The features [S, F] of each sample: the inputs of layers k+1 for each k of `layer_ids`, concatenated. See
        `states`.
        """
        return [features_SF for features_SF, _final_SM in self.states(samples, layer_ids)]

    def states(
        self,
        samples: Sequence[TokenSample],
        layer_ids: Sequence[int],
        *,
        final_hidden: bool = False,
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Features [S, F] and, on request, the states after the final norm [S, M] of each sample, on the CPU.

        Text and image samples go together, in as many passes as the pool needs. No prefix or image embedding of an
        earlier call is reused, so the result depends only on the samples of this call. Raises DataError for a sample
        longer than the pool or the context.
        """
        set_layers_to_capture(self.model, layer_ids, self.num_layers)
        mm_schedule.embedding_cache.clear()
        states: list[tuple[Tensor, Tensor | None]] = []
        for group in self._passes(samples):
            requests = [make_request(sample, sample.input_ids, self.vision) for sample in group]
            hidden_TF, final_TM = self._prefill(requests, layer_ids)
            lengths = [len(sample.input_ids) for sample in group]
            features = hidden_TF.cpu().split(lengths)
            final = final_TM.cpu().split(lengths) if final_hidden else [None] * len(group)
            states += zip(features, final, strict=True)
        return states

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on one of the ranks that share this model; a collective."""
        if self.server_args.tp_size == 1:
            return flag
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=get_tp_group().cpu_group)
        return bool(flags.item())

    def check_length(self, name: str, tokens: int) -> None:
        """Check that a sample fits one pass. Raises DataError."""
        if tokens > self.context_length or self._paged(tokens) > self.pool_tokens:
            raise DataError(
                f"sample {name}: {tokens} tokens, and the runtime was started for samples of {self.context_length} "
                f"and passes of {self.pool_tokens}"
            )

    @torch.inference_mode()
    def token_log_probs(self, sample: TokenSample) -> Tensor:
        """The log-probability of each token of input_ids[1:], given the tokens before it, float32 [S - 1] on the CPU.

        A server returns the same for a prompt. Values of image tokens are meaningless: SGLang looks up padding values
        in their place. Raises DataError for a sample too long for the runtime.
        """
        self.check_length(sample.id, len(sample.input_ids))
        request = make_request(sample, sample.input_ids, self.vision)
        request.return_logprob = True
        request.logprob_start_len = 0
        mm_schedule.embedding_cache.clear()
        with self.prepared([request]) as (_batch, forward_batch):
            output = self.runner.forward(forward_batch).logits_output
        return output.input_token_logprobs[: len(sample.input_ids) - 1].float().cpu()

    def prefill(self, samples: Sequence[TokenSample]) -> None:
        """Run the passes of `states` without keeping states: the baseline for the speed of `states`."""
        keep_no_layers(self.model)
        mm_schedule.embedding_cache.clear()
        with torch.inference_mode():
            for group in self._passes(samples):
                requests = [make_request(sample, sample.input_ids, self.vision) for sample in group]
                with self.prepared(requests, CaptureHiddenMode.NULL) as (_batch, forward_batch):
                    self.runner.forward(forward_batch)

    @contextmanager
    def prepared(
        self, requests: Sequence[Req], mode: CaptureHiddenMode | None = None
    ) -> Iterator[tuple[ScheduleBatch, ForwardBatch]]:
        """Open a context with a batch of requests ready for its prefill; it leaves the pools afterwards."""
        try:
            batch = prefill_batch(self.runner, requests)
            yield (
                batch,
                ForwardBatch.init_new(
                    batch, self.runner, capture_hidden_mode=mode, return_hidden_states_before_norm=False
                ),
            )
        finally:
            clear_pools(self.runner)

    @torch.inference_mode()
    def _prefill(self, requests: list[Req], layer_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The kept states [T, F] and final states [T, M] of a single forward pass over the requests."""
        with (
            self.prepared(requests, CaptureHiddenMode.FULL) as (_batch, forward_batch),
            self._watched_head() as head,
        ):
            hidden_TF = self.runner.forward(forward_batch).logits_output.hidden_states
        kept = head["aux_hidden_states"]
        width = 0 if kept is None or len(kept) == 0 else hidden_TF.shape[1]
        if width != len(layer_ids) * self.hidden_size:
            raise DataError(
                f"SGLang kept states of width {width}, where those of layers {list(layer_ids)} were requested, "
                f"{self.hidden_size} each"
            )
        return hidden_TF, head["hidden_states"]

    @contextmanager
    def _watched_head(self) -> Iterator[dict[str, Any]]:
        """Open a context that records the head's inputs in a forward pass: final-norm states, and kept states.

        Without kept states SGLang would silently return the final ones, which have the width of one layer.
        """
        head = self.model.logits_processor
        signature = inspect.signature(head.forward)
        seen: dict[str, Any] = {"aux_hidden_states": None}

        def watch(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.update(signature.bind(*args, **kwargs).arguments)

        handle = head.register_forward_pre_hook(watch, with_kwargs=True)
        try:
            yield seen
        finally:
            handle.remove()

    def _passes(self, samples: Sequence[TokenSample]) -> Iterator[list[TokenSample]]:
        """The samples in order, in groups that fit the pool."""

        def tokens(sample: TokenSample) -> int:
            self.check_length(sample.id, len(sample.input_ids))
            return self._paged(len(sample.input_ids))

        return fitting_groups(samples, tokens, self.pool_tokens, self.max_requests)

    def _paged(self, tokens: int) -> int:
        """The pool tokens of a sample, in whole pages."""
        return padded_length(tokens, self.runner.page_size)


def fitting_groups(
    samples: Sequence[TokenSample], tokens: Callable[[TokenSample], int], pool_tokens: int, max_requests: int
) -> Iterator[list[TokenSample]]:
    """The samples in order, in groups of at most `max_requests` and `pool_tokens`. tokens: those of a sample."""
    group: list[TokenSample] = []
    total = 0
    for sample in samples:
        count = tokens(sample)
        if group and (total + count > pool_tokens or len(group) == max_requests):
            yield group
            group, total = [], 0
        group.append(sample)
        total += count
    if group:
        yield group


def prefill_batch(
    runner: ModelRunner, requests: Sequence[Req], algorithm: SpeculativeAlgorithm = SpeculativeAlgorithm.NONE
) -> ScheduleBatch:
    """A batch of requests, ready for its first forward pass."""
    pools = {
        "req_to_token_pool": runner.req_to_token_pool,
        "token_to_kv_pool_allocator": runner.token_to_kv_pool_allocator,
    }
    prefixes = adapter().NoPrefixes(page_size=runner.page_size, device=runner.device, **pools)
    batch = ScheduleBatch.init_new(
        reqs=list(requests),
        **pools,
        tree_cache=prefixes,
        model_config=runner.model_config,
        enable_overlap=False,
        spec_algorithm=algorithm,
    )
    batch.prepare_for_extend()
    if batch.input_ids is None:
        batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device, non_blocking=True)
        batch.prefill_input_ids_cpu = None
    return batch


def clear_pools(runner: ModelRunner) -> None:
    """Clear the pools from the state of every request."""
    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
