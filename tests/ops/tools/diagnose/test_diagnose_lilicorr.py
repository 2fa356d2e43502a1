"""`dflow diagnose` of a LiLiCorr draft: its tau is that of the lattice's walk, and what is wrong is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from diagnose_cases import BLOCK, LAYER, NEW_TOKENS, causes, diagnosed, make_chain, with_config
from lively_target import make_lively

from ops.artifacts import TargetModel
from ops.lib.data.token_shards import TokenReader
from ops.lib.drafts.backbone.load import load_draft
from ops.lib.drafts.decoding.decode import decode_speculative
from ops.lib.drafts.lilicorr.config import LilicorrOptions
from ops.lib.target.model import Target
from ops.tools.diagnose import run
from ops.tools.diagnose.chain import Chain
from ops.tools.diagnose.judgement import UNMEASURED

OWN = LilicorrOptions(candidates=4, width=16, heads=2, factors=8, regret=0.0)


@pytest.fixture(scope="module")
def chain(target, tokens, tmp_path_factory) -> Chain:
    lively = make_lively(target, tmp_path_factory.mktemp("lively") / "target")
    folder = tmp_path_factory.mktemp("diagnose") / "healthy"
    return make_chain(folder, TargetModel(lively.path, "lively"), tokens, algorithm="lilicorr", lilicorr=OWN)


def result_of(chain: Chain) -> Mapping[str, Any]:
    """The diagnosis, even where tau is next to block_size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "CEILING", 2.0)
        return diagnosed(chain)


def test_no_cause_is_named_of_a_healthy_draft_and_its_tau_is_that_of_decoding_prompt_by_prompt(chain):
    found = result_of(chain)
    assert [] == causes(found)
    assert [] == [each["code"] for each in found["findings"] if each["level"] == UNMEASURED]
    loaded, draft, reader = Target.load(chain.target), load_draft(chain.draft.path), TokenReader(chain.judged, "test")
    answers = [decode_speculative(loaded, draft, reader.sample(index), NEW_TOKENS) for index in range(len(reader))]
    tau = sum(answer.generated for answer in answers) / sum(answer.steps for answer in answers)
    assert found["tau"]["exported"] == pytest.approx(tau)
    assert BLOCK / 2 < found["tau"]["exported"] == found["tau"]["corrected"]


def test_layer_ids_off_by_one_are_named_and_nothing_else(chain, tmp_path):
    found = result_of(with_config(chain, tmp_path / "draft", dflash_config={"target_layer_ids": [LAYER - 1]}))
    assert ["layer ids"] == causes(found)
    assert found["tau"]["exported"] < found["tau"]["corrected"]
