"""LiLiCorr by vLLM's own classes: the candidates, scores, walk and convolutions of an export are those of dflow."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from draft_chain import HIDDEN, MASK, VOCAB
from draft_forms import IDS, LAYERS, SIZES
from safetensors.torch import load_file, save_file

from ops.lib.data.files import write_json
from ops.lib.drafts.algorithms import part_of
from ops.lib.drafts.backbone.config import DraftConfig, to_serving
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.block_context import BlockContext
from ops.lib.drafts.decoding.sampling import GreedyChoice
from ops.lib.drafts.lilicorr.config import Lilicorr

BLOCK, ROWS = 6, 9
ALGORITHMS = {
    "lilicorr": Lilicorr(candidates=4, width=8, heads=2, factors=6),
    "lilicorr with convolutions": Lilicorr(candidates=8, width=HIDDEN, layers=1, heads=2, factors=6, taps=3, group=8),
}


@pytest.fixture(autouse=True)
def _one_rank(tmp_path):
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tmp_path}/rendezvous", local_rank=0, backend="gloo")
        initialize_model_parallel()
        yield
    cleanup_dist_env_and_memory()


@pytest.fixture(params=ALGORITHMS)
def export(request, tmp_path):
    """A draft whose weights all matter, its config.json as vLLM reads it, and its stored tensors."""
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.configs.eagle import EAGLEConfig

    shape = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": IDS, "num_target_layers": LAYERS}
    draft = DraftModel(DraftConfig(**SIZES | shape, algorithm=ALGORITHMS[request.param]))
    draft.initialise(0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.4)
    write_json(tmp_path / "config.json", to_serving(draft.config))
    save_file(draft.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    config = EAGLEConfig(get_config(str(tmp_path), trust_remote_code=False), method="dflash", model_type="eagle")
    return draft.eval().requires_grad_(False), config, load_file(tmp_path / "model.safetensors")


def of_head(config, tensors):
    """vLLM's head for a config, with the tensors by its own loader."""
    from vllm.model_executor.models.lilicorr import LiLiCorrHead
    from vllm.model_executor.models.utils import AutoWeightsLoader

    head = LiLiCorrHead(
        model_hidden_size=config.hidden_size,
        block_size=config.block_size,
        rms_norm_eps=config.rms_norm_eps,
        config=config.dflash_config,
    )
    own = [(name.removeprefix("lilicorr."), tensor) for name, tensor in tensors.items() if name.startswith("lilicorr.")]
    assert {name for name, _ in own} == AutoWeightsLoader(head).load_weights(own) == set(dict(head.named_parameters()))
    head.materialize_inference_buffers(torch.device("cpu"), torch.float32)
    return after_loading(head)


def after_loading(module):
    """As vLLM's loader does at the end."""
    for layer in module.modules():
        if hasattr(layer, "quant_method"):
            layer.quant_method.process_weights_after_loading(layer)
    return module


def best_tokens(head_VM, hidden_WM, count):
    """The candidates by vLLM's logits processor, with their log-probabilities."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    padding = SimpleNamespace(num_org_vocab_padding=0, org_vocab_start_index=0)
    lm_head = SimpleNamespace(
        shard_indices=padding,
        tp_size=1,
        quant_method=SimpleNamespace(apply=lambda _layer, hidden, bias=None: hidden @ head_VM.T),
    )
    return LogitsProcessor(VOCAB).get_top_k_tokens(lm_head, hidden_WM, count, return_log_probs=True)


def walked(candidates_SC, scores_SCC):
    """The walk of vLLM's `_selector_walk_kernel` at temperature 0: from the place before, at first 0."""
    tokens, before = [], 0
    for candidates_C, scores_CC in zip(candidates_SC, scores_SCC, strict=True):
        before = int(scores_CC[before].argmax())
        tokens.append(int(candidates_C[before]))
    return tokens


@pytest.mark.parametrize("slots", [BLOCK - 1, 3])
def test_vllms_head_proposes_what_dflow_does_in_a_shorter_block_too(export, slots):
    draft, config, tensors = export
    own, generator = draft.config.algorithm, torch.Generator().manual_seed(7)
    assert ["LiLiCorrDraftModel"] == config.architectures
    hidden_BDM = torch.randn(ROWS, slots, HIDDEN, generator=generator)
    embed_VM, head_VM = torch.randn(2, VOCAB, HIDDEN, generator=generator)
    last_BM = torch.randn(ROWS, HIDDEN, generator=generator)
    is_there_B = torch.arange(ROWS) != 2
    ids_WC, log_p_WC = best_tokens(head_VM, hidden_BDM.flatten(0, 1), own.candidates)
    ids_BDC, log_p_BDC = (each.view(ROWS, slots, own.candidates) for each in (ids_WC, log_p_WC))
    head = of_head(config, tensors)
    scores_BDCC = head(embed_VM[ids_BDC], log_p_BDC, hidden_BDM, last_BM, is_there_B)
    context = BlockContext(embed_VM, last_BM, is_there_B)
    first_BC, pairs_BDCC = draft.lilicorr(ids_BDC, log_p_BDC, hidden_BDM, context)
    torch.testing.assert_close(scores_BDCC[:, 0, 0], first_BC, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores_BDCC[:, 1:], pairs_BDCC, rtol=0, atol=1e-5)
    assert pairs_BDCC.std() > 0.5
    logits_BDV = hidden_BDM @ head_VM.T
    propose, anchors_B = part_of(own, "model:propose"), torch.zeros(ROWS, dtype=torch.int64)
    found = propose(draft, hidden_BDM, logits_BDV, anchors_B, GreedyChoice(), context).tokens_BD.tolist()
    assert [walked(*each) for each in zip(ids_BDC, scores_BDCC, strict=True)] == found
    assert logits_BDV.argmax(-1).tolist() != found


def test_vllms_convolutions_are_dflows(export):
    from vllm.model_executor.models.qwen3_dflash2 import DFlashGroupedConv

    draft, config, tensors = export
    own, generator = draft.config.algorithm, torch.Generator().manual_seed(7)
    sizes = [config.dflash_config[name] for name in ("conv_kernel_size", "conv_group_size")]
    assert [own.taps, own.group] == sizes
    convolutions = {name: module for name, module in draft.named_modules() if name.endswith("_conv")}
    assert len(convolutions) == (2 * config.num_hidden_layers if own.taps else 0)
    for name, ours in convolutions.items():
        theirs = DFlashGroupedConv(HIDDEN, *sizes, BLOCK, torch.float32, name)
        theirs.load_state_dict({each: tensors[f"{name}.{each}"] for each in theirs.state_dict()})
        after_loading(theirs)
        x_NKM, y_NKM = torch.randn(2, ROWS, BLOCK, HIDDEN, generator=generator)
        entered, coefficients = theirs.prepare(x_NKM.flatten(0, 1))
        ours_entered, kept = ours.enter(x_NKM)
        torch.testing.assert_close(entered.view_as(x_NKM), ours_entered, rtol=0, atol=1e-5)
        left = theirs.finish(y_NKM.flatten(0, 1), coefficients)
        torch.testing.assert_close(left.view_as(y_NKM), ours.leave(y_NKM, kept), rtol=0, atol=1e-5)
