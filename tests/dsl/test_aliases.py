"""Names of other projects in place of ours: each is answered by the right field and node, and by no other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from dsl.aliases import MOST_OF_KEYS, key_hint, nearest_key
from dsl.check import LAUNCH_FIELDS
from dsl.errors import ConfigError, PipelineError, known_nodes, listed
from dsl.launch import FIELDS
from dsl.op_table import all_ops
from dsl.read_toml import read_graph
from ops.aliases import ALIASES, BY_NAMES
from ops.train_dflash.op import TrainDflash

PIPELINE = """[pipeline]
name = "p"
[node.ingest]
op = "ingest"
source = "builtin:digits"
[node.images]
op = "inject_images"
samples = "@ingest"
[node.tokenize]
op = "tokenize_chat"
samples = "@images"
[node.target]
op = "finetune_vlm"
tokens = "@tokenize"
[node.regenerate]
op = "regenerate_answers"
samples = "@images"
target = "@target"
[node.capture]
op = "capture_targets"
tokens = "@tokenize"
target = "@target"
[node.shard]
op = "shard_sequence"
features = "@capture"
[node.train]
op = "train_dflash"
features = "@capture"
batches = "@shard"
target = "@target"
[node.export]
op = "export_draft"
draft = "@train"
target = "@target"
[node.eval]
op = "evaluate"
draft = "@export"
target = "@target"
tokens = "@tokenize"
"""
HERE, NONE = 'here it is "{}"', "dflow has no such setting"
TYPED = [  # where and what was typed, and how the answer begins: a field of that node, or of which other one, or none
    ("train.save_steps", HERE.format("checkpoint_every")),
    ("train.save_interval", HERE.format("checkpoint_every")),
    ("target.save_freq", HERE.format("checkpoint_every")),
    ("shard.save_steps", 'it is "checkpoint_every" of train_dflash: node.train.checkpoint_every'),
    ("train.eval_steps", HERE.format("eval_every")),
    ("train.eval_interval", HERE.format("eval_every")),
    ("target.test_freq", HERE.format("eval_every")),
    ("train.logging_steps", HERE.format("log_every")),
    ("train.log-interval", HERE.format("log_every")),
    ("train.num_train_epochs", 'it is "epochs" of shard_sequence: node.shard.epochs'),
    ("train.epochs", 'it is "epochs" of shard_sequence: node.shard.epochs'),
    ("shard.total_epochs", HERE.format("epochs")),
    ("target.num_epochs", HERE.format("steps")),
    ("target.max_steps", HERE.format("steps")),
    ("train.batch_size", 'it is "tokens_per_step" of shard_sequence: node.shard.tokens_per_step'),
    ("shard.batch_size", HERE.format("tokens_per_step")),
    ("shard.train_batch_size", HERE.format("tokens_per_step")),
    ("capture.batch_size", HERE.format("batch_tokens")),
    ("train.per_device_train_batch_size", HERE.format("micro_batch_tokens")),
    ("target.micro_batch_size_per_gpu", HERE.format("micro_batch_tokens")),
    ("train.gradient_accumulation_steps", HERE.format("micro_batch_tokens")),
    ("train.learning_rate", HERE.format("lr")),
    ("train.learningRate", HERE.format("lr")),
    ("capture.learning_rate", 'it is "lr" of train_dflash: node.train.lr'),
    ("train.lr_scheduler_type", HERE.format("schedule")),
    ("train.warmup_steps", HERE.format("warmup_ratio")),
    ("train.max_grad_norm", HERE.format("grad_clip")),
    ("target.clip_grad", HERE.format("grad_clip")),
    ("train.adam_beta2", NONE),
    ("train.bf16", HERE.format("dtype")),
    ("capture.torch_dtype", HERE.format("dtype")),
    ("train.save_total_limit", HERE.format("keep_checkpoints")),
    ("train.load_best_model_at_end", HERE.format("select")),
    ("train.output_dir", NONE),
    ("train.resume_from_checkpoint", NONE),
    ("train.num_speculative_tokens", HERE.format("block_size")),
    ("eval.speculative_num_draft_tokens", HERE.format("block_size")),
    ("export.num_speculative_tokens", 'it is "block_size" of train_dflash: node.train.block_size'),
    ("train.speculative_eagle_topk", NONE),
    ("train.ttt_steps", NONE),
    ("train.num_hidden_layers", HERE.format("num_layers")),
    ("train.max_anchors", HERE.format("num_anchors")),
    ("train.loss_decay_gamma", HERE.format("gamma")),
    ("train.draft_vocab_size", NONE),
    ("ingest.dataset", HERE.format("source")),
    ("tokenize.data_path", 'it is "source" of ingest: node.ingest.source'),
    ("tokenize.max_seq_length", HERE.format("max_length")),
    ("train.max_length", 'it is "max_length" of tokenize_chat: node.tokenize.max_length'),
    ("train.model_name_or_path", 'it is "init" of finetune_vlm: node.target.init'),
    ("target.model_name_or_path", HERE.format("init")),
    ("tokenize.num_proc", HERE.format("workers")),
    ("regenerate.top_k", HERE.format("extra_body")),
    ("eval.top_k", 'it is "extra_body" of regenerate_answers: node.regenerate.extra_body'),
    ("eval.max_tokens", HERE.format("max_new_tokens")),
    ("capture.tensor_parallel_size", HERE.format("tp_degree")),
    ("train.nproc_per_node", 'it is "launch.nproc"'),
    ("train.launch.num_gpus", HERE.format("nproc")),
    ("train.launch.learning_rate", 'it is "lr" of train_dflash: node.train.lr'),
    ("train.ulysses_sequence_parallel_size", 'it is "launch.sp_degree"'),
    ("train.wandb_project", 'it is "experiment" of [mlflow]'),
    ("mlflow.experiment_name", HERE.format("experiment")),
    ("machine.num_gpus", HERE.format("gpus")),
    ("machine.nproc_per_node", HERE.format("gpus")),
    ("pipeline.world_size", 'it is "launch.nproc" of a node'),
]


def written(place: str, value: str = "1") -> str:
    """The pipeline with one more key, "node.key" or "table.key"."""
    owner, _, key = place.partition(".")
    if owner in FIELDS:
        text = PIPELINE if owner == "pipeline" else f"{PIPELINE}[{owner}]\n"
        return text.replace(f"[{owner}]\n", f"[{owner}]\n{key} = {value}\n")
    return PIPELINE.replace(f"[node.{owner}]\n", f"[node.{owner}]\n{key} = {value}\n")


def mistakes(file: Path, *overrides: str) -> list[str]:
    with pytest.raises(PipelineError) as caught:
        read_graph(file, overrides)
    return str(caught.value).split("\n")


@pytest.mark.parametrize(("place", "answer"), TYPED, ids=[place for place, _ in TYPED])
def test_a_name_of_another_project_is_answered_by_the_right_field_and_node(
    tmp_path: Path, place: str, answer: str
) -> None:
    file = tmp_path / "p.toml"
    file.write_text(written(place))
    (in_file,) = mistakes(file)
    assert f"unknown key ({answer}" in in_file and "did you mean" not in in_file
    file.write_text(PIPELINE)
    (argument,) = mistakes(file, f"{place}=1")
    assert argument.startswith(f"-s {place}=1: unknown key ({answer}")


def all_fields() -> dict[str, set[str]]:
    fields = {name: {*op.edges, *op.all_fields} for name, op in all_ops().items()}
    return fields | {name: set(table) for name, table in FIELDS.items()} | {"launch": set(LAUNCH_FIELDS)}


def test_every_field_that_the_table_names_exists() -> None:
    fields = all_fields()
    places = [place.partition(".") for answer in ALIASES.values() if isinstance(answer, dict) for place in answer]
    assert [] == [(owner, key) for owner, _, key in places if key not in fields.get(owner, ())]


def test_every_field_that_a_remark_names_exists() -> None:
    fields = {name: {*op.edges, *op.fields} for name, op in all_ops().items()}
    remarks = [
        text for answer in ALIASES.values() for text in ([answer] if isinstance(answer, str) else answer.values())
    ]
    named = [found.groups() for remark in remarks for found in re.finditer(r"(\w+) of (\w+_\w+)\b", remark)]
    assert len(named) >= 10
    assert [] == [(key, op) for key, op in named if key not in {*fields[op], "that"}]


def test_a_name_stands_once_in_the_table() -> None:
    names = Counter(re.sub("[_-]", "", name).lower() for names in BY_NAMES for name in names.split())
    assert [] == [name for name, count in names.items() if count > 1]


def test_a_name_of_the_table_is_never_answered_by_spelling() -> None:
    ops = all_ops()
    answered = 0
    for name, answer in ALIASES.items():
        for op in ops.values():
            keys = [*op.edges, *op.fields]
            if name not in keys:
                hint = key_hint(name, op.name, keys, {})
                assert f"{op.name}.{hint.key}" in answer or hint.key == ""
                assert not hint.text.startswith(("did you mean", "keys: "))
                answered += 1
    assert answered > 1000


def test_a_copy_is_named_as_in_the_file_and_two_nodes_of_an_op_are_both_named(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    second = '[node.again]\nop = "shard_sequence"\nfeatures = "@capture"\n[sweep]\nshard.epochs = [1, 2]\n'
    file.write_text(written("train.num_train_epochs") + second)
    (mistake,) = mistakes(file)
    hint = 'it is "epochs" of shard_sequence: node.shard.epochs, node.again.epochs'
    assert mistake.endswith(f": node.train.num_train_epochs: unknown key ({hint})")


def test_without_a_node_of_the_op_the_op_is_named(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(PIPELINE.partition("[node.images]")[0] + "learning_rate = 1e-4\n")
    (mistake,) = mistakes(file)
    assert mistake.endswith('node.ingest.learning_rate: unknown key (it is "lr" of train_dflash)')


def test_a_required_key_under_another_name_is_one_mistake(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(PIPELINE.replace('source = "builtin', 'dataset = "builtin'))
    (mistake,) = mistakes(file)
    assert 'unknown key (here it is "source"; a file or a folder)' in mistake


def test_a_name_outside_the_nodes_and_one_in_a_reference_are_answered_too(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text("learning_rate = 1e-3\n" + written("train.weight_decay", '"${target.learning_rate}"'))
    outside, reference = mistakes(file)
    assert outside.endswith(':1:1: learning_rate: unknown key (it is "lr" of train_dflash: node.train.lr)')
    assert reference.endswith('node "target" has no field "learning_rate" (here it is "lr")')
    file.write_text(written("train.lr", '"${train.' + "a" * 2000 + '}"'))
    (long,) = mistakes(file)
    assert "aa ... aa" in long and len(long) < 1500
    file.write_text(PIPELINE)
    assert mistakes(file, "learning_rate=1", "train.optim.lr=1", "zzz=1") == [
        '-s learning_rate=1: expected node.field=value (it is "lr" of train_dflash)',
        "-s zzz=1: expected node.field=value",
        '-s train.optim.lr=1: train.optim: unknown key (here it is "optimizer"; "adamw" or "muon")',
    ]


def test_a_config_made_in_python_names_all_its_unknown_keys_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainDflash(batches="@shard", target="@target", save_steps=10, num_epochs=2, warmup_ration=0.1, lr="x")
    assert str(caught.value).split("\n") == [
        'train_dflash.save_steps: unknown key (here it is "checkpoint_every"; in optimizer steps)',
        'train_dflash.num_epochs: unknown key (it is "epochs" of shard_sequence)',
        'train_dflash.warmup_ration: unknown key (did you mean "warmup_ratio"?)',
        'train_dflash.lr: expected float, got "x"',
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("max_stesp", "max_steps"),
        ("grad_clips", "grad_clip"),
        ("evalevery", "eval_every"),
        ("target_layers", "target_layer_ids"),
        ("warmup", "warmup_ratio"),
        ("val_steps", None),  # not max_steps, which would end the training
        ("min_steps", None),
        ("bunch_size", None),  # not block_size
        ("layers", None),  # num_layers, sliding_layers and capture_layers
        ("keep_lr", None),
    ],
)
def test_a_key_is_proposed_only_where_all_words_are_near(name: str, expected: str | None) -> None:
    assert expected == nearest_key(name, [*all_ops()["train_dflash"].fields])


def test_the_keys_of_every_op_and_of_launch_are_listed_whole() -> None:
    tables = [[*op.edges, *op.fields] for op in all_ops().values()]
    for keys in [*tables, [*LAUNCH_FIELDS]]:
        assert f"keys: {', '.join(keys)}" == key_hint("zzz", "", keys, {}).text


def test_a_list_that_is_too_long_ends_after_a_name_with_the_number_of_the_others() -> None:
    names = [f"key_{number}" for number in range(2000)]
    hint = key_hint("zzz", "", names, {}).text
    shown, _, more = hint.removeprefix("keys: ").rpartition(" and ")
    count = len(shown.split(", "))
    assert names[:count] == shown.split(", ") and f"{2000 - count:,} more" == more
    assert MOST_OF_KEYS - len(", key_1000") < len(shown) <= MOST_OF_KEYS
    assert "a, b" == listed("ab", 4) and "a and 1 more" == listed("ab", 3)
    assert "" == listed([], 3)
    nodes = [f"node-of-a-sweep-{number}" for number in range(100, 1100)]
    assert f"nodes: {', '.join(nodes[:7])} and 993 more" == known_nodes("zzz", nodes)
    assert "xx ... xx" == listed(["x" * 50], 9)


def test_no_name_without_a_setting_is_that_of_a_field() -> None:
    fields = {name for op in all_ops().values() for name in op.fields} | {*LAUNCH_FIELDS}
    assert [] == [name for name, answer in ALIASES.items() if isinstance(answer, str) and name in fields]


def test_a_chat_template_goes_where_the_target_or_the_tokens_come_from() -> None:
    target = key_hint("chat_template", "train_dflash", ["lr"], {"m": "load_target", "t": "tokenize_chat"}).text
    assert target.startswith('it is "chat_template" of load_target: node.m.chat_template; a file')
    tokens = key_hint("chat-template", "train_dflash", ["lr"], {"t": "tokenize_chat"}).text
    assert tokens.startswith('it is "chat_template" of tokenize_chat: node.t.chat_template; a file')


def test_the_name_of_a_run_is_an_option_and_no_setting() -> None:
    for name in ("run_name", "run_id"):
        assert key_hint(name, "pipeline", ["name", "seed"], {}).text == (
            "dflow has no such setting: a run is named where it is started: dflow run FILE --name TEXT; its id is made "
            "by dflow"
        )


def test_the_page_for_those_who_come_from_elsewhere_says_what_the_table_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text()
    _, *sections = page.partition("## transformers")[1:]
    rows = re.findall(r"^\| (.*`.*) \| (`\w+(?:\.\w+)+`|none) \|", "".join(sections), re.MULTILINE)
    said = [(name, place.strip("`")) for names, place in rows for name in re.findall(r"`(\w+)`", names)]
    assert len(said) >= 140
    assert len([name for name, _ in said if name in ALIASES]) >= 60
    wrong = [(name, place) for name, place in said if name in ALIASES and not agrees(place, ALIASES[name])]
    assert [] == wrong


def agrees(place: str, answer: Mapping[str, str] | str) -> bool:
    return place == "none" if isinstance(answer, str) else place in answer


def test_every_field_that_the_page_names_exists() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text()
    places = re.findall(r"\| `(\w+)\.(\w+)` \|", page)
    fields = all_fields()
    assert len(places) >= 100
    assert [] == [(owner, key) for owner, key in places if key not in fields.get(owner, ())]
