"""The winner's pipeline file."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsl.read_toml import read_graph
from executor.cli import main
from executor.tune.trials import read_trials
from executor.tune.winner import winner_text

TINY = Path(__file__).resolve().parents[3] / "pipelines" / "tiny.toml"


def test_a_file_that_is_changed_during_its_search_does_not_change_the_rungs_of_the_winner_whose_file_is_not_tuned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, best = tmp_path / "tuned.toml", tmp_path / "best.toml"
    text = f'extends = "{TINY}"\n[tune]\nrungs = [3, 6]\nspace.train.lr = [1e-5, 3e-3]\n[node.train]\nnum_anchors = 4\n'
    file.write_text(text)
    trials = read_trials(file)
    file.write_text(text.replace("num_anchors = 4", "num_anchors = 5"))
    written = winner_text(best, file, trials, 1, [3, 6])
    file.write_text(text)
    best.write_text(written)
    graph = read_graph(best)
    for steps in (3, 6):
        assert trials.graph.nodes[trials.node(1, steps)].config.num_anchors == 4
        assert graph.nodes[f"train_{steps}"].config.num_anchors == 4
        assert graph.nodes[f"train_{steps}"].config.lr == 3e-3
    assert main(["tune", str(best), "--store", str(tmp_path / "runs")]) != 0
    assert "tune the file that it extends" in capsys.readouterr().err
