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
        (STORED | {"capture_ranks": 1}, "'capture_ranks' needs capture"),
        (STORED | {"capture_batch_tokens": 64}, "'capture_batch_tokens' needs capture"),
        (
            ONLINE | {"capture_layers": 3, "target_layer_ids": (1, 2)},
            "'target_layer_ids' and capture_layers: give",
        ),
        (ONLINE | {"target_layer_ids": (2, 1)}, "must be ascending"),
        (ONLINE | {"capture_ranks": -1}, "capture_ranks: must be >= 0"),
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
capture_ranks = 2
capture_dtype = "bfloat16"
"""
    )
    with pytest.raises(PipelineError) as caught:
        read_graph(file)
    assert {"node.shard.features", "node.train.capture", "node.other.capture_ranks", "node.other.capture_dtype"} == {
        mistake.path for mistake in caught.value.mistakes
    }


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"nproc": 2}, "2 of 2 ranks leave none to train; set nproc of the launch to at least 3"),
        (
            {"nproc": 6, "sp_degree": 3},
            "2 of 6 ranks leave 4 to train, no multiple of sp_degree = 3; set capture_ranks to a multiple of it",
        ),
        ({"nproc": 6, "sp_degree": 2}, None),
        ({"nproc": 6, "hosts": 2}, "ranks that capture for others need the same machine; leave hosts at 1"),
    ],
)
def test_ranks_that_capture_are_checked_against_the_launch(launch, message):
    told = TrainDflash.launch_mistakes({"capture_ranks": 2}, launch)
    assert told == ({"capture_ranks": message} if message else {})
    assert TrainDflash.launch_mistakes({}, launch) == {}


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ('kind = "ranks", nproc = 2', "2 of 2 ranks leave none to train; "),
        ('kind = "ranks", nproc = 6, sp_degree = 3', "2 of 6 ranks leave 4 to train, no multiple of sp_degree = 3; "),
        ('kind = "ranks", nproc = 6, sp_degree = 2', None),
        ('kind = "ray", nproc = 6, hosts = 2', "ranks that capture for others need the same machine; "),
    ],
)
def test_ranks_that_do_not_suffice_are_refused_before_any_of_them_starts(tmp_path, launch, message):
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
capture_ranks = 2
launch = {{ {launch} }}
""")
    try:
        read_graph(file)
        told = {}
    except PipelineError as error:
        told = {each.path: each.what for each in error.mistakes}
    assert ["node.train.capture_ranks"] * bool(message) == list(told), told
    assert told.get("node.train.capture_ranks", "").startswith(message or "")
