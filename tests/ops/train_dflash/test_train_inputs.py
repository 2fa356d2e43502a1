"""The draft's config from the target's, and inputs that do not belong together."""

from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
from draft_chain import EOS, MASK, PAD, TEXT, make_features, make_inputs, make_plan, make_target, train_config
from fake_stage import FakeStage

from dsl.errors import ConfigError, DataError
from dsl.read_toml import read_graph
from ops.artifacts import TokenShards
from ops.lib.data.files import read_json, write_json
from ops.lib.drafts.dflash2.config import Dflash2Options
from ops.train_dflash.inputs import draft_config, open_inputs
from ops.train_dflash.op import TrainDflash

FEATURES = {
    "mask_token_id": MASK,
    "target_layer_ids": [0, 2],
    "num_target_layers": 4,
    "positions": "sequential",
}


def test_the_draft_takes_its_shape_from_the_target(tmp_path):
    config = draft_config(train_config(num_layers=3), make_target(tmp_path / "target"), FEATURES)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 1, 8)
    assert (config.intermediate_size, config.vocab_size, config.hidden_size) == (32, 24, 16)
    assert (config.rope_theta, config.rope_scaling, config.partial_rotary_factor) == (5000.0, None, 1.0)
    assert (config.target_layer_ids, config.mask_token_id, config.num_target_layers) == ((0, 2), MASK, 4)
    assert config.layer_types == ("full_attention",) * 3


def test_fields_of_the_op_win_over_the_target(tmp_path):
    op = train_config(num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=48, rope_theta=1e6)
    config = draft_config(op, make_target(tmp_path / "target"), FEATURES)
    shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size)
    assert (*shape, config.rope_theta) == (4, 2, 16, 48, 1e6)


def test_sliding_layers_become_layer_types_with_a_window(tmp_path):
    op = train_config(num_layers=3, sliding_layers=(0, 2), sliding_window=64)
    config = draft_config(op, make_target(tmp_path / "target"), FEATURES)
    assert config.layer_types == ("sliding_attention", "full_attention", "sliding_attention")
    assert [config.window(layer) for layer in range(3)] == [64, None, 64]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_layers": (0, 2), "sliding_window": 64}, r"\[2\] outside 0\.\.1 \(num_layers\)"),
        ({"sliding_layers": (1,)}, "'sliding_layers' needs a sliding_window"),
        ({"sliding_window": 64}, "'sliding_window' needs sliding_layers"),
        ({"sliding_layers": (1,), "sliding_window": 1}, "sliding_window: must be >= 2, got 1"),
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads = 3 is no multiple of 2"),
        ({"num_kv_heads": 0}, "num_kv_heads: must be >= 1, got 0"),
        (
            {"schedule": "wsd", "warmup_ratio": 0.9, "decay_ratio": 0.5},
            "warmup_ratio = 0.9 and decay_ratio = 0.5 overlap",
        ),
    ],
)
def test_fields_that_do_not_fit_each_other_are_refused_when_the_config_is_made(changes, expected):
    with pytest.raises(ConfigError, match=expected):
        train_config(num_layers=2, **changes)


def test_sliding_layers_are_checked_as_far_as_the_other_fields_are_known():
    attribute = attrs.fields(TrainDflash).sliding_layers
    check, config = attribute.validator, SimpleNamespace(sliding_window=4)
    check(config, attribute, (5,))  # num_layers was given with a value that is no number
    with pytest.raises(ValueError, match=r"\[-1\] outside"):
        check(config, attribute, (-1, 5))


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.5}},
            (7, None, 1),
        ),
        ({"rope_theta": 8.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}}, (8, None, 1)),
        (
            {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0},
                "partial_rotary_factor": 0.25,
            },
            (9, {"rope_type": "linear", "factor": 2.0}, 1),
        ),
    ],
)
def test_rope_is_found_where_the_targets_family_keeps_it_and_whole_heads_are_rotated(tmp_path, rope, expected):
    text = {key: value for key, value in TEXT.items() if not key.startswith("rope")} | rope
    config = draft_config(train_config(), make_target(tmp_path / "target", text), FEATURES)
    assert (config.rope_theta, config.rope_scaling, config.partial_rotary_factor) == expected


def test_of_rope_that_differs_between_layers_that_of_the_full_ones_is_taken(tmp_path):
    text = TEXT | {"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}}
    assert 1.0 == draft_config(train_config(), make_target(tmp_path / "target", text), FEATURES).rope_theta


@pytest.mark.parametrize("mask_token_id", [EOS, PAD])
def test_a_mask_token_that_texts_produce_is_refused(tmp_path, mask_token_id):
    with pytest.raises(ConfigError, match="pad or an EOS id"):
        draft_config(train_config(), make_target(tmp_path / "target"), FEATURES | {"mask_token_id": mask_token_id})


def test_a_missing_mask_token_and_one_outside_the_vocabulary_are_refused(tmp_path):
    target = make_target(tmp_path / "target")
    with pytest.raises(ConfigError, match="set mask_token_id of train_dflash"):
        draft_config(train_config(), target, FEATURES | {"mask_token_id": None})
    with pytest.raises(ConfigError, match="99 is no id below vocab_size = 24"):
        draft_config(train_config(), target, FEATURES | {"mask_token_id": 99})


@pytest.mark.parametrize("of_target", [MASK, None, EOS])
def test_the_mask_token_is_a_setting_of_the_training(tmp_path, of_target):
    """Whatever the target's is, with which the features were captured."""
    target, features = make_target(tmp_path / "target"), FEATURES | {"mask_token_id": of_target}
    own = next(number for number in range(24) if number not in (MASK, EOS, PAD))
    assert own == draft_config(train_config(mask_token_id=own), target, features).mask_token_id
    for wrong in (EOS, PAD):
        with pytest.raises(ConfigError, match=f"mask_token_id {wrong} is the pad or an EOS id"):
            draft_config(train_config(mask_token_id=wrong), target, features)
    with pytest.raises(ConfigError, match="24 is no id below vocab_size = 24"):
        draft_config(train_config(mask_token_id=24), target, features)


def test_the_record_of_a_training_has_its_own_mask_token_and_the_features_stay_as_they_are(tmp_path):
    inputs = make_inputs(tmp_path)
    before = read_json(inputs["features"].path / "features.json")
    opened = open_inputs(train_config(mask_token_id=5), FakeStage(tmp_path / "stage", inputs))
    assert (5, 5) == (opened.draft.mask_token_id, opened.captured["mask_token_id"])
    assert MASK == before["mask_token_id"]
    assert MASK == open_inputs(train_config(), FakeStage(tmp_path / "other", inputs)).captured["mask_token_id"]


def test_another_mask_token_changes_no_node_above_the_training():
    file = Path(__file__).parents[3] / "pipelines" / "vlm_dflash.toml"
    before, after = (read_graph(file, changed) for changed in ([], ["train.mask_token_id=7"]))
    differing = [name for name in before.nodes if before.nodes[name].config != after.nodes[name].config]
    assert ["train"] == differing
    assert {"target", "regenerate", "tokenize", "capture", "shard"}.isdisjoint(after.below("train"))


def test_features_of_another_target_are_refused(tmp_path):
    inputs = make_inputs(tmp_path)
    other = make_target(tmp_path / "other", seed=1)
    with pytest.raises(DataError, match="captured from the target"):
        open_inputs(train_config(), FakeStage(tmp_path / "stage", inputs | {"target": other}))


@pytest.mark.parametrize("loss", ["kl", "l1", "lk", "nla"])
def test_a_distance_from_the_target_needs_its_final_hidden_states(tmp_path, loss):
    stage = FakeStage(tmp_path / "stage", make_inputs(tmp_path))
    with pytest.raises(DataError, match=f'loss = "{loss}" needs .* set final_hidden = true in capture_targets'):
        open_inputs(train_config(loss=loss), stage)


def test_a_selector_that_learns_the_targets_token_needs_its_final_hidden_states(tmp_path):
    stage = FakeStage(tmp_path / "stage", make_inputs(tmp_path))
    config = train_config(algorithm="dflash2", dflash2=Dflash2Options(label="target"))
    with pytest.raises(DataError, match=r'the loss of algorithm = "dflash2" needs .* set final_hidden = true'):
        open_inputs(config, stage)


def test_everything_about_features_that_does_not_fit_is_listed_at_once(tmp_path):
    inputs = make_inputs(tmp_path)
    write_json(
        inputs["features"].path / "features.json",
        read_json(inputs["features"].path / "features.json")
        | {"target": "x" * 64, "num_target_layers": 6, "target_layer_ids": [0, 3], "positions": "mrope"},
    )
    with pytest.raises(DataError) as caught:
        open_inputs(train_config(loss="kl"), FakeStage(tmp_path / "stage", inputs))
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert [line.split()[0].strip(":") for line in lines] == [
        "these",
        "num_target_layers",
        "target_layer_ids",
        "positions",
        "loss",
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"hidden_size": 8},
            r"float32 features of width 32, but features.json says float32 features of width 16 \(2 layers of 8\)",
        ),
        ({"target_layer_ids": [0, 1, 2]}, "features of width 32, but features.json says float32 features of width 48"),
        ({"dtype": "bfloat16"}, "float32 features of width 32, but features.json says bfloat16"),
    ],
)
def test_shards_that_are_not_what_features_json_says_are_refused(tmp_path, changes, expected):
    inputs = make_inputs(tmp_path)
    file = inputs["features"].path / "features.json"
    write_json(file, read_json(file) | changes)
    with pytest.raises(DataError, match=expected):
        open_inputs(train_config(), FakeStage(tmp_path / "stage", inputs))


def test_features_of_other_tokens_are_refused(tmp_path):
    (tmp_path / "tokens").mkdir()
    described = {"shards": [], "vocab_size": 24, "eos_token_ids": [EOS], "pad_token_id": PAD}
    write_json(tmp_path / "tokens" / "tokens.json", described)
    inputs = make_inputs(tmp_path) | {"tokens": TokenShards(path=tmp_path / "tokens", digest="u" * 64)}
    with pytest.raises(DataError, match="captured from the tokens"):
        open_inputs(train_config(), FakeStage(tmp_path / "stage", inputs))


def test_an_empty_training_set_is_refused(tmp_path):
    inputs = make_inputs(tmp_path)
    empty = make_features(tmp_path / "empty", inputs["target"], samples=0)
    with pytest.raises(DataError, match="no sample in the split train"):
        open_inputs(train_config(), FakeStage(tmp_path / "stage", inputs | {"features": empty}))
    with pytest.raises(DataError, match="nothing to train on"):
        make_plan(tmp_path / "plan2", empty)


def test_a_block_of_one_token_is_refused():
    with pytest.raises(ConfigError, match="block_size"):
        train_config(block_size=1)
