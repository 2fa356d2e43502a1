"""Drafts as the classes of their publishers compute them. Nothing is imported until a class is asked for.

Q slots of a block, T context, M hidden size, V vocabulary, F width of the features
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from safetensors.torch import load_file
from torch import Tensor, nn

from ops.lib.data.files import read_json


@frozen(eq=False)
class Published:
    """A published draft class with its weights.

    layer_ids: the target's layers in the order of its features; 0 is the output of the first. first: the first slot
    that predicts a token. slots: from features [T, F] and a block's embeddings [Q, M] to hidden states [Q, M]. tokens:
    from the hidden states [P, M] of the predicting slots, the anchor's id and a head to the proposed tokens; of a class
    that reads_context, also from the target's embedding [V, M] and the features.
    """

    model: Any
    layer_ids: tuple[int, ...]
    first: int
    slots: Callable[[Tensor, Tensor], Tensor]
    tokens: Callable[..., Tensor]
    reads_context: bool = False


def package(name: str) -> None:
    """Skip the test if a publisher's package is not installed."""
    pytest.importorskip(name, reason=f"not installed: {name}")


def positions(features_TF: Tensor, block_QM: Tensor) -> Tensor:
    return torch.arange(len(features_TF) + len(block_QM))[None]


def step_by_step(step: Callable[[int, int], Tensor], count: int, anchor: int) -> Tensor:
    """Choose tokens from left to right: step(slot, token before) returns the next one."""
    tokens = [anchor]
    for slot in range(count):
        tokens.append(int(step(slot, tokens[-1])))
    return torch.tensor(tokens[1:])


def z_lab(directory: Path) -> Published:
    """Load a draft with z-lab's class, dflash 0.1.0."""
    package("dflash")
    import dflash

    is_second = read_json(directory / "config.json")["architectures"] == ["DFlash2DraftModel"]
    cls = dflash.DFlash2DraftModel if is_second else dflash.DFlashDraftModel
    model, loading = cls.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    if loading["missing_keys"]:
        pytest.skip(f"the class does not load this form: {sorted(loading['missing_keys'])[:3]}")
    return z_lab_model(model.eval())


def z_lab_model(model: Any) -> Published:
    def slots(features: Tensor, block: Tensor) -> Tensor:
        return model(
            target_hidden=features[None], noise_embedding=block[None], position_ids=positions(features, block)
        )[0]

    def tokens(hidden: Tensor, anchor: int, head: nn.Linear) -> Tensor:
        if hasattr(model, "propose"):
            return model.propose(hidden[None], torch.tensor([anchor]), head, 0.0)[0][0]
        return model.compute_logits(hidden, head).argmax(-1)

    return Published(model, tuple(model.target_layer_ids), 1, slots, tokens)


def specforge(directory: Path) -> Published:
    """Load a draft with the class of specforge 0.2.0.

    Its generate takes slot 0 for one that predicts nothing, unlike its training and the engines.
    """
    package("specforge")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of libraries that other algorithms need
        from specforge.modeling.draft.dflash import DFlashDraftModel
        from specforge.modeling.draft.dspark import DSparkDraftModel

    nest = read_json(directory / "config.json")["dflash_config"]
    cls = DSparkDraftModel if nest.get("projector_type") == "dspark" else DFlashDraftModel
    config = cls.config_class.from_pretrained(directory)
    config._attn_implementation = "eager"
    model = cls(config)
    model.load_state_dict(load_file(directory / "model.safetensors"))  # whose hook reads early names
    return specforge_model(model.eval())


def specforge_model(model: Any) -> Published:
    is_dspark = type(model).__name__ == "DSparkDraftModel"

    def slots(features: Tensor, block: Tensor) -> Tensor:
        found = model(
            target_hidden=features[None], noise_embedding=block[None], position_ids=positions(features, block)
        )
        return found[0]

    def tokens(hidden: Tensor, anchor: int, head: nn.Linear) -> Tensor:
        markov = model.markov_head if is_dspark else None
        return by_markov_head(markov, hidden, anchor, head)

    return Published(model, tuple(model.target_layer_ids), 0 if is_dspark else 1, slots, tokens)


def by_markov_head(markov: Any, hidden: Tensor, anchor: int, head: nn.Linear) -> Tensor:
    """Choose a block's tokens with a Markov head, as SpecForge and DeepSpec decode."""
    logits = head(hidden)[None]
    if markov is None:
        return logits[0].argmax(-1)
    tokens, _ = markov.sample_block_tokens(
        logits, first_prev_token_ids=torch.tensor([anchor]), hidden_states=hidden[None]
    )
    return tokens[0]


def deepspec(directory: Path) -> Published:
    """Load a draft with DeepSpec's class. DeepSpec is on no index: its repository must be on the path."""
    package("deepspec")
    from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel

    model = Qwen3DSparkModel.from_pretrained(directory, dtype=torch.float32)
    model.config._attn_implementation = "eager"
    return deepspec_model(model.eval())


def deepspec_model(model: Any) -> Published:
    def slots(features: Tensor, block: Tensor) -> Tensor:
        return model._forward_backbone(
            target_hidden_states=features[None], noise_embedding=block[None], position_ids=positions(features, block)
        )[0]

    def tokens(hidden: Tensor, anchor: int, head: nn.Linear) -> Tensor:
        return by_markov_head(model.markov_head, hidden, anchor, head)

    return Published(model, tuple(model.target_layer_ids), 0, slots, tokens)


def speculators(config: Mapping[str, Any], directory: Path) -> Published:
    """Load a draft with speculators 0.9.0, from a config without the target's name, so that the hub is not queried."""
    package("speculators")
    from speculators import SpeculatorModel, SpeculatorModelConfig

    read = SpeculatorModelConfig.from_dict({key: value for key, value in config.items() if key != "auto_map"})
    read.speculators_config.verifier.name_or_path = None
    read.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.registry[read.speculators_model_type](read)
    missing, unexpected = model.load_state_dict(load_file(directory / "model.safetensors"), strict=False)
    assert [] == unexpected
    assert {name.split(".")[0] for name in missing} <= ENDS_OF_SPECULATORS
    return speculators_model(model)


ENDS_OF_SPECULATORS = {"embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"}  # the target's


def speculators_model(model: Any) -> Published:
    config = model.eval().config

    def slots(features: Tensor, block: Tensor) -> Tensor:
        context = model.hidden_norm(model.fc(features[None]))
        hidden = block[None]
        rotation = model.rotary_emb(context, positions(features, block))
        for layer in model.layers:
            hidden = layer(
                hidden_states=hidden,
                target_hidden=context,
                attention_mask=None,
                position_ids=positions(features, block),
                use_cache=False,
                position_embeddings=rotation,
            )
        return model.norm(hidden)[0]

    def tokens(hidden: Tensor, anchor: int, head: nn.Linear) -> Tensor:
        logits = head(hidden)

        def by_selector(slot: int, before: int) -> Tensor:
            candidates, scores = model.candidate_selector.select(
                logits[None, slot, None], hidden[None, slot, None], torch.tensor([[before]])
            )
            return candidates[0, 0, scores[0, 0].argmax()]

        def by_bias(slot: int, before: int) -> Tensor:
            bias = model.markov_head.block_bias(
                prev_token_ids=torch.tensor([[before]]), hidden_states=hidden[None, slot, None]
            )
            return (logits[slot] + bias[0, 0]).argmax()

        if hasattr(model, "candidate_selector"):
            return step_by_step(by_selector, len(hidden), anchor)
        if getattr(model, "markov_head", None) is not None:
            return step_by_step(by_bias, len(hidden), anchor)
        return logits.argmax(-1)

    ids = tuple(layer - 1 for layer in config.aux_hidden_state_layer_ids)  # feature k is the input of layer k
    return Published(model, ids, 0 if config.sample_from_anchor else 1, slots, tokens)


MODELOPT = {
    "dflash": "DFlashModule",
    "dflash2": "DFlash2Module",
    "dspark": "DSparkModule",
    "lilicorr": "LiLiCorrModule",
}


def modelopt_class(algorithm: str) -> Any:
    """The draft module of nvidia-modelopt 0.48.0rc1 for an algorithm, by its name in `projector_type`."""
    package("modelopt.torch.speculative.plugins.modeling_lilicorr")
    module = import_module(f"modelopt.torch.speculative.plugins.modeling_{algorithm}")
    return getattr(module, MODELOPT[algorithm])


def modelopt(directory: Path) -> Published:
    """Load a draft with ModelOpt's module, with the fields of dflash_config at the top level."""
    from transformers import Qwen3Config

    config = read_json(directory / "config.json")
    nest = config.pop("dflash_config")
    module_config = Qwen3Config(**config | nest)
    module_config._attn_implementation = "eager"
    model = modelopt_class(nest.get("projector_type", "dflash"))(module_config).eval()
    model.load_state_dict(load_file(directory / "model.safetensors"))
    return modelopt_model(model, nest["target_layer_ids"])


def modelopt_model(model: Any, layer_ids: Sequence[int]) -> Published:
    name = type(model).__name__

    def slots(features: Tensor, block: Tensor) -> Tensor:
        return model(block[None], features[None], positions(features, block))[0]

    def by_bias(hidden: Tensor, anchor: int, head: nn.Linear) -> Tensor:
        logits = head(hidden)

        def step(slot: int, before: int) -> Tensor:
            bias, _ = model.markov_step(torch.tensor([before]), hidden[None, slot])
            return (logits[slot] + bias[0]).argmax()

        return step_by_step(step, len(hidden), anchor)

    def by_selector(hidden: Tensor, anchor: int, head: nn.Linear) -> Tensor:
        best = head(hidden).topk(model.candidate_selector.top_k)
        given = (best.indices[None], best.values[None], hidden[None], torch.tensor([anchor]))
        return model.candidate_selector.greedy_path(*given)[0]

    def by_lattice(hidden: Tensor, _anchor: int, head: nn.Linear, embed: Tensor, features: Tensor) -> Tensor:
        best = head(hidden).log_softmax(-1).topk(model.lilicorr.candidate_topk)
        start, pairs = model.score_lattice(
            candidate_token_ids=best.indices[None, None],
            candidate_log_probs=best.values[None, None],
            pass_hidden=hidden[None, None],
            embed_tokens=nn.Embedding.from_pretrained(embed),
            target_hidden=features[None],
            anchor_positions=torch.tensor([[len(features)]]),
        )
        places = [start[0, 0].argmax()]
        for pair in pairs[0, 0]:
            places.append(pair[places[-1]].argmax())
        return best.indices.gather(1, torch.stack(places)[:, None])[:, 0]

    def plain(hidden: Tensor, _anchor: int, head: nn.Linear) -> Tensor:
        return head(hidden).argmax(-1)

    tokens = {"DSparkModule": by_bias, "DFlash2Module": by_selector, "LiLiCorrModule": by_lattice}.get(name, plain)
    return Published(
        model, tuple(layer_ids), 0 if name == "DSparkModule" else 1, slots, tokens, reads_context=tokens is by_lattice
    )
