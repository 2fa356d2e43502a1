"""An own algorithm beside its reference: loss, gradients, proposals.

OWN_DRAFT: its folder; default: slot_bias. OWN_FIELDS: of its options.py, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from batch_cases import family_case
from draft_cases import random_case
from proposal_cases import PRECISION, assert_proposes_by_its_reference, draft_with_noise, favour_few_tokens
from step_cases import assert_equal_steps

from dsl.op_table import INIT, use_draft_folders
from ops.lib.drafts.algorithms import algorithm_class, own_options
from ops.lib.drafts.decoding.decode import decode_plain, decode_speculative
from ops.lib.drafts.decoding.decode_batch import DecodeSettings, decode_speculative_batch
from ops.lib.drafts.losses.loss import Loss
from ops.lib.drafts.own_config import try_config
from ops.lib.drafts.own_trial import Training, mistake_of

SLOT_BIAS = Path(__file__).parents[3] / "support" / "drafts" / "own_drafts" / "slot_bias"
FOLDER = Path(os.environ.get("OWN_DRAFT", SLOT_BIAS)).absolute()
DEFAULTS = '{"scale": 0.5, "penalty": 0.3}' if FOLDER == SLOT_BIAS else "{}"
FIELDS = json.loads(os.environ.get("OWN_FIELDS", DEFAULTS))


@pytest.fixture
def options(monkeypatch):
    """The options of the algorithm, None if it has none; no own algorithm is known before and after."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    use_draft_folders([FOLDER / INIT])
    cls = own_options(FOLDER.name)
    yield None if cls is None else cls(**FIELDS)
    use_draft_folders([])
    for name in {*sys.modules} - before:
        if name.partition(".")[0] == FOLDER.name:
            del sys.modules[name]


@pytest.fixture
def algorithm(options):
    return algorithm_class(FOLDER.name)(**({} if options is None else options.sizes()))


def test_its_files_have_what_is_looked_for(algorithm, options):
    sizes = {} if options is None else options.sizes()
    try_config(FOLDER.name)
    assert mistake_of(FOLDER, 5, 2, Training(fields=sizes, own=FIELDS)) == ""


@pytest.mark.parametrize("kind", ["dflash", "dpace", "kl", "l1"])
@pytest.mark.parametrize("seed", [3, 4])
def test_its_steps_equal_its_reference(algorithm, options, kind, seed):
    assert_equal_steps(random_case(seed, algorithm=algorithm), Loss(kind=kind, own=options))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", PRECISION)
def test_every_proposed_token_has_the_references_best_score(algorithm, rows, dtype):
    assert_proposes_by_its_reference(draft_with_noise(algorithm), rows, dtype)


def test_it_decodes_in_batches_as_in_the_slow_loop(algorithm, tmp_path):
    target, samples = family_case("qwen3_vl", tmp_path)
    favour_few_tokens(target)
    draft = draft_with_noise(algorithm)
    slow = [decode_speculative(target, draft, sample, 8) for sample in samples]
    fast = decode_speculative_batch(target, draft, samples, DecodeSettings(8))
    assert [(one.tokens, one.accepted) for one in slow] == [(one.tokens, one.accepted) for one in fast]
    assert [decode_plain(target, sample, 8).tokens for sample in samples] == [one.tokens for one in slow]
    if FOLDER == SLOT_BIAS:  # another draft may guess none of them
        assert len({count for one in slow for count in one.accepted}) > 1
