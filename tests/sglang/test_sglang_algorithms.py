"""SGLang's own worker and draft classes beside dflow's decoding, for the algorithms that change the proposal."""

from __future__ import annotations

import argparse
import shutil

import attrs
import pytest
import torch
from dflash_cases import NEW_TOKENS
from safetensors.torch import load_file, save_file

from ops.lib.data.files import read_json, write_json
from ops.lib.drafts.backbone.config import to_serving
from ops.lib.drafts.backbone.load import load_draft
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.decode import decode_speculative
from ops.lib.drafts.dflash2.config import Dflash2
from ops.lib.drafts.dspark.config import Dspark
from ops.lib.sglang.dflash_worker import DflashEngine, DraftRefused

CPU = {"device": "cpu", "dtype": "float32"}
ALGORITHMS = {"dflash2": Dflash2(taps=2, group=8, rank=8, candidates=8)}


def grown(plain, folder, algorithm, noise=0.03):
    """A serving directory of the algorithm on a plain draft's backbone, with heads that change tokens."""
    config = attrs.evolve(load_draft(plain).config, algorithm=algorithm)
    model = DraftModel(config)
    model.initialise(0)
    backbone = load_file(plain / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in backbone:
                weight.copy_(backbone[name])
            else:
                weight.add_(torch.randn(weight.shape, generator=generator) * noise)
    folder.mkdir()
    write_json(folder / "config.json", to_serving(config))
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("case_name", ["text_case", "vision_case"])
def test_served_answers_are_the_targets_own_and_accepted_lengths_are_those_of_evaluate(
    request, tmp_path, case_name, name
):
    case = request.getfixturevalue(case_name)
    draft = grown(case.drafts["trained"].path, tmp_path / "draft", ALGORITHMS[name])
    model = load_draft(draft)
    expected = [decode_speculative(case.loaded, model, prompt, NEW_TOKENS) for prompt in case.prompts]
    plain = case.reference(case.drafts["trained"].path)
    with DflashEngine.start(case.checkpoint, draft, **CPU, pool_tokens=1024) as engine:
        served = engine.decode(case.prompts, NEW_TOKENS, case.eos)
    assert [answer.tokens for answer in case.plain] == [answer.tokens for answer in served]
    assert [answer.accepted for answer in expected] == [answer.accepted for answer in served]
    assert [answer.accepted for answer in expected] != [answer.accepted for answer in plain]
    assert len({length for answer in served for length in answer.accepted}) > 2


def test_sglang_serves_dspark_with_a_bias_of_zero(text_case, tmp_path):
    """As load_draft writes plain drafts whose slot 0 predicts a token; without a Markov head SGLang does not start."""
    from sglang.srt.models.dspark import build_markov_head
    from sglang.srt.speculative.dspark_components.dspark_config import (
        get_dspark_sample_from_anchor,
        parse_dspark_draft_config,
    )

    algorithm = Dspark(rank=1, confidence_head=False)
    draft = grown(text_case.drafts["trained"].path, tmp_path / "draft", algorithm, noise=0)
    config = read_json(draft / "config.json")
    read = parse_dspark_draft_config(draft_hf_config=config)
    assert (load_draft(draft).config.block_size - 1, True) == (read.gamma, read.require_markov())
    assert get_dspark_sample_from_anchor(config)
    head = build_markov_head(argparse.Namespace(**config))
    torch.nn.init.ones_(head.markov_w1.weight)
    torch.nn.init.zeros_(head.markov_w2.weight)
    bias, _ = head.step_bias(torch.tensor([3]), hidden_states=None, state=None)
    assert not bias.any()
    with pytest.raises(ValueError, match="markov_rank > 0"):
        build_markov_head(argparse.Namespace(**config | {"markov_rank": 0}))


@pytest.mark.parametrize(("layer", "said"), [(-1, "out-of-range layer id"), ("last", "feature dim mismatch")])
def test_sglang_does_not_capture_the_embeddings_or_the_last_layer(text_case, tmp_path, layer, said):
    """Which load_draft refuses."""
    draft = tmp_path / "draft"
    shutil.copytree(text_case.drafts["trained"].path, draft)
    config = read_json(draft / "config.json")
    ids = config["dflash_config"]["target_layer_ids"]
    ids[0 if layer == -1 else -1] = layer if layer == -1 else config["num_target_layers"] - 1
    write_json(draft / "config.json", config)
    with (
        pytest.raises((DraftRefused, ValueError), match=said),
        DflashEngine.start(text_case.checkpoint, draft, **CPU, pool_tokens=1024) as engine,
    ):
        engine.decode(text_case.prompts, NEW_TOKENS, text_case.eos)
