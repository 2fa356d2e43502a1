"""Draft directories that each project's own code saves, of random weights; skipped where it is not installed.

A `Save` writes a directory for the target of this TargetModel's path, and gives the draft as its class computes it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import published_drafts
import torch
from draft_chain import MASK
from draft_forms import ALL_SLIDING, FLAT, IDS, LAYERS, LLAMA3, NESTED, OF_LILICORR, SIZES, SLIDING, SPECULATORS, YARN
from published_drafts import Published, package
from safetensors.torch import load_file
from transformers import Qwen3Config

from ops.lib.data.files import write_json

Save = Callable[[Path, Path], Published]


def random_weights(model: Any) -> Any:
    """Set random weights that bfloat16 holds exactly: norms around one, convolutions around identity, others around
    zero.
    """
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator) * 0.3
            if weight.ndim == 1 and "norm" in name:
                noise += 1
            elif name.endswith("base_kernel"):
                noise[:, 0] += 1
            weight.copy_(noise.bfloat16())
    return model.eval()


def qwen3_config(**fields: Any) -> Any:
    """The config of z-lab's and SpecForge's classes, as transformers makes it."""
    own = {"num_target_layers": LAYERS, "block_size": 4, "rope_theta": 5000.0}
    nest = {"mask_token_id": MASK, "target_layer_ids": list(IDS)} | fields.pop("dflash_config", {})
    return Qwen3Config(**SIZES | own | deepcopy(fields), dflash_config=nest)  # it changes the tables that it is given


def z_lab(second: bool = False, **fields: Any) -> Save:
    def save(folder: Path, target: Path) -> Published:
        package("dflash")
        import dflash

        cls = dflash.DFlash2DraftModel if second else dflash.DFlashDraftModel
        model = random_weights(cls(qwen3_config(**fields)))
        model.save_pretrained(folder)
        return published_drafts.z_lab_model(model)

    return save


def z_lab_again(folder: Path, target: Path) -> Published:
    """Load z-lab's draft and save it once more, which writes other names of tensors."""
    package("dflash")
    import dflash

    first = folder.with_name("first")
    z_lab(second=True, dflash_config=FLAT)(first, target)
    model = dflash.DFlash2DraftModel.from_pretrained(first).eval()
    model.save_pretrained(folder)
    return published_drafts.z_lab_model(model)


def speculators(algorithm: str, layer_config: Mapping[str, Any] = {}, **fields: Any) -> Save:
    def save(folder: Path, target: Path) -> Published:
        package("speculators")
        from speculators import SpeculatorModel, SpeculatorModelConfig

        own = {
            "speculators_model_type": algorithm,
            "transformer_layer_config": Qwen3Config(**SIZES | deepcopy(layer_config)),
        }
        named = {"name_or_path": None, "architectures": ["Qwen3ForCausalLM"]}
        method = SPECULATORS["speculators_config"] | {"algorithm": algorithm, "verifier": named}
        names = ("draft_vocab_size", "aux_hidden_state_layer_ids", "mask_token_id")
        common = {name: SPECULATORS[name] for name in names}
        config = SpeculatorModelConfig.from_dict(
            common | own | {"block_size": 4, "speculators_config": method} | fields
        )
        config.transformer_layer_config._attn_implementation = "eager"
        model = random_weights(SpeculatorModel.registry[algorithm](config))
        model.save_pretrained(folder)
        return published_drafts.speculators_model(model)

    return save


def specforge(architecture: str, **fields: Any) -> Save:
    """A function that saves a checkpoint with SpecForge's own export, which writes bfloat16."""

    def save(folder: Path, target: Path) -> Published:
        package("specforge")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of libraries that other algorithms need
            from specforge.export.to_hf import export_to_hf
            from specforge.modeling.draft.registry import resolve_draft

        config = qwen3_config(architectures=[architecture], **fields)
        config._attn_implementation = "eager"
        model = random_weights(resolve_draft(architecture)(config))
        checkpoint = folder.with_name("checkpoint")
        checkpoint.mkdir()
        write_json(checkpoint / "draft.json", config.to_dict())
        torch.save({"draft_state_dict": model.state_dict()}, checkpoint / "training_state.pt")
        export_to_hf(str(checkpoint), str(checkpoint / "draft.json"), str(folder))
        return published_drafts.specforge_model(model)

    return save


def deepspec(**fields: Any) -> Save:
    """A function that saves a draft as DeepSpec does.

    The config is a copy of the target's with more fields, and the weights include the target's embedding and head.
    """

    def save(folder: Path, target: Path) -> Published:
        package("deepspec")
        from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel
        from deepspec.modeling.dspark.qwen3.config import build_draft_config
        from deepspec.utils.config import ConfigNode

        own = {"num_draft_layers": SIZES["num_hidden_layers"], "block_size": 3, "num_anchors": 8}
        layers = {"target_layer_ids": list(IDS), "mask_token_id": MASK}
        target_config = Qwen3Config(**SIZES | {"num_hidden_layers": LAYERS})
        config = build_draft_config(target_config, ConfigNode(own | layers | fields))
        config._attn_implementation = "eager"
        model = random_weights(Qwen3DSparkModel(config))
        ends = load_file(target / "model" / "model.safetensors")
        with torch.no_grad():
            model.embed_tokens.weight.copy_(ends["model.embed_tokens.weight"])
            model.lm_head.weight.copy_(ends["lm_head.weight"])
        model.save_pretrained(folder)
        return published_drafts.deepspec_model(model)

    return save


def modelopt(algorithm: str = "dflash", **fields: Any) -> Save:
    """A function that saves a draft with ModelOpt's exporter, from the draft module and config of a converted
    target.
    """

    def save(folder: Path, target: Path) -> Published:
        package("modelopt.torch.speculative.plugins.modeling_lilicorr")
        from modelopt.torch.export.plugins import hf_spec_export

        config = Qwen3Config(**SIZES | fields, rope_theta=5000.0, block_size=4, target_layer_ids=list(IDS))
        config._attn_implementation = "eager"
        model = random_weights(published_drafts.modelopt_class(algorithm)(config))
        converted = SimpleNamespace(
            config=Qwen3Config(**SIZES | {"num_hidden_layers": LAYERS}, rope_theta=5000.0),
            dflash_config=config,
            dflash_block_size=4,
            dflash_module=model,
            mask_token_id=MASK,
            target_layer_ids=IDS,
            state_dict=lambda: {f"dflash_module.{name}": weight for name, weight in model.state_dict().items()},
        )
        exporter = getattr(hf_spec_export, published_drafts.MODELOPT[algorithm].replace("Module", "Exporter"))
        exporter(converted).export(folder, torch.float32)
        return published_drafts.modelopt_model(model, IDS)

    return save


MARKOV = {"markov_rank": 4, "markov_head_type": "vanilla"}
HEADS = {"confidence_head_alpha": 1.0, "confidence_head_with_markov": True}
SAVED: Mapping[str, Save] = {
    "z-lab, DFlash": z_lab(),
    "z-lab, DFlash with biases": z_lab(attention_bias=True),
    "z-lab, DFlash with yarn": z_lab(rope_scaling=YARN),
    "z-lab, DFlash with llama3": z_lab(rope_scaling=LLAMA3),
    "z-lab, DFlash with a window": z_lab(**SLIDING),
    "z-lab, DFlash2": z_lab(second=True, dflash_config=FLAT),
    "z-lab, DFlash2 with windows": z_lab(second=True, dflash_config=FLAT, **ALL_SLIDING),
    "z-lab, DFlash2 saved again": z_lab_again,
    "speculators, DFlash": speculators("dflash"),
    "speculators, DFlash with yarn": speculators("dflash", {"rope_parameters": YARN | {"rope_theta": 5000.0}}),
    "speculators, DFlash with the anchor first": speculators("dflash", sample_from_anchor=True),
    "speculators, DFlash2": speculators("dflash2", **FLAT),
    "speculators, DSpark": speculators("dspark", markov_rank=4),
    "speculators, DSpark with masks first": speculators("dspark", markov_rank=4, sample_from_anchor=False),
    "speculators, DSpark without heads": speculators("dspark", markov_rank=0, enable_confidence_head=False),
    "SpecForge, DFlash": specforge("DFlashDraftModel"),
    "SpecForge, DSpark": specforge("DSparkDraftModel", dflash_config=NESTED),
    "SpecForge, DSpark without heads": specforge("DSparkDraftModel", dflash_config={"projector_type": "dspark"}),
    "DeepSpec, DSpark": deepspec(**MARKOV, **HEADS),
    "DeepSpec, DSpark whose confidence head does not read the token": deepspec(
        **MARKOV, **HEADS | {"confidence_head_with_markov": False}
    ),
    "DeepSpec, DFlash": deepspec(markov_rank=0, confidence_head_alpha=0.0),
    "ModelOpt, DFlash": modelopt(),
    "ModelOpt, DFlash2": modelopt("dflash2", **FLAT),
    "ModelOpt, DSpark": modelopt("dspark", **MARKOV, use_confidence_head=True),
    "ModelOpt, DSpark without a confidence head": modelopt("dspark", **MARKOV),
    "ModelOpt, LiLiCorr": modelopt("lilicorr", **OF_LILICORR),
    "ModelOpt, LiLiCorr with convolutions": modelopt("lilicorr", **OF_LILICORR, conv_kernel_size=2, conv_group_size=4),
}
