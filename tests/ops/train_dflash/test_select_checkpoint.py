"""Measuring tau while a draft trains, and which step's weights are exported by it."""

import multiprocessing
import os
import shutil

import pytest
import torch
import torch.multiprocessing as mp
from attrs import define, field
from draft_chain import EOS, PAD, VOCAB, make_inputs, train_config
from fake_stage import FakeStage, folder_digest
from meeting import meeting
from safetensors.torch import load_file

from dsl.errors import ConfigError, DataError, StopRequested
from dsl.op import Ref
from ops.artifacts import BatchPlan, TokenShards
from ops.lib.data.files import read_json, read_jsonl, write_json, write_jsonl
from ops.lib.data.token_shards import TokenReader
from ops.lib.drafts.backbone.config import from_serving
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.decode import decode_speculative
from ops.lib.target.model import Target, text_config
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.train_dflash import measuring, result
from ops.train_dflash.answers import Answer
from ops.train_dflash.measuring import Measuring, ShortEvaluation
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash
from ops.train_dflash.tally import LOSS, WEIGHT, new_tally

STEPS, EVERY = 8, 2
TAUS = {2: 2.0, 4: 2.5, 6: 5.0, 8: 3.0}
LOSSES = {2: 3.0, 4: 1.0, 6: 2.0, 8: 4.0}
SELECTED = {"tau": 6, "loss": 4, "last": 8}


@define
class Dictated:
    """Measures what the table says for the step of a stage, and keeps the weights that it was given."""

    stage: FakeStage
    weights: dict[int, dict[str, torch.Tensor]] = field(factory=dict)

    @property
    def step(self):
        return min(self.stage.progressed[-1][0] + 1, STEPS)

    def measure(self, model):
        self.weights[self.step] = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        tau = TAUS[self.step]
        figures = {"tau": tau, "low": tau - 1, "high": tau + 1, "prompts": 2, "steps": 4, "generated": 12}
        return {"all": figures, "text": figures}, [Answer("a", "text", 12, 4)]

    def tally(self, _engine, stream, _ahead):
        tally = new_tally(stream.draft.block_size, ())
        tally[LOSS], tally[WEIGHT] = LOSSES[self.step], 1
        return tally


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    shards = [{"split": split, "tokens": 9} for split in ("train", "val")]
    described = {"shards": shards, "vocab_size": VOCAB, "eos_token_ids": [EOS], "pad_token_id": PAD}
    write_json(folder / "tokens.json", described)
    return make_inputs(folder) | {"tokens": TokenShards(folder, "t" * 64)}


@pytest.fixture
def dictated_training(synthetic, tmp_path, monkeypatch):
    """Trains in a folder below tmp_path with dictated measures: (stage, what was dictated)."""

    def train(name, stop_after=None, **changes):
        stage = FakeStage(tmp_path / name, synthetic, stop_after=stop_after)
        dictated = Dictated(stage)
        monkeypatch.setattr(ShortEvaluation, "open", lambda *_: dictated)
        monkeypatch.setattr(measuring, "measure", dictated.tally)
        options = {"tokens": Ref("tokens"), "max_steps": STEPS, "eval_every": EVERY, "lr": 1e-2, **changes}
        train_dflash(train_config(**options), stage)
        return stage, dictated

    return train


@pytest.mark.parametrize("ema_decay", [None, 0.5])
@pytest.mark.parametrize("select", ["tau", "loss", "last"])
def test_the_selected_step_gives_the_draft(dictated_training, select, ema_decay):
    stage, dictated = dictated_training("train", select=select, ema_decay=ema_decay, keep_checkpoints=1)
    step = SELECTED[select]
    weights = load_file(stage.out_dir / "model.safetensors")
    assert weights.keys() == dictated.weights[step].keys()
    assert all(torch.equal(weight, dictated.weights[step][name]) for name, weight in weights.items())
    assert not torch.equal(weights["fc.weight"], dictated.weights[2]["fc.weight"])
    training = read_json(stage.out_dir / "training.json")
    assert (step, STEPS) == (training["selected_step"], training["steps"])
    assert TAUS == {row["step"]: row["tau"]["all"]["tau"] for row in training["measured"]}
    assert LOSSES == {row["step"]: row["loss"] for row in training["measured"]}
    assert (TAUS[step], LOSSES[step]) == (training["val_metrics"]["val/tau"], training["val_metrics"]["val/loss"])


def test_the_record_has_the_figures_of_the_training_at_the_selected_step_too(dictated_training, monkeypatch):
    monkeypatch.setattr(result, "window", lambda history, val_tokens: 1)
    stage, _ = dictated_training("train", select="tau", log_every=1)
    training = read_json(stage.out_dir / "training.json")
    logged = {step: metrics for metrics, step in stage.logged if "train/loss" in metrics}
    assert [1, 1] == [training["selected_steps"], training["final_steps"]]
    for name, step in (("selected_metrics", SELECTED["tau"]), ("final_metrics", STEPS)):
        assert training[name] == {metric: logged[step][metric] for metric in training[name]}
    assert training["selected_metrics"] != training["final_metrics"]


def test_tau_is_logged_over_steps_with_its_interval_and_by_category(dictated_training):
    stage, _ = dictated_training("train", select="tau")
    logged = {step: metrics for metrics, step in stage.logged if "val/tau" in metrics}
    assert TAUS == {step: metrics["val/tau"] for step, metrics in logged.items()}
    assert (1.5, 3.5) == (logged[4]["val/tau_low"], logged[4]["val/tau_high"])
    assert (2.5, 1.5, 3.5) == tuple(logged[4][f"val/tau_text{end}"] for end in ("", "_low", "_high"))
    assert 0 < logged[8]["val/time_share"] < 1
    assert ([6.0], [5.0], [2.0]) == tuple(stage.metric(f"val/selected_{name}") for name in ("step", "tau", "loss"))
    measurements = read_json(stage.out_dir / "measurements.json")
    assert measurements["measuring_seconds"] / measurements["seconds"] == measurements["measuring_share"]
    axes = stage.figures["tau"].axes[0]
    assert [2, 4, 6, 8] == list(axes.lines[0].get_xdata())
    assert ([6], [5.0]) == (list(axes.lines[1].get_xdata()), list(axes.lines[1].get_ydata()))


@pytest.mark.parametrize("select", ["tau", "loss"])
@pytest.mark.parametrize("stop_after", [5, 7])
def test_a_stopped_training_selects_the_same_step_and_gives_the_same_bytes(dictated_training, select, stop_after):
    """Before the best step and behind it, where only the kept checkpoint still has its weights."""
    options = {"select": select, "keep_checkpoints": 1, "checkpoint_every": 1}
    whole, _ = dictated_training("whole", **options)
    with pytest.raises(StopRequested):
        dictated_training("resumed", stop_after=stop_after, **options)
    resumed, _ = dictated_training("resumed", **options)
    assert (stop_after, STEPS) == resumed.progressed[0]
    assert SELECTED[select] == read_json(resumed.out_dir / "training.json")["selected_step"]
    assert folder_digest(whole.out_dir) == folder_digest(resumed.out_dir)


def test_of_equal_steps_the_earlier_is_selected_and_the_last_one_is_measured_out_of_turn(
    dictated_training, monkeypatch
):
    monkeypatch.setitem(TAUS, 3, 5.0)
    monkeypatch.setitem(LOSSES, 3, 1.0)
    stage, _ = dictated_training("train", select="tau", eval_every=3)
    training = read_json(stage.out_dir / "training.json")
    assert [3, 6, 8] == [row["step"] for row in training["measured"]]
    assert 3 == training["selected_step"]


@pytest.fixture(scope="module")
def real(tokens, target, features, tmp_path_factory):
    """A target that decodes: artifacts by field, with stored features."""
    stage = FakeStage(tmp_path_factory.mktemp("plan"), {"features": features})
    shard_sequence(ShardSequence(features=Ref("features"), tokens_per_step=320, epochs=1, seed=0), stage)
    return {"tokens": tokens, "target": target, "features": features, "batches": stage.artifact(BatchPlan)}


def config_of(inputs, **changes):
    values = {"block_size": 6, "num_layers": 1, "num_anchors": 4, "lr": 1e-3, "seed": 0, "max_steps": 6, "log_every": 1}
    capture = {} if "features" in inputs else {"capture": "online"}
    return TrainDflash(**{name: Ref(name) for name in inputs}, **values | capture | changes)


def train_real(folder, inputs, **changes):
    stage = FakeStage(folder, inputs)
    train_dflash(config_of(inputs, **changes), stage)
    return stage


MEASURED = {"eval_every": 2, "eval_prompts": 6, "eval_new_tokens": 10}


@pytest.fixture(scope="module")
def measured(real, tmp_path_factory):
    return train_real(tmp_path_factory.mktemp("measured"), real, dtype="float64", select="tau", **MEASURED)


def test_tau_is_that_of_real_speculative_decoding_of_val_prompts_spread_over_the_split(real, measured):
    training = read_json(measured.out_dir / "training.json")
    draft = DraftModel(from_serving(read_json(measured.out_dir / "config.json")))
    draft.load_state_dict(load_file(measured.out_dir / "model.safetensors"))
    draft = draft.double().eval()
    target, reader = Target.load(real["target"]), TokenReader(real["tokens"], "val")
    steps = {"image": 0, "text": 0}
    generated, prompts = dict(steps), dict(steps)
    places = {kind: [place for place, row in enumerate(reader.records) if row["category"] == kind] for kind in steps}
    counts = {kind: min(6, len(each)) for kind, each in places.items()}
    for category, place in (
        (kind, each[number * len(each) // counts[kind]])
        for kind, each in places.items()
        for number in range(counts[kind])
    ):
        answer = decode_speculative(target, draft, reader.sample(place), 10)
        steps[category] += answer.steps
        generated[category] += answer.generated
        prompts[category] += 1
    row = next(row for row in training["measured"] if row["step"] == training["selected_step"])["tau"]
    for category in ("image", "text"):
        expected = (prompts[category], steps[category], generated[category])
        assert expected == tuple(row[category][name] for name in ("prompts", "steps", "generated"))
    assert row["all"]["tau"] == sum(generated.values()) / sum(steps.values())
    assert row["all"]["low"] <= row["all"]["tau"] <= row["all"]["high"]


@pytest.mark.parametrize("capture", ["stored", "online"])
def test_measuring_changes_no_loss_no_weight_and_no_random_state(real, tmp_path, capture):
    inputs = {name: made for name, made in real.items() if capture == "stored" or name != "features"}
    plain = train_real(tmp_path / "plain", inputs, max_steps=4)
    measured = train_real(tmp_path / "measured", inputs, max_steps=4, eval_every=1, eval_prompts=1, eval_new_tokens=4)
    assert 4 == len(measured.metric("val/tau"))
    assert plain.metric("train/loss") == measured.metric("train/loss")
    expected = load_file(plain.out_dir / "model.safetensors")
    for name, weight in load_file(measured.out_dir / "model.safetensors").items():
        assert torch.equal(expected[name], weight)


def one_of_two(rank, inputs, folder, place):
    torch.set_num_threads(1)
    os.environ |= {**place, "RANK": str(rank)}
    chosen, select = [], Measuring.selected

    def selected(self):
        chosen.append(select(self))
        return chosen[-1]

    Measuring.selected = selected
    stage = FakeStage(folder, inputs, rank=rank, world_size=2)
    train_dflash(config_of(inputs, dtype="float64", select="tau", **MEASURED), stage)
    write_json(folder / f"rank-{rank}.json", {"selected": chosen})


def test_two_ranks_measure_and_choose_what_one_process_does(real, measured, tmp_path):
    # The server imports torch once for both ranks; it never computes, so forking it is safe.
    multiprocessing.set_forkserver_preload(["ops.train_dflash.run"])
    with meeting(2) as place:
        mp.start_processes(one_of_two, (real, tmp_path, place), nprocs=2, start_method="forkserver")
    expected = read_json(measured.out_dir / "training.json")
    got = read_json(tmp_path / "out" / "training.json")
    assert [row["tau"] for row in expected["measured"]] == [row["tau"] for row in got["measured"]]
    for rank in (0, 1):
        assert {"selected": [expected["selected_step"]]} == read_json(tmp_path / f"rank-{rank}.json")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in load_file(measured.out_dir / "model.safetensors").items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-6)


def test_an_empty_val_split_to_choose_by_is_refused_and_else_passed_over(real, tmp_path):
    folder = tmp_path / "tokens"
    shutil.copytree(real["tokens"].path, folder)
    rows = [row for row in read_jsonl(folder / "samples.jsonl") if row["split"] != "val"]
    write_jsonl(folder / "samples.jsonl", rows)
    info = read_json(folder / "tokens.json")
    shards = [shard for shard in info["shards"] if shard["split"] != "val"]
    write_json(folder / "tokens.json", info | {"shards": shards})
    inputs = real | {"tokens": TokenShards(folder, real["tokens"].digest)}
    with pytest.raises(DataError, match='select = "tau" decodes prompts of the split val, which has none: raise'):
        train_real(tmp_path / "tau", inputs, select="tau", **MEASURED)
    assert [] == train_real(tmp_path / "last", inputs, max_steps=2, **MEASURED).metric("val/tau")


def test_val_prompts_whose_answers_would_end_behind_the_positions_are_told_before_the_first_step(real, tmp_path):
    reader = TokenReader(real["tokens"], "val")
    longest = max(reader.records, key=lambda row: row["prompt_tokens"])
    limit = text_config(real["target"])["max_position_embeddings"]
    stage = FakeStage(tmp_path / "train", real)
    config = config_of(real, select="tau", **{**MEASURED, "eval_new_tokens": limit, "eval_prompts": 100})
    with pytest.raises(DataError) as caught:
        train_dflash(config, stage)
    told = str(caught.value)
    assert f"(eval_new_tokens = {limit}, and the first token)" in told
    assert f"  sample {longest['id']}: {longest['prompt_tokens']} + {limit + 1} = " in told
    assert f"set eval_new_tokens = {limit - longest['prompt_tokens'] - 1} or less" in told
    assert [] == stage.metric("train/loss")


def test_a_val_split_without_an_anchor_cannot_be_chosen_by(tmp_path):
    inputs = make_inputs(tmp_path / "inputs", val=0)
    with pytest.raises(DataError, match='select = "loss" measures the split val, which has no sample'):
        train_dflash(train_config(select="loss", eval_every=2), FakeStage(tmp_path / "train", inputs))


MISTAKES = {
    "nothing is measured": ({"select": "loss"}, "'select' = \"loss\" needs eval_every: the steps between"),
    "neither steps nor prompts": (
        {"select": "tau"},
        "'select' = \"tau\" needs eval_every: .* split val; and tokens: whose split val holds the prompts",
    ),
    "no prompts": (
        {"select": "tau", "eval_every": 2, "tokens": Ref("tokens"), "eval_prompts": 0},
        "needs eval_prompts of at least 1",
    ),
    "prompts without tokens": ({"eval_every": 2, "eval_prompts": 3}, "'eval_prompts' needs tokens"),
    "lengths without steps": ({"tokens": Ref("tokens"), "eval_new_tokens": 3}, "'eval_new_tokens' needs eval_every"),
    "no such rule": ({"select": "best"}, 'select: expected one of "tau", "loss", "last"'),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_be_chosen_by_is_refused_when_the_config_is_made(name):
    changes, message = MISTAKES[name]
    with pytest.raises(ConfigError, match=message):
        train_config(**changes)
