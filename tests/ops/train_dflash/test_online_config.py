"""Capture while training: what does not fit together is refused in the config, in the file and by the launch."""

import pytest
from online_cases import ONLINE

from dsl.errors import ConfigError, PipelineError
from dsl.op import Ref
from dsl.read_toml import read_graph
from ops.shard_sequence.op import ShardSequence
from ops.train_dflash.op import TrainDflash

STORED = {"batches": Ref("shard"), "target": Ref("target"), "features": Ref("capture")}


TO_THE_TARGET = """[pipeline]
name = "online"

[node.ingest]
op = "ingest"
source = "builtin:digits"

[node.inject]
op = "inject_images"
samples = "@ingest"

[node.tokenize]
op = "tokenize_chat"
samples = "@inject"

[node.target]
op = "finetune_vlm"
tokens = "@tokenize"
"""


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"batches": Ref("shard"), "target": Ref("target")},
            "features are missing: give the output of capture_targets",
        ),
        (ONLINE | {"features": Ref("capture")}, "makes the features itself: leave features out"),
        ({"batches": Ref("shard"), "target": Ref("target"), "capture": "online"}, '"online" needs tokens'),
        (STORED | {"capture_layers": 3}, "'capture_layers' needs capture = \"online\""),
        (STORED | {"target_layer_ids": (1, 2)}, "'target_layer_ids' needs capture"),
        (STORED | {"capture_dtype": "bfloat16"}, "'capture_dtype' needs capture"),
        (
            STORED | {"feature_dtype": "float8"},
            "'feature_dtype' needs capture = \"online\"; capture_targets decides it",
        ),
        (STORED | {"capture_batch_tokens": 64}, "'capture_batch_tokens' needs capture"),
        (
            ONLINE | {"capture_layers": 3, "target_layer_ids": (1, 2)},
            "'target_layer_ids' and capture_layers: give",
        ),
        (ONLINE | {"target_layer_ids": (2, 1)}, "must be ascending"),
        (ONLINE | {"buffer_batches": 0}, "buffer_batches: must be >= 1"),
    ],
)
def test_fields_of_the_capture_that_do_not_fit_are_refused_when_the_config_is_made(values, expected):
    with pytest.raises(ConfigError, match=expected):
        TrainDflash(**values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "both are missing"),
        ({"features": Ref("capture"), "tokens": Ref("tokenize")}, "both given: give features, or tokens"),
    ],
)
def test_a_plan_is_of_features_or_of_tokens(values, expected):
    with pytest.raises(ConfigError, match=expected):
        ShardSequence(**values)


def test_a_pipeline_file_shows_every_mistake_of_the_capture_at_its_key(tmp_path):
    file = tmp_path / "pipeline.toml"
    file.write_text(
        TO_THE_TARGET
        + """
[node.capture]
op = "capture_targets"
tokens = "@tokenize"
target = "@target"

[node.shard]
op = "shard_sequence"
features = "@capture"
tokens = "@tokenize"

[node.train]
op = "train_dflash"
batches = "@shard"
target = "@target"
features = "@capture"
capture = "online"

[node.other]
op = "train_dflash"
batches = "@shard"
target = "@target"
features = "@capture"
capture_dtype = "bfloat16"
launch = { kind = "ranks", pool = { workers = 2 } }
"""
    )
    with pytest.raises(PipelineError) as caught:
        read_graph(file)
    assert {"node.shard.features", "node.train.capture", "node.other.launch.pool", "node.other.capture_dtype"} == {
        mistake.path for mistake in caught.value.mistakes
    }


@pytest.mark.parametrize("places", [("capture_ranks = 2", ""), ("", ", pool = { workers = 2 }")])
def test_a_pool_is_accepted_and_a_file_of_its_old_spelling_is_refused_with_the_new_one(tmp_path, places):
    field, pool = places
    file = tmp_path / "pipeline.toml"
    file.write_text(f"""{TO_THE_TARGET}
[node.shard]
op = "shard_sequence"
tokens = "@tokenize"

[node.train]
op = "train_dflash"
batches = "@shard"
target = "@target"
tokens = "@tokenize"
capture = "online"
{field}
launch = {{ kind = "ranks", nproc = 6{pool} }}
""")
    if pool:
        assert 2 == read_graph(file).nodes["train"].launch.pool.workers
        return
    with pytest.raises(PipelineError) as caught:
        read_graph(file)
    [mistake] = caught.value.mistakes
    assert "node.train.capture_ranks" == mistake.path
    assert "launch.pool" in str(mistake)
    assert "nproc = 6, pool = { workers = 2 }" in str(mistake)
