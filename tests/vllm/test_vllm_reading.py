"""What vLLM's own code makes of the config.json of an export, in both formats: the draft that was trained."""

from __future__ import annotations

import pytest
import torch
from draft_chain import MASK, VOCAB
from draft_forms import IDS, LAYERS, SIZES, YARN
from elsewhere_cases import BEYOND_PLAIN, written_draft
from speculators_cases import SHAPES, written

from ops.lib.data.files import write_json
from ops.lib.drafts.backbone.config import SLIDING_ATTENTION, DraftConfig, to_serving
from ops.lib.drafts.backbone.rope import rope_frequencies, rotation
from ops.lib.drafts.backbone.speculators import unwritable
from ops.lib.drafts.dspark.config import Dspark

NATIVE_ONLY = {
    "some layers with windows": {"layer_types": (SLIDING_ATTENTION, "full_attention"), "sliding_window": 6},
    "a part of the heads": {"partial_rotary_factor": 0.5},
    "yarn on a part of the heads": {"partial_rotary_factor": 0.5, "rope_scaling": YARN},
}
CASES = [(name, form) for name in SHAPES for form in ("native", "speculators")]
CASES += [(name, "native") for name in NATIVE_ONLY]


@pytest.fixture
def read(tmp_path):
    """The config that vLLM's draft model is built from, and the draft's own."""

    def of(name, form):
        from vllm.transformers_utils.config import get_config
        from vllm.transformers_utils.configs.eagle import EAGLEConfig

        draft, _ = written(tmp_path / "export", **{**SHAPES, **NATIVE_ONLY}[name])
        directory = tmp_path / "export" / ("speculators" if form == "speculators" else "")
        config = get_config(str(directory), trust_remote_code=False)
        if form == "native":  # as vllm/config/speculative.py does
            config = EAGLEConfig(config, method="dflash", model_type="eagle")
        return draft, config

    return of


@pytest.mark.parametrize(("name", "form"), CASES)
def test_vllm_reads_sizes_layers_windows_and_causality(read, name, form):
    from vllm.model_executor.models.qwen3_dflash import _dflash_layer_causal, dflash_has_any_non_causal

    draft, config = read(name, form)
    assert ["DFlashDraftModel"] == config.architectures
    assert SIZES == {field: getattr(config, field) for field in SIZES}
    assert (draft.attention_bias, draft.rms_norm_eps, "silu") == (
        config.attention_bias,
        config.rms_norm_eps,
        config.hidden_act,
    )
    assert (MASK, list(IDS)) == tuple(config.dflash_config[field] for field in ("mask_token_id", "target_layer_ids"))
    assert not config.dflash_config.get("sample_from_anchor", False)
    assert VOCAB == (getattr(config, "draft_vocab_size", None) or config.vocab_size)
    causal = [layer == SLIDING_ATTENTION for layer in draft.layer_types]
    assert causal == [_dflash_layer_causal(config, layer) for layer in range(len(causal))]
    assert dflash_has_any_non_causal(config) is not all(causal)
    if draft.slides:
        assert (list(draft.layer_types), draft.sliding_window) == (list(config.layer_types), config.sliding_window)


@pytest.mark.parametrize(("name", "form"), CASES)
def test_vllm_captures_the_layers_of_the_training(read, name, form):
    """It counts from 1: its layer k is the input of the target's layer k."""
    from types import SimpleNamespace

    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    _draft, config = read(name, form)
    draft = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    assert tuple(layer + 1 for layer in IDS) == get_eagle3_aux_layers_from_config(draft)


@pytest.mark.parametrize(("name", "form"), CASES)
def test_vllm_rotates_as_the_training_did(read, name, form):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    draft, config = read(name, form)
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(draft.head_dim, config.max_position_embeddings, rope_parameters=config.rope_parameters)
    frequencies, scale = rope_frequencies(draft)
    cos, sin = rotation(frequencies, scale, torch.arange(100), torch.float32)
    half = draft.rotary_dim // 2
    expected = torch.cat((cos[:, 0, :half], sin[:, 0, :half]), dim=1)
    assert draft.rotary_dim == rope.rotary_dim
    assert (expected - rope.cos_sin_cache[:100].float()).abs().max() < 2e-6


def test_what_vllm_would_misread_in_the_format_of_speculators_is_what_export_refuses(tmp_path):
    for name, shape in NATIVE_ONLY.items():
        draft, _ = written(tmp_path / name, **shape)
        assert [] != list(unwritable(draft))


def test_vllm_reads_dspark_with_a_bias_of_zero(tmp_path):
    """As load_draft writes plain drafts whose slot 0 predicts a token, which vLLM refuses for DFlash."""
    from types import SimpleNamespace

    from vllm.transformers_utils.config import get_config
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    shape = {"block_size": 4, "mask_token_id": MASK, "target_layer_ids": IDS, "num_target_layers": LAYERS}
    draft = DraftConfig(**SIZES | shape, algorithm=Dspark(rank=1, confidence_head=False))
    write_json(tmp_path / "config.json", to_serving(draft))
    config = get_config(str(tmp_path), trust_remote_code=False)
    assert (["Qwen3DSparkModel"], 1, True, 3, MASK) == (
        config.architectures,
        config.markov_rank,
        config.sample_from_anchor,
        config.block_size,
        config.mask_token_id,
    )
    model = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    assert tuple(layer + 1 for layer in IDS) == get_eagle3_aux_layers_from_config(model)


@pytest.fixture
def read_beyond_plain(tmp_path):
    """The draft config that vLLM reads for a DFlash2 or DSpark draft, through its own speculative config."""

    def of(name, form):
        from vllm.transformers_utils.config import get_config
        from vllm.transformers_utils.configs.eagle import EAGLEConfig

        draft = written_draft(tmp_path / "export", BEYOND_PLAIN[name]).config
        config = get_config(str(tmp_path / "export" / ("speculators" if form == "speculators" else "")), False)
        if form == "native" and draft.algorithm.engine == "DFLASH":
            config = EAGLEConfig(config, method="dflash", model_type="eagle")
        return draft, config

    return of


BEYOND = [(name, form) for name in BEYOND_PLAIN for form in ("native", "speculators")]


@pytest.mark.parametrize(("name", "form"), BEYOND)
def test_vllm_reads_the_algorithm_its_sizes_and_its_layout(read_beyond_plain, name, form):
    from vllm.model_executor.models.qwen3_dflash import _dflash_layer_causal

    draft, config = read_beyond_plain(name, form)
    own = draft.algorithm
    assert [own.architecture] == config.architectures
    assert SIZES == {field: getattr(config, field) for field in SIZES}
    nested = config.dflash_config if own.engine == "DFLASH" else vars(config)
    assert {"mask_token_id": MASK, "target_layer_ids": list(IDS), **own.to_speculators()}.items() <= nested.items()
    # As vllm/v1/worker/gpu/spec_decode reads it: false for DFlash2, true by default for DSpark.
    from_anchor = nested.get("sample_from_anchor", own.engine == "DSPARK")
    assert (draft.layout().first == 0) is from_anchor
    assert not any(_dflash_layer_causal(config, layer) for layer in range(draft.num_hidden_layers))


@pytest.mark.parametrize(("name", "form"), BEYOND)
def test_vllm_captures_the_layers_that_the_algorithms_drafts_were_trained_on(read_beyond_plain, name, form):
    from types import SimpleNamespace

    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    _draft, config = read_beyond_plain(name, form)
    draft = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    assert tuple(layer + 1 for layer in IDS) == get_eagle3_aux_layers_from_config(draft)
