"""The table `[tune]`: its mistakes, all at once, and the nodes of its trials."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsl.errors import PipelineError
from dsl.read_toml import read_graph, tree_with_ops
from dsl.tune import check_tune, put_trials
from executor.cli import main
from executor.tune.points import points_of
from executor.tune.trials import read_trials

TINY = Path(__file__).resolve().parents[2] / "pipelines" / "tiny.toml"


def written(folder: Path, text: str) -> Path:
    file = folder / "tuned.toml"
    file.write_text(f'extends = "{TINY}"\n{text}')
    return file


def mistakes(folder: Path, text: str) -> list[str]:
    file = written(folder, text)
    with pytest.raises(PipelineError) as caught:
        read_trials(file)
    return [str(each).replace(str(file), "F") for each in caught.value.mistakes]


def without_advice(mistake: str) -> str:
    return re.sub(r" \((keys|node\.field|train\.lr = |\{ low|one of|lower|vary|set) ?.*", "", mistake)


def test_all_mistakes_of_the_table_are_reported_at_once_each_with_its_line(tmp_path: Path) -> None:
    found = mistakes(
        tmp_path,
        """
[tune]
rungs = [4, 4]
eta = 0
trails = 3
[tune.space]
trian.lr = [1e-3]
train.lrr = [1e-3]
train.lr = []
train.num_layers = [1, "2", 2.5]
train.select = ["tau", "tau"]
train.log_every = [1, 2]
train.launch.nproc = [1, 2]
train.rope_theta = { min = 1, max = 2 }
train.ema_decay = [0.9, 1.5]
train.warmup_ratio = [0, 0.0]
train.algorithm = ["dflash", "nope"]
train.features = ["@capture"]
train.pause_after = [1]
train.gamma = { low = 2, high = 1 }
train.block_size = { low = 2.5, high = 8 }
train.weight_decay = { low = 0.0, high = 1.0, log = true }
pair = [{ train.lr = "x" }, { capture.nothing = 1 }]
single = [1]
twice = [{ train.warmup_ratio = 0.1, train.seed = 1 }, { train.seed = 1, train.warmup_ratio = 0.1 }]
""",
    )
    assert [
        "F:4:1: tune.rungs: expected numbers of steps that ascend from 1 or more, got [4, 4]",
        "F:5:1: tune.eta: must be >= 1, got 0",
        'F:6:1: tune.trails: unknown key (did you mean "trials"?)',
        'F:8:7: tune.space.trian.lr: there is no node "trian" (did you mean "train"?)',
        'F:9:7: tune.space.train.lrr: unknown key (did you mean "lr"?)',
        "F:10:7: tune.space.train.lr: expected a list of values, or a range, got [] (list)",
        'F:11:7: tune.space.train.num_layers: expected int, got "2"',
        "F:11:7: tune.space.train.num_layers: expected int, got 2.5 (float)",
        "F:12:7: tune.space.train.select: tau is given twice",
        "F:13:7: tune.space.train.log_every: it changes no result, so all its trials would be the same",
        "F:14:14: tune.space.train.launch.nproc: only fields of the op can be tuned, not its inputs or its launch",
        "F:15:7: tune.space.train.rope_theta: expected a range with two numbers, got { min = 1, max = 2 } (table)",
        "F:16:7: tune.space.train.ema_decay: must be < 1, got 1.5",
        "F:17:7: tune.space.train.warmup_ratio: 0 and 0.0 are the same",
        'F:18:7: tune.space.train.algorithm: there is no algorithm "nope"',
        "F:19:7: tune.space.train.features: only fields of the op can be tuned, not its inputs or its launch",
        "F:20:7: tune.space.train.pause_after: [tune] sets it itself: leave it out",
        "F:21:7: tune.space.train.gamma: low must be less than high: 2, 1",
        "F:22:7: tune.space.train.block_size: expected int, got 2.5 (float)",
        "F:23:7: tune.space.train.weight_decay: low must be less than high, and above 0 with log: 0.0, 1.0",
        "F:24:1: tune.space.pair: capture.nothing: unknown key",
        'F:24:1: tune.space.pair: train.lr: expected float, got "x"',
        "F:25:1: tune.space.single: expected values of a field, or tables of values that go together",
        "F:26:1: tune.space.twice: { train = { warmup_ratio = 0.1, seed = 1 } } and { train = { seed = 1, "
        "warmup_ratio = 0.1 } } are the same",
        "F:26:1: tune.space.twice: train.warmup_ratio: tune.space.train.warmup_ratio sets it too: give its values once",
    ] == [without_advice(each) for each in found]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ": tune: the table [tune] is missing"),
        ("[tune]\nrungs = [1]", 'the required key "space" is missing'),
        (
            "[tune]\nrungs = [1]\nnode = 'shard'\nspace.train.lr = [0.1]",
            "is a node of shard_sequence, which cannot pause",
        ),
        ("[tune]\nrungs = [1]\nspace.train.lr = { low = 0.1, high = 0.2 }", 'the required key "trials" is missing'),
        ("[tune]\nrungs = [9]\nbudget_steps = 8\nspace.train.lr = [0.1]", "8 steps are fewer than the 9 of one trial"),
        ("[tune]\nrungs = [9]\nspace.train.lr = [0.1, 2.0]", "tune.space.train.lr: "),
        ("[tune]\nrungs = [9]\nspace.train.lr = [0.1]\n[sweep]\ntrain.lr = [0.1]", "sweep: a pipeline with [tune]"),
        (
            "[tune]\nrungs = [9]\nspace.train.lr = [0.1]\n[node.train]\neval_prompts = 0\nselect = 'last'",
            "by tau on val",
        ),
        (
            "[tune]\nrungs = [9]\nspace.train.lr = [0.1]\n[node.train_9]\nop = 'ingest'\nsource = 'builtin'",
            '"train_9" is',
        ),
    ],
)
def test_what_cannot_be_tuned_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (only,) = mistakes(tmp_path, text)
    assert said in only


def test_mistakes_of_the_pipeline_the_table_and_the_trials_are_reported_at_once_by_plan_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(
        tmp_path,
        """
[tune]
rungs = [9, 90]
eta = 0
[tune.space]
train.lr = [0.1, 2.0]
train.gamma = { min = 1, max = 2 }
train.dspark.rank = [8, 16]
eval.max_new_tokens = [8, 16]
[node.train]
max_steps = 80
eval_prompts = 0
select = "last"
[node.capture]
layers = 3
[node.eval]
dtype = 3
""",
    )
    found = mistakes(tmp_path, file.read_text().partition("\n")[2])
    assert [
        "F:4:1: tune.rungs: 90 is more than the 80 steps of the training",
        "F:5:1: tune.eta: must be >= 1, got 0",
        "F:7:7: tune.space.train.lr: must be < 1, got 2.0",
        "F:8:7: tune.space.train.gamma: expected a range with two numbers, got { min = 1, max = 2 } (table)",
        "F:9:14: tune.space.train.dspark.rank: 'dspark' needs algorithm = \"dspark\"",
        'F:10:6: tune.space.eval.max_new_tokens: "eval" is not above "train", so trials with other values of it are '
        "the same training",
        "F:11:7: node.train: trials are compared by tau on val, which this training does not measure",
        "F:16:1: node.capture.layers: unknown key",
        'F:18:1: node.eval.dtype: expected one of "float32", "bfloat16", "float16", got 3 (int)',
    ] == [without_advice(each) for each in found]
    code = main(["plan", str(file), "--store", str(tmp_path / "runs")])
    assert (2, found) == (code, capsys.readouterr().err.replace(str(file), "F").splitlines())


def test_all_that_trials_cause_is_reported_at_once(tmp_path: Path) -> None:
    found = mistakes(
        tmp_path,
        """
[tune]
rungs = [9, 90]
budget_steps = 8
[tune.space]
train.lr = [0.1, 2.0]
train.max_steps = [90, 80]
[node.train]
eval_every = 12
eval_prompts = 0
select = "last"
""",
    )
    assert [
        "F:4:1: tune.rungs: 90 is more than the 80 steps of the training (t02, t04) (lower it, or raise max_steps of "
        "train)",
        "F:5:1: tune.budget_steps: 8 steps are fewer than the 90 of one trial to the last rung (set 90 or more)",
        "F:7:7: tune.space.train.lr: must be < 1, got 2.0",
        "F:9:7: node.train: trials are compared by tau on val, which this training does not measure (set eval_prompts "
        "= 8)",
    ] == found


def test_trials_share_what_they_do_not_change_and_their_rungs_go_on_from_each_other(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
[tune]
rungs = [4, 8]
[tune.space]
train.lr = [1e-3, 1e-4]
recipe = [
    { train.algorithm = "dflash" },
    { train.algorithm = "dspark", train.dspark.rank = 8, capture.final_hidden = true },
]
""",
    )
    tree = tree_with_ops(file)
    tune = check_tune(tree)
    assert tune is not None
    put_trials(tree, tune, points_of(tune).tried)
    graph = read_trials(file).graph
    trained = {node_id: node for node_id, node in graph.nodes.items() if node.op.name == "train_dflash"}
    assert {f"{name}-t0{trial}" for name in ("train_4", "train_8", "train") for trial in (1, 2, 3, 4)} == set(trained)
    assert {"ingest", "inject", "tokenize", "target"} < set(graph.nodes) - {"capture"}
    first, second, last = (trained[f"{name}-t04"] for name in ("train_4", "train_8", "train"))
    assert [(4, ()), (8, ("train_4-t04",)), (None, ("train_8-t04",))] == [
        (node.config.pause_after, node.inputs["continues"]) for node in (first, second, last)
    ]
    for node in (first, second, last):
        assert (1e-4, "dspark", 8) == (node.config.lr, node.config.algorithm, node.config.dspark.rank)
    assert [False, True] == [graph.nodes[f"capture-t0{trial}"].config.final_hidden for trial in (3, 4)]


def test_other_commands_check_the_table_and_leave_it_alone(tmp_path: Path) -> None:
    good = "[tune]\nrungs = [4]\nspace.train.lr = [1e-3, 1e-4]\n"
    assert list(read_graph(TINY).nodes) == list(read_graph(written(tmp_path, good)).nodes)
    with pytest.raises(PipelineError, match=r"tune\.rungs"):
        read_graph(written(tmp_path, good.replace("[4]", "[0]")))
