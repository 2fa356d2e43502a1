"""Makes this process one of SGLang's: its arguments, its process group, and their release."""

from __future__ import annotations

import gc
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap, destroy_distributed_environment, destroy_model_parallel
from sglang.srt.managers import mm_schedule
from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers.common import get_context_length
from sglang.srt.utils.hf_transformers.config import get_config
from transformers import AutoConfig

from dsl.errors import ConfigError, DataError
from ops.lib.data.checkpoint_code import check_code
from ops.lib.sglang.meeting import meeting_in, on_this_host
from ops.lib.target.model import check_served, read_config
from ops.lib.target.sizes import TargetSizes

IMAGE_CACHE_BYTES = 2**30
MAX_REQUESTS = 256
POOL_UNIT = 256  # a multiple of every page size that a kind of attention needs, and more than SGLang's smallest pool
STATE_BYTES = 8 * 2**30  # SGLang would keep the recurrent state of every request that might run, 150 MB each at 27 B
NO_PORT = 0  # required by SGLang's constructors, only used on another platform
_entered = ExitStack()  # what `leave` releases


def make_server_args(
    model_dir: Path,
    *,
    device: str,
    dtype: str,
    pool_tokens: int,
    context_length: int,
    max_requests: int = MAX_REQUESTS,
    tp_size: int = 1,
    **further: Any,
) -> ServerArgs:
    """The server arguments of a runtime that captures hidden states, with `further` added.

    The pool is rounded up to whole pages, so that a sample of `pool_tokens` fits. Raises ConfigError if SGLang rejects
    the arguments, or would fail at the first forward pass. Raises DataError as `check_code` does; a draft never has
    code of its own, even if the target may.
    """
    check_code(model_dir, bool(further.get("trust_remote_code")))
    if "speculative_draft_model_path" in further:
        check_code(Path(further["speculative_draft_model_path"]), trust_remote_code=False)
    sizes = TargetSizes.of(read_config(model_dir))
    if dtype == "float32" and (why := float32_refusal(model_dir, device)):
        raise ConfigError(f'{why}: set dtype = "bfloat16"')
    speculative = "speculative_algorithm" in further
    unit = math.lcm(POOL_UNIT, max(1, int(further.get("page_size") or 1)))
    arguments: dict[str, Any] = {
        "model_path": str(model_dir),
        "device": device,
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "chunked_prefill_size": -1,
        "max_prefill_tokens": pool_tokens,
        "max_total_tokens": -(-pool_tokens // unit) * unit,
        "max_running_requests": _requests_with_states(sizes, max_requests, speculative),
        "context_length": context_length,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "random_seed": 0,
        "tp_size": tp_size,
        **kernel_args(device, dtype),
        **further,
    }
    try:
        made = ServerArgs(**arguments)
        made.resolve_once()
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"SGLang rejects its server arguments: {error}") from error
    return made


def kernel_args(device: str, dtype: str) -> dict[str, Any]:
    """Server arguments for devices on which SGLang's own choice of kernels would not run.

    On a CPU, only attention and sampling in plain torch run. On a GPU, SGLang's default attention kernels (fa3,
    flashinfer, trtllm_mha) support only 16 bits, so float32 needs others.
    """
    if device == "cpu":
        return {
            "mem_fraction_static": 0.5,
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "mm_attention_backend": "sdpa",
        }
    return {"attention_backend": "triton", "mm_attention_backend": "sdpa"} if dtype == "float32" else {}


def float32_refusal(model_dir: Path, device: str) -> str | None:
    """A text on why SGLang cannot run a checkpoint in float32 on the device; None if it can."""
    if device == "cuda" and TargetSizes.of(read_config(model_dir)).state_per_sequence:
        return "SGLang's linear attention on a GPU does not support float32"
    return None


def _requests_with_states(sizes: TargetSizes, max_requests: int, speculative: bool) -> int:
    """The number of requests that can run at once; fewer than max_requests if recurrent states exceed STATE_BYTES.

    A verification also keeps a state for every token of the block, commonly 16.
    """
    bytes_each = 4 * sizes.state_per_sequence * (17 if speculative else 1)
    return max_requests if bytes_each == 0 else max(1, min(max_requests, STATE_BYTES // bytes_each))


def context_length(model_dir: Path, trust_remote_code: bool = False) -> int:
    """SGLang's limit for the number of tokens in a sequence of this checkpoint."""
    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    return int(get_context_length(config.get_text_config()))


@frozen
class Place:
    """The device and ranks of this process's models."""

    model_config: ModelConfig
    mem_fraction_static: float
    gpu_id: int


def enter(arguments: ServerArgs, tp_rank: int = 0, store: dist.Store | None = None) -> Place:
    """Make this process one of SGLang's, before any model is loaded; `leave` undoes it.

    store: where ranks that share the model meet, all on this host; one rank needs none. Raises DataError if the process
    has an open runtime or a process group, or if SGLang would read the checkpoint as another model. Raises
    TransientError if another user's process replaced a rank.
    """
    check_served(Path(arguments.model_path))
    if dist.is_initialized():
        raise DataError("SGLang creates its own process group, but this process is already in one: leave it first")
    gpu_id = torch.cuda.current_device() if arguments.device == "cuda" else 0
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=tp_rank, gpu_id=gpu_id))
    with ExitStack() as undo:
        undo.callback(leave)
        model_config = ModelConfig.from_server_args(arguments)
        _entered.enter_context(on_this_host())  # nccl opens its sockets with the first pass
        with meeting_in(dist.HashStore() if store is None else store, tp_rank):
            bootstrap.init_parallel_runtime(server_args=arguments, device=arguments.device, dist_port=NO_PORT)
        bootstrap.init_layer_runtime(model_config=model_config)
        undo.pop_all()
    mm_schedule.init_mm_embedding_cache(IMAGE_CACHE_BYTES)
    return Place(model_config, resolving_view(arguments).mem_fraction_static, gpu_id)


def leave() -> None:
    """Resets the state of a runtime in SGLang's modules, so that another one can be started in this process."""
    mm_schedule.embedding_cache = None
    get_config.cache_clear()  # configs are cached by path, with the changes of models that were started
    destroy_model_parallel()
    destroy_distributed_environment()
    _entered.close()
    reset_context()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
