"""SGLang's own worker and draft classes beside dflow's decoding, for the algorithms that change the proposal."""

from __future__ import annotations

import attrs
import pytest
import torch
from dflash_cases import NEW_TOKENS
from safetensors.torch import load_file, save_file

from ops.lib.data.files import write_json
from ops.lib.drafts.backbone.config import to_serving
from ops.lib.drafts.backbone.load import load_draft
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.decode import decode_speculative
from ops.lib.drafts.dflash2.config import Dflash2
from ops.lib.sglang.dflash_worker import DflashEngine

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
