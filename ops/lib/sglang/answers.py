"""Answers of SGLang's model, and log-probabilities of given answers, in this process.

S tokens of a sample, T tokens of a pass, N requests
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from sglang.srt.managers import mm_schedule
from sglang.srt.managers.schedule_batch import MultimodalInputs, Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor

from ops.lib.data.token_shards import TokenSample
from ops.lib.sglang.mm_processor import ServedPrompt
from ops.lib.sglang.requests import greedy_request, make_request
from ops.lib.sglang.runtime import SglangRuntime


@torch.inference_mode()
def token_log_probs(runtime: SglangRuntime, sample: TokenSample) -> Tensor:
    """Log-probability of input_ids[1:], each given the tokens before it, float32 [S - 1] on the CPU.

    As a server returns them for a prompt. For the token of an image the value has no meaning: SGLang looks up
    the padding value in its place. Raises DataError for a sample too long for the runtime.
    """
    runtime.check_length(sample.id, len(sample.input_ids))
    request = make_request(sample, sample.input_ids, runtime.vision)
    request.return_logprob = True
    request.logprob_start_len = 0
    with _prefilled(runtime, [request]) as (_batch, forward_batch):
        output = runtime.runner.forward(forward_batch).logits_output
    return output.input_token_logprobs[: len(sample.input_ids) - 1].float().cpu()


@torch.inference_mode()
def greedy(
    runtime: SglangRuntime, requests: Sequence[Req], max_new_tokens: int, eos_token_ids: Collection[int]
) -> list[list[int]]:
    """The greedy answer to each request, its EOS included; all are decoded together, step by step."""
    with _prefilled(runtime, requests) as (batch, forward_batch):
        steps: list[Tensor] = []
        for step in range(max_new_tokens):
            if step:
                batch.input_ids = steps[-1].to(torch.int64)
                batch.prepare_for_decode()
                forward_batch = ForwardBatch.init_new(batch, runtime.runner, return_hidden_states_before_norm=False)
            output = runtime.runner.forward(forward_batch).logits_output
            steps.append(runtime.runner.sample(output, forward_batch))
    answers = torch.stack(steps, dim=1).tolist()
    return [_up_to_eos(answer, eos_token_ids) for answer in answers]


def served_request(prompt: ServedPrompt, name: str, max_new_tokens: int) -> Req:
    """A greedy request from the result of SGLang's own preprocessing of a prompt."""
    images = None if prompt.output is None else MultimodalInputs.from_processor_output(prompt.output)
    padded_ids = prompt.input_ids.tolist() if images is None else images.padded_input_ids
    return greedy_request(name, prompt.input_ids, array("q", padded_ids), images, max_new_tokens)


@contextmanager
def _prefilled(runtime: SglangRuntime, requests: Sequence[Req]) -> Iterator[tuple[ScheduleBatch, ForwardBatch]]:
    """A batch of the requests, ready for its prefill; afterwards the pools hold neither it nor earlier images."""
    mm_schedule.embedding_cache.clear()
    with runtime.prepared(requests) as prepared:
        yield prepared


def _up_to_eos(tokens: list[int], eos_token_ids: Collection[int]) -> list[int]:
    end = next((place for place, token in enumerate(tokens) if token in eos_token_ids), len(tokens) - 1)
    return tokens[: end + 1]
