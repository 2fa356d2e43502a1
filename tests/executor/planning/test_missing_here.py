"""What a node needs of this machine and is not there is said before anything runs, of all nodes at once."""

from __future__ import annotations

import importlib.util
import json

import pytest
from toy_ops import Toy

from dsl.op import Ref
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.plan import missing_here as capture_targets_missing_here
from ops.check_export.op import CheckExport
from ops.check_export.plan import missing_here as check_export_missing_here
from ops.lib.sglang import version
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.plan import missing_here as regenerate_answers_missing_here
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.plan import missing_here as tokenize_chat_missing_here

NEEDING = '''
import os
from attrs import frozen
from dsl.estimate import Estimate
from dsl.op import field, op
from toy import Text


@op(version=1, run="needing:need")
@frozen(kw_only=True)
class Need:
    """Needs a variable."""
    text: Text
    variable: str = field(help="has to be set")
    output = Text

    def missing_here(self):
        return {} if self.variable in os.environ else {"variable": f"set {self.variable}"}

    def estimate(self, context):
        return Estimate(forecast=self.variable)

    def conflicts(self, forecast):
        return {"text": f"read by {forecast['text']}"} if forecast["text"] == self.variable else {}


def need(config, stage):
    (stage.out_dir / "text.txt").write_text(os.environ[config.variable])

'''
PIPELINE = """
[pipeline]
name = "needing"
ops = ["toy.py", "needing.py"]

[node.a]
op = "make"

[node.b]
op = "need"
text = "@a"
variable = "TOY_ONE"

[node.c]
op = "need"
text = "@a"
variable = "TOY_TWO"
"""
INSTALL = ".venv/bin/pip install -c constraints.txt -e '.[sglang]'"


@pytest.fixture
def toy(tmp_path):
    made = Toy(tmp_path, PIPELINE)
    (tmp_path / "needing.py").write_text(NEEDING)
    return made


def test_a_run_names_all_that_is_not_there_before_its_first_stage_and_leaves_no_record(toy):
    result = toy.dflow("run", str(toy.file))
    assert result.returncode == 2
    assert result.stderr.splitlines() == ["node.b.variable: set TOY_ONE", "node.c.variable: set TOY_TWO"]
    assert (toy.calls(), list(toy.store.glob("records/*"))) == ([], [])


def test_a_run_names_what_does_not_fit_by_what_the_nodes_above_foresee(toy):
    again = '\n[node.d]\nop = "need"\ntext = "@b"\nvariable = "TOY_ONE"\n'
    toy.file.write_text(toy.file.read_text() + again)
    result = toy.dflow("run", str(toy.file), TOY_ONE="1", TOY_TWO="2")
    assert (result.returncode, result.stderr.splitlines()) == (2, ["node.d.text: read by TOY_ONE"])
    assert toy.dflow("plan", str(toy.file), TOY_ONE="1", TOY_TWO="2").stdout.splitlines()[-1] == (
        "node.d.text: read by TOY_ONE"
    )


def test_a_node_that_is_cached_needs_nothing(toy):
    assert toy.dflow("run", str(toy.file), TOY_ONE="1", TOY_TWO="2").returncode == 0
    assert toy.dflow("run", str(toy.file)).returncode == 0


@pytest.mark.parametrize("given", [["-s", "b.variable=TOY_THREE"], ["--from", "b"]], ids=["values", "from a node"])
def test_resume_refuses_as_well(toy, given):
    assert toy.dflow("run", str(toy.file), TOY_ONE="1", TOY_TWO="2").returncode == 0
    anew = toy.dflow("resume", *given)
    named = "TOY_THREE" if "-s" in given else "TOY_ONE"
    assert (anew.returncode, anew.stderr.splitlines()) == (2, [f"node.b.variable: set {named}"])
    assert len(list(toy.store.glob("records/*"))) == 1


def test_the_same_run_goes_on_when_the_rest_is_there(toy):
    file = toy.folder / "needing.py"
    file.write_text(NEEDING.replace("os.environ[config.variable]", 'os.environ["TOY_BROKEN"]'))
    assert toy.dflow("run", str(toy.file), TOY_ONE="1", TOY_TWO="2").returncode == 1
    refused = toy.dflow("resume", TOY_ONE="1")
    assert (refused.returncode, refused.stderr.splitlines()) == (2, ["node.c.variable: set TOY_TWO"])
    assert toy.state()["status"] == "failed"
    assert toy.dflow("resume", TOY_ONE="1", TOY_TWO="2", TOY_BROKEN="x").returncode == 0


def test_a_plan_tells_it_below_the_table(toy):
    lines = ["node.b.variable: set TOY_ONE", "node.c.variable: set TOY_TWO"]
    shown = toy.dflow("plan", str(toy.file))
    assert shown.returncode == 2
    assert shown.stdout.splitlines()[-2:] == lines
    assert json.loads(toy.dflow("plan", str(toy.file), "--json").stdout)["missing_here"] == lines
    assert "not there" not in toy.dflow("plan", str(toy.file), TOY_ONE="1", TOY_TWO="2").stdout


def capture(**changes):
    return CaptureTargets(tokens=Ref("tokens"), target=Ref("target"), **changes)


def check(**changes):
    return CheckExport(draft=Ref("d"), target=Ref("t"), tokens=Ref("k"), report=Ref("r"), **changes)


def answers(**changes):
    endpoint = {"backend": "endpoint", "endpoint": "http://host:1/v1", "model": "m"}
    return RegenerateAnswers(samples=Ref("s"), target=Ref("t"), **endpoint, **changes)


@pytest.mark.parametrize(("found", "said"), [(None, f"not installed: {INSTALL}"), ("0.5.20", "0.5.20 is installed")])
def test_sglang_is_needed_where_it_must_run(monkeypatch, found, said):
    monkeypatch.setattr(version, "installed_version", lambda: found)
    assert said in capture_targets_missing_here(capture(backend="sglang"))["backend"]
    assert said in check_export_missing_here(check(live="required"))["live"]
    assert capture_targets_missing_here(capture()) == {}
    assert check_export_missing_here(check()) == {}
    monkeypatch.setattr(version, "installed_version", lambda: version.VERSIONS[0])
    assert capture_targets_missing_here(capture(backend="sglang")) == {}
    assert check_export_missing_here(check(live="required")) == {}


def test_torchvision_is_needed_where_it_resizes(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert set(tokenize_chat_missing_here(TokenizeChat(samples=Ref("s"), image_backend="torchvision"))) == {
        "image_backend"
    }
    assert set(regenerate_answers_missing_here(answers(image_backend="torchvision"))) == {"image_backend"}
    assert tokenize_chat_missing_here(TokenizeChat(samples=Ref("s"))) == {}


def test_the_variable_with_the_key_has_to_be_set(monkeypatch):
    monkeypatch.delenv("TOY_KEY", raising=False)
    assert "export TOY_KEY=" in regenerate_answers_missing_here(answers(api_key_env="TOY_KEY"))["api_key_env"]
    monkeypatch.setenv("TOY_KEY", "secret")
    assert regenerate_answers_missing_here(answers(api_key_env="TOY_KEY")) == {}
    assert regenerate_answers_missing_here(answers()) == {}
