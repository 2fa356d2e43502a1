"""EAGLE-3 drafts and MTP heads by SGLang's own classes: states and logits are alike, and so is what they propose.

A whole text runs at once, so that attention needs no cache; everything else is SGLang's, the layers of the target that
its EAGLE-3 setter keeps included.
"""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import pytest
import torch
from batch_cases import without_end
from capture_cases import processor_of
from eagle3_cases import LAYER_IDS, V, eagle3_folder, read_by_the_draft
from fake_stage import FakeStage
from family_checkpoints import make_checkpoint, token_sample
from mtp_cases import BLOCK, anchors_of, corrected, mtp_checkpoint, mtp_target, prompts_of, whole_pass
from safetensors.torch import load_file
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from sglang.srt.models.qwen3_5_mtp import Qwen3_5ForCausalLMMTP
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from ops.artifacts import TargetModel
from ops.lib.drafts.decoding.eagle3 import Eagle3Head
from ops.lib.sglang.runtime import SglangRuntime
from ops.lib.target.model import Target
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target

CPU = {"device": "cpu", "dtype": "float32", "pool_tokens": 1024, "context_length": 512}
ALIKE = {"atol": 2e-4, "rtol": 1e-4}


class Causal(nn.Module):
    """Attention over all tokens of one text, in place of that over SGLang's pool."""

    def __init__(self, heads: int, of_keys: int) -> None:
        super().__init__()
        self.heads, self.of_keys = heads, of_keys

    def forward(self, q, k, v, _forward_batch):
        q, k, v = (
            each.view(len(each), count, -1).transpose(0, 1)
            for each, count in ((q, self.heads), (k, self.of_keys), (v, self.of_keys))
        )
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).flatten(1)


class States(nn.Module):
    """Passes the states on for which logits are asked."""

    def forward(self, _ids, states, _head, _batch):
        return states


def with_causal_attention(model, attention):
    attention.attn = Causal(attention.num_heads, attention.num_kv_heads)
    return model.eval()


def batch_of(states, embeds) -> SimpleNamespace:
    """What the classes read of a forward batch behind the shift of its tokens."""
    return SimpleNamespace(
        input_ids=torch.zeros(len(embeds), dtype=torch.int64),
        mm_input_embeds=embeds,
        forward_mode=ForwardMode.DECODE,
        spec_info=SimpleNamespace(hidden_states=states),
    )


@torch.inference_mode()
def proposed_by_eagle3(model, following, features):
    """Proposals, logits and states m of the first pass [S, M]. Arguments: as of `Reference.chain`."""
    embeds, states, tokens, logits, first = following, features, [], [], None
    for _ in range(BLOCK - 1):
        out, (aux,) = model.model(None, torch.arange(len(embeds)), batch_of(states, embeds))
        first = aux if first is None else first
        logits.append(out[-1] @ model.lm_head.weight[: model.config.draft_vocab_size].T)  # without padding
        best = logits[-1].argmax()
        tokens.append(int(best if model.get_hot_token_id() is None else model.get_hot_token_id()[best]))
        embeds = torch.cat((embeds, model.model.embed_tokens(torch.tensor(tokens[-1:]))))
        states = torch.cat((model.model.fc(features) if states is features else states, aux[-1:]))
    return tokens, torch.stack(logits), first


@pytest.mark.parametrize("kind", ["some tokens", "the target's head and default layers"])
def test_sglangs_eagle3_class_proposes_what_dflow_proposes(kind, tmp_path, monkeypatch):
    given = {"tokens": [token for token in range(V) if token % 3]} if kind == "some tokens" else {"ids": None}
    folder = eagle3_folder(tmp_path / "eagle3", **given)
    checkpoint = make_checkpoint("qwen3", tmp_path / "checkpoint")
    stage = FakeStage(tmp_path)
    load_target(LoadTarget(checkpoint=str(checkpoint)), stage)
    artifact = stage.artifact(TargetModel)
    target = without_end(Target.load(artifact))
    head = Eagle3Head.load(target, folder)
    sample = token_sample(processor_of(artifact), "What is it?", name="text")
    plain, answer, found = corrected(target, head, sample, monkeypatch)
    ids, embeds, features = read_by_the_draft(target, sample, plain.tokens, head.layer_ids)
    whole = attrs.evolve(sample, input_ids=ids, loss_mask=torch.zeros(len(ids), dtype=torch.bool))
    with SglangRuntime.start(artifact.path / "model", **CPU) as runtime:
        runtime.model.set_eagle3_layers_to_capture(list(LAYER_IDS) if kind == "some tokens" else None)
        assert [layer + 1 for layer in head.layer_ids] == runtime.model.model.layers_to_capture
        (kept,) = runtime.capture([whole], head.layer_ids)
        torch.testing.assert_close(kept, features, **ALIKE)
        model = LlamaForCausalLMEagle3(LlamaConfig.from_pretrained(folder))
        model.load_weights(load_file(folder / "model.safetensors").items())
        embed, lm_head = runtime.model.get_embed_and_head()
        if model.load_lm_head_from_target:
            model.set_embed_and_head(embed, lm_head)
        else:
            model.set_embed(embed)
        with_causal_attention(model, model.model.layers[0].self_attn)
        for place, proposal in zip(anchors_of(answer), found, strict=True):
            end = len(sample.prompt().input_ids) + place
            tokens, logits, first = proposed_by_eagle3(model, embeds[1 : end + 1], kept[:end])
            assert tokens == proposal
            own, own_logits = first_pass(target, head, embeds[1 : end + 1], features[:end])
            torch.testing.assert_close(first, own, **ALIKE)
            mapped = own_logits if head.tokens_N is None else own_logits[head.tokens_N]
            torch.testing.assert_close(logits[0], mapped, **ALIKE)
        assert len({tuple(proposal) for proposal in found}) > len(found) // 2


@torch.inference_mode()
def first_pass(target, head, following, features):
    """dflow's states m of a whole text [S, M], and the logits behind it, [V]."""
    positions = torch.arange(len(following))[None]
    embedded, states, rope = head.known(torch.cat((following, features), dim=-1)[None], positions)
    mask = torch.ones(len(following), len(following), dtype=torch.bool).tril()[None, None]
    out = head(embedded, states, rope, mask, None)[0]
    return out, head.logits(target, out[-1:])[0]


@torch.inference_mode()
def proposed_by_mtp(model, following, states, positions) -> list[int]:
    """Proposals behind an anchor. Arguments: as of `mtp_cases.Reference.proposals`."""
    tokens: list[int] = []
    for _ in range(BLOCK - 1):
        out = model(torch.zeros(len(following), dtype=torch.int64), positions, batch_of(states, following))
        tokens.append(int((out[-1] @ model.lm_head.weight.T).argmax()))
        following = torch.cat((following, model.model.embed_tokens(torch.tensor(tokens[-1:]))))
        states = torch.cat((states, out[-1:]))
        positions = torch.cat((positions, positions[:, -1:] + 1), dim=1)
    return tokens


def test_sglangs_mtp_class_proposes_what_dflow_proposes(tmp_path, monkeypatch):
    checkpoint = mtp_checkpoint("qwen3_5", tmp_path / "checkpoint")
    target, head = mtp_target(checkpoint)
    with SglangRuntime.start(checkpoint, **CPU) as runtime:
        model = Qwen3_5ForCausalLMMTP(runtime.model_config.hf_config)
        model.load_weights(load_file(checkpoint / "model.safetensors").items())
        ends = (target.embed_weight, target.head_weight)
        model.set_embed_and_head(*(nn.Parameter(each, requires_grad=False) for each in ends))
        model.logits_processor = States()
        with_causal_attention(model, model.model.layers[0])
        for sample in prompts_of(checkpoint):
            plain, answer, found = corrected(target, head, sample, monkeypatch)
            x, h, positions = whole_pass(target, sample, plain.tokens)
            for place, proposal in zip(anchors_of(answer), found, strict=True):
                end = len(sample.prompt().input_ids) + place
                assert proposed_by_mtp(model, x[1 : end + 1], h[:end], positions[:, :end]) == proposal
            assert len({tuple(proposal) for proposal in found}) > len(found) // 2
