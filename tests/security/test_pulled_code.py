"""Code in artifacts that others made: it comes only for nodes whose config trusts it, and nothing else lets it run."""

from __future__ import annotations

import json
import shutil

import pytest
from attrs import evolve
from toy_ops import Toy

from dsl.artifact_digest import MANIFEST
from dsl.errors import DataError
from dsl.files import append_line
from executor.store.digests import artifact_digest, seal_artifact_files
from executor.store.manifest import Manifest
from ops.lib.target.checkpoint_files import trusts_own_code

PIPELINE = """
[pipeline]
name = "target"
ops = ["target_op.py"]

[node.target]
op = "load"
trust_remote_code = TRUST
"""
OP = '''
from attrs import frozen
from dsl.op import Artifact, field, op

@frozen
class Model(Artifact):
    """model/"""

@op(version=1, run="target_run:load")
@frozen(kw_only=True)
class Load:
    """A checkpoint with code."""
    trust_remote_code: bool = field(default=False, help="as load_target's")
    output = Model
'''
RUN = """
def load(config, stage):
    (stage.out_dir / "model").mkdir()
    (stage.out_dir / "model" / "modeling_x.py").write_text("raise SystemExit('a stranger was here')")
    for name in ("model/config.json", "target.json"):  # of a TargetModel
        (stage.out_dir / name).write_text("{}")
"""


def toy_in(folder, trust):
    folder.mkdir()
    for name, text in (("target_op.py", OP), ("target_run.py", RUN)):
        (folder / name).write_text(text)
    return Toy(folder, PIPELINE.replace("TRUST", trust))


@pytest.mark.parametrize("trust", ["false", "true"])
def test_code_is_pulled_only_for_a_node_that_trusts_it(trust, tmp_path):
    made, other, remote = toy_in(tmp_path / "made", trust), toy_in(tmp_path / "other", trust), str(tmp_path / "remote")
    assert made.dflow("run", str(made.file)).returncode == 0
    assert made.dflow("push", remote).returncode == 0
    pulled = other.dflow("pull", remote)  # of no pipeline, so that nothing trusts it
    assert (pulled.returncode, pulled.stdout) == (0, f"0 artifacts pulled from {remote}\n")
    assert "not pulled: " in pulled.stderr
    assert 'the artifact of node "target" has code in it (model/modeling_x.py), which could run here' in pulled.stderr
    pulled = other.dflow("pull", remote, str(other.file))
    if trust == "true":
        assert pulled.returncode == 0, pulled.stderr
        return
    assert pulled.returncode == 1
    assert 'the artifact of node "target" has code in it (model/modeling_x.py), which could run here' in pulled.stderr
    assert list(other.store.rglob("*.py")) == []


OWN_TARGET = (
    OP.replace(
        "from dsl.op import Artifact, field, op", "from dsl.op import field, op\nfrom ops.artifacts import TargetModel"
    )
    .replace('@frozen\nclass Model(Artifact):\n    """model/"""\n', "")
    .replace('    trust_remote_code: bool = field(default=False, help="as load_target\'s")\n', "")
    .replace("output = Model", "output = TargetModel")
)


@pytest.mark.parametrize("op", [OP, OWN_TARGET], ids=["a field that trusts", "a target of an own op"])
def test_code_in_a_received_store_is_not_used_by_a_node_that_does_not_trust_it(op, tmp_path):
    """Somebody entered another artifact for the key, whose target.json says that it is trusted."""
    toy = toy_in(tmp_path / "toy", "false")
    if op == OWN_TARGET:
        (toy.folder / "target_op.py").write_text(op)
        toy.file.write_text(toy.file.read_text().replace("trust_remote_code = false", ""))
    (toy.folder / "target_run.py").write_text(RUN.replace("modeling_x.py", "weights"))
    assert toy.dflow("run", str(toy.file)).returncode == 0
    [index] = toy.store.glob("index/*")
    [own] = toy.store.glob("objects/*")
    forged = toy.store / "objects" / "forged"
    shutil.copytree(own, forged)
    for name, text in (("target.json", '{"trust_remote_code": true}'), ("model/modeling_x.py", "raise SystemExit")):
        (forged / name).write_text(text)
    manifest = Manifest.of(own)
    (forged / MANIFEST).unlink()
    files = seal_artifact_files(forged)
    evolve(manifest, files=files, digest=artifact_digest(files)).write(forged)
    forged.rename(forged.with_name(artifact_digest(files)))
    append_line(index, {"digest": artifact_digest(files), "run": manifest.run, "time": 2e9})
    planned = toy.dflow("plan", str(toy.file))
    assert "its artifact has code in it (model/modeling_x.py), which its config does not trust" in planned.stdout
    assert toy.dflow("run", str(toy.file)).returncode == 0
    assert ("done", "miss") == toy.caches()["target"]
    assert own.name == toy.state()["nodes"]["target"]["digest"]
    assert toy.dflow("run", str(toy.file)).returncode == 0
    assert ("done", "hit") == toy.caches()["target"]


def test_a_target_that_only_says_that_it_is_trusted_runs_no_code_from_elsewhere(tmp_path):
    info = {"trust_remote_code": True}
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "stranger/repo--configuration_x.X"}}))
    with pytest.raises(DataError, match="only runs with trust_remote_code = true"):  # there is no code of its own
        trusts_own_code(tmp_path, info)
    (tmp_path / "configuration_x.py").touch()
    with pytest.raises(DataError, match="code of another repository"):
        trusts_own_code(tmp_path, info)
