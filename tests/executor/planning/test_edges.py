"""What a setting does to another node is refused by `dflow plan`, `run` and `resume` before any stage: one pipeline, a
changed setting, the field and the sentence.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow
import pytest
from family_checkpoints import make_checkpoint
from pyarrow import parquet

from executor.cli import main
from ops.train_dflash.conflicts import NO_VAL

PIPELINE = """
[pipeline]
name = "edges"
[mlflow]
tracking = false

[node.ingest]
op = "ingest"
source = "data.jsonl"
val_fraction = 0.3
test_fraction = 0.3

[node.inject]
op = "inject_images"
samples = "@ingest"

[node.target]
op = "load_target"
checkpoint = "target"

[node.other]                     # another target
op = "load_target"
checkpoint = "other"

[node.regenerate]
op = "regenerate_answers"
samples = "@inject"
target = "@target"

[node.tokenize]
op = "tokenize_chat"
samples = "@regenerate"
target = "@target"

[node.tokens2]                   # other tokens
op = "tokenize_chat"
samples = "@inject"
target = "@target"

[node.capture]
op = "capture_targets"
tokens = "@tokenize"
target = "@target"

[node.shard]
op = "shard_sequence"
features = "@capture"

[node.shard2]
op = "shard_sequence"
tokens = "@tokens2"

[node.train]
op = "train_dflash"
features = "@capture"
batches = "@shard"
target = "@target"
tokens = "@tokenize"
eval_every = 5

[node.online]
op = "train_dflash"
capture = "online"
tokens = "@tokens2"
batches = "@shard2"
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

[node.eval2]
op = "evaluate"
draft = "@export"
target = "@target"
tokens = "@tokens2"

[node.check]
op = "check_export"
draft = "@export"
target = "@target"
tokens = "@tokenize"
report = "@eval"

[node.again]
op = "train_dflash"
features = "@capture"
batches = "@shard"
target = "@target"
warm_start = "@export"
"""
ANSWER = "A square has four sides of one length, and each of its corners is a right angle, as everyone knows."
SAME_TARGET = "the target of another node, but the node's target is not that one"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edges")
    for name in ("target", "other"):
        make_checkpoint("qwen3", folder / name, num_key_value_heads=2)
    make_checkpoint("qwen3", folder / "small", num_key_value_heads=2, num_hidden_layers=4)
    make_checkpoint("qwen3_moe", folder / "tied", num_key_value_heads=2)
    make_checkpoint("qwen3", folder / "large", num_key_value_heads=2, vocab_size=500)
    answer = {"role": "assistant", "content": ANSWER}
    rows = [{"messages": [{"role": "user", "content": f"What is square {number}?"}, answer]} for number in range(12)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "pipeline.toml").write_text(PIPELINE)
    return folder


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str, command: str = "plan") -> list[str]:
    """The mistakes that a command shows."""
    settings = [argument for override in overrides for argument in ("-s", override)]
    code = main([command, str(folder / "pipeline.toml"), *settings, "--store", str(folder / "store")])
    shown = capsys.readouterr()
    lines = [line for line in (shown.out + shown.err).splitlines() if line.startswith("node.")]
    assert code == (2 if lines else 0), shown
    return lines


def test_the_pipeline_itself_is_planned(made, capsys):
    assert [] == refused(made, capsys)


ROWS = {
    "a loss with a teacher": (["train.loss=kl"], ("train.loss", 'loss = "kl" needs .*: set final_hidden = true')),
    "dspark": (
        ["train.algorithm=dspark"],
        ("train.algorithm", 'the loss of algorithm = "dspark" needs .* final_hidden'),
    ),
    "too many layers": (
        ["capture.num_layers=9"],
        ("capture.num_layers", "no 9 distinct layers .* set it to at most 5"),
    ),
    "a layer beyond the last": (["capture.target_layer_ids=[1, 9]"], ("capture.target_layer_ids", "9 is out of range")),
    "the last layer": (["capture.target_layer_ids=[1, 7]"], ("capture.target_layer_ids", "7 is the last of 8 layers")),
    "too many layers online": (["online.capture_layers=9"], ("online.capture_layers", "no 9 distinct layers")),
    "a layer beyond the last online": (["online.target_layer_ids=[3, 8]"], ("online.target_layer_ids", "8 is out of")),
    "eagle3": (
        ["capture.recipe=eagle3", "target.checkpoint=small", "other.checkpoint=small"],
        ("capture.recipe", "no three distinct layers"),
    ),
    "mask is EOS": (["target.mask_token_id=2"], ("target.mask_token_id", "2 is the pad or an EOS id of the target")),
    "mask is pad": (["target.mask_token_id=0"], ("target.mask_token_id", "0 is the pad or an EOS id of the target")),
    "mask beyond": (["target.mask_token_id=400"], ("target.mask_token_id", "400 is outside the vocabulary of 400")),
    "no val for tau": (
        ["ingest.val_fraction=0", "train.select=tau"],
        ("train.select", 'select = "tau" decodes prompts of the split val, which has none'),
    ),
    "no val for the loss": (
        ["ingest.val_fraction=0", "train.select=loss"],
        ("train.select", 'select = "loss" measures the split val'),
    ),
    "no val captured": (
        ['capture.splits=["train"]', "train.select=loss"],
        ("train.select", "capture the split val too"),
    ),
    "no val to measure": (
        ["ingest.val_fraction=0"],
        ("train.eval_every", "the split val, which has no samples: raise val_fraction"),
    ),
    "no test": (["ingest.test_fraction=0"], ("eval.split", 'the split "test" has no samples to evaluate')),
    "no train": (
        ["ingest.split=test"],
        ("tokenize.samples", "no sample is in the train split"),
        ("shard.features", "the split train has no samples"),
        ("train.features", "no sample in the split train"),
        ("online.tokens", "no sample in the split train"),
    ),
    "train not captured": (
        ['capture.splits=["val"]'],
        ("shard.features", "the split train has no samples"),
        ("train.features", "no sample in the split train"),
    ),
    "nothing to capture": (
        ["ingest.split=test", "tokenize.prompts_only=true"],
        ("capture.splits", "no samples in the splits train, val: nothing to capture"),
        ("regenerate.splits", "nothing to answer"),
    ),
    "prompts without answers": (["tokenize.prompts_only=true"], ("train.features", "prompts without answers")),
    "heads": (["train.num_heads=3"], ("train.num_heads", "3 is no multiple of num_key_value_heads = 2")),
    "kv heads": (
        ["train.num_kv_heads=4"],
        ("train.num_kv_heads", "num_attention_heads: 2 is no multiple of num_key_value_heads = 4"),
    ),
    "an odd head": (["train.head_dim=33"], ("train.head_dim", "head_dim = 33 must give an even number")),
    "thinking": (
        ["regenerate.enable_thinking=false"],
        ("tokenize.enable_thinking", "generated with false, and this node has null: give .* the same enable_thinking"),
    ),
    "answers shorter than those that are kept": (
        ["regenerate.max_new_tokens=16", "tokenize.train_on=last"],
        ("tokenize.min_loss_tokens", "at most 16 tokens .* samples with fewer than 32 are dropped: lower min_loss_tok"),
    ),
    "answers that are cut below those that are kept": (
        ["regenerate.max_answer_tokens=64", "tokenize.min_loss_tokens=65", "tokenize.train_on=last"],
        ("tokenize.min_loss_tokens", "at most 64 tokens .* samples with fewer than 65 are dropped"),
    ),
    "answers of another target": (
        ["regenerate.target=@other"],
        ("tokenize.target", "the answers are those of another target"),
    ),
    "context of the answers": (
        ["regenerate.max_new_tokens=2048"],
        ("regenerate.max_prompt_tokens", r"3072 \+ 2048 = 5120 tokens, and the target has 4096 positions"),
    ),
    "the sampling of a checkpoint that recommends none": (
        ["regenerate.sampling=checkpoint"],
        ("regenerate.sampling", "generation_config.json of the target is missing, or recommends no sampling"),
    ),
    "features of another target": (
        ["capture.target=@other"],
        ("train.features", "captured from the target of another node"),
    ),
    "features of other tokens": (
        ["train.tokens=@tokens2"],
        ("train.features", "captured from the tokens of another node"),
    ),
    "a plan of other features": (["train.batches=@shard2"], ("train.batches", "the plan was made for other features")),
    "a plan of other tokens": (["online.batches=@shard"], ("online.batches", "the plan was made for other tokens")),
    "exported for another target": (
        ["export.target=@other"],
        ("export.target", "this draft is trained for the target of another node; give train_dflash and export_draft"),
    ),
    "evaluated with another target": (
        ["eval.target=@other"],
        ("eval.draft", "this draft is trained for the target of another node"),
        ("check.report", "made with another target"),
    ),
    "evaluated with a target of other sizes": (
        ["eval.target=@other", "other.checkpoint=small"],
        ("eval.draft", "the draft does not fit the target: num_target_layers 8, and the target's is 4"),
    ),
    "tokens of another target": (
        ["tokens2.target=none", "tokens2.processor=large"],
        ("online.tokens", "the tokens do not fit the target: they need 500 embeddings, and the target has 400"),
        ("eval2.tokens", "the tokens do not fit the target: they need 500 embeddings"),
    ),
    "a gate that must serve what SGLang misreads": (
        ["check.target=@other", "other.checkpoint=tied", "check.live=required"],
        ("check.live", 'SGLang\'s Qwen3-MoE does not support a tied head.*; live = "auto" skips the stage'),
    ),
    "checked with another target": (
        ["check.target=@other"],
        ("check.target", "this draft is trained for the target of another node"),
    ),
    "a report of other prompts": (
        ["check.report=@eval2"],
        ("check.report", "this report was made with another tokens than this node reads"),
    ),
    "a format that cannot express it": (
        ['export.formats=["sglang", "speculators"]', "train.sliding_layers=[0]", "train.sliding_window=8"],
        ("export.formats", "speculators' format cannot express this draft"),
    ),
    "a block beyond the positions": (
        ["train.block_size=5000"],
        ("train.block_size", "5000 is more than the 4096 positions of the target"),
    ),
    "a window beyond the positions": (
        ["train.sliding_layers=[0]", "train.sliding_window=5000"],
        ("train.sliding_window", "5000 is more than the 4096 positions"),
    ),
    "val answers beyond the positions": (
        ["train.eval_new_tokens=4095"],
        ("train.eval_new_tokens", "no prompt fits beside 4095 tokens"),
    ),
    "answers beyond the positions": (
        ["eval.max_new_tokens=4095"],
        ("eval.max_new_tokens", "no prompt fits beside 4095 tokens"),
    ),
    "a warm start of another shape": (
        ["again.block_size=8", "again.num_layers=3"],
        ("again.warm_start", "block_size: 16 in the draft, 8 in this training"),
        ("again.warm_start", "num_hidden_layers: 5 in the draft, 3"),
    ),
    "a warm start of another algorithm": (
        ["train.algorithm=dflash2"],
        ("again.warm_start", "algorithm: dflash2 in the draft, dflash in this training"),
    ),
    "a warm start that would lose convolutions": (
        ["train.algorithm=dflash2", "again.algorithm=lilicorr", "capture.final_hidden=true"],
        ("again.warm_start", "set lilicorr.conv = true, lilicorr.taps = 2 and lilicorr.group = 16"),
    ),
    "no GPU": (["train.launch.device=cuda"], ("train.launch.device", "torch finds no GPU here")),
    "ranks that cannot share a sequence": (
        ["train.launch.kind=ranks", "train.launch.nproc=2", "train.launch.sp_degree=2", "shard.pad_multiple=1"],
        ("train", "sp_degree: 2 does not divide pad_multiple = 1"),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_plan_refuses(made, capsys, name):
    overrides, *expected = ROWS[name]
    found = refused(made, capsys, *overrides)
    print("\n".join(found))
    for field, sentence in expected:
        assert [line for line in found if re.match(rf"node\.{re.escape(field)}: .*{sentence}", line)], found


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["tokenize.train_on=last", "regenerate.history=data"],
        ["tokenize.train_on=last", 'regenerate.splits=["val"]'],
    ],
    ids=["all answers of a conversation", "a sample for each answer", "answers of the data"],
)
def test_short_answers_that_may_count_together_are_planned(made, capsys, overrides):
    assert [] == refused(made, capsys, "regenerate.max_new_tokens=16", *overrides)


@pytest.mark.parametrize("number", [0, 2, 400])
def test_a_wrong_mask_token_of_the_target_is_one_mistake(made, capsys, number):
    (line,) = refused(made, capsys, f"target.mask_token_id={number}")
    assert line.startswith("node.target.mask_token_id: ")


def test_a_split_that_rows_name_is_not_refused(made, capsys, tmp_path):
    rows = [json.loads(line) for line in (made / "data.jsonl").read_text().splitlines()]
    data = tmp_path / "own.jsonl"
    data.write_text("".join(json.dumps({**row, "split": "val"}) + "\n" for row in rows[:1]))
    with data.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows[1:])
    undrawn = ("ingest.val_fraction=0", "train.select=tau")
    assert [] == refused(made, capsys, f"ingest.source={data}", *undrawn)
    assert ["node.train.select"] == [line.partition(":")[0] for line in refused(made, capsys, *undrawn)]


def test_the_splits_of_rows_are_known_without_reading_the_images_beside_them(made, capsys, tmp_path):
    rows = [json.loads(line) for line in (made / "data.jsonl").read_text().splitlines()]
    table = pyarrow.Table.from_pylist([{**row, "split": "train", "image": {"bytes": b"an image"}} for row in rows])
    parquet.write_table(table, tmp_path / "own.parquet", compression="none", use_dictionary=False)
    columns = parquet.ParquetFile(tmp_path / "own.parquet").metadata.row_group(0)
    at = next(
        column.data_page_offset
        for column in map(columns.column, range(columns.num_columns))
        if column.path_in_schema == "image.bytes"
    )
    with (tmp_path / "own.parquet").open("r+b") as file:  # so that reading them would fail
        file.seek(at)
        file.write(b"\xff" * 8)
    (line,) = refused(
        made, capsys, f"ingest.source={tmp_path / 'own.parquet'}", "ingest.val_fraction=0", "train.select=tau"
    )
    assert f"node.train.select: {NO_VAL['tau']}" == line


def test_a_run_refuses_what_a_plan_does_and_what_the_store_holds_counts(made, capsys, tmp_path):
    rows = [json.loads(line) for line in (made / "data.jsonl").read_text().splitlines()]
    data = tmp_path / "own.jsonl"
    splits = ("train", "train", "test")
    data.write_text("".join(json.dumps({**row, "split": splits[i % 3]}) + "\n" for i, row in enumerate(rows)))
    own, chosen = f"ingest.source={data}", "train.select=tau"
    assert [] == refused(made, capsys, own, chosen)  # nobody has read the rows
    (wrong,) = refused(made, capsys, own, "train.loss=kl", command="run")
    assert wrong.startswith('node.train.loss: loss = "kl" needs the target\'s final hidden states')
    assert [] == list((made / "store").glob("records/*"))
    store = ["--store", str(made / "store")]
    assert 0 == main(["run", str(made / "pipeline.toml"), "--only", "ingest", "-s", own, *store])
    capsys.readouterr()
    assert [f"node.train.select: {NO_VAL['tau']}"] == refused(made, capsys, own, chosen)


def test_resume_refuses_it_too(tmp_path, capsys):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\nno row\n')  # a plan reads one row
    head, nodes = (
        PIPELINE[: PIPELINE.index("[node.target]")],
        "[node.tokenize]\nop = 'tokenize_chat'\nsamples = '@inject'",
    )
    (tmp_path / "short.toml").write_text(head + nodes)
    store = ["--store", str(tmp_path / "store")]
    assert 1 == main(["run", str(tmp_path / "short.toml"), *store])
    capsys.readouterr()
    assert 2 == main(["resume", "-s", "ingest.split=test", *store])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("node.tokenize.samples: no sample is in the train split: check split of ingest")
