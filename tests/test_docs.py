"""The code in docs/ runs as it stands there."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from pathlib import Path

from fake_stage import FakeStage

from dsl.op import Ref, op_of
from ops.artifacts import ImageSamples, Samples
from ops.capture_targets.server_args import ALLOWED
from ops.files import read_json
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.inject_images.op import InjectImages
from ops.inject_images.run import inject_images

DOCS = Path(__file__).parents[1] / "docs"


def test_the_example_op_gives_samples_that_the_next_node_takes(tmp_path: Path) -> None:
    text = (DOCS / "pipelines.md").read_text()
    code = text[text.index("    # my_ops.py") : text.index("The op's name is")]
    (tmp_path / "my_ops.py").write_text(textwrap.dedent(code))
    spec = importlib.util.spec_from_file_location("my_ops", tmp_path / "my_ops.py")
    assert spec is not None and spec.loader is not None
    my_ops = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(my_ops)
    assert "shorten" == op_of(my_ops.Shorten).name

    stage = FakeStage(tmp_path / "ingest")
    ingest(Ingest(source="builtin:digits", max_samples=20, seed=0), stage)
    shortened = FakeStage(tmp_path / "shorten", {"samples": stage.artifact(Samples)})
    my_ops.shorten(my_ops.Shorten(samples=Ref("ingest"), count=7), shortened)
    injected = FakeStage(tmp_path / "inject", {"samples": shortened.artifact(Samples)})
    inject_images(InjectImages(samples=Ref("shorten")), injected)
    assert 7 == read_json(injected.artifact(ImageSamples).path / "summary.json")["kept"]


def test_every_test_that_the_features_table_names_exists() -> None:
    tests = Path(__file__).parent
    missing = []
    for row in (DOCS / "FEATURES.md").read_text().splitlines():
        file = ""
        for named, function in re.findall(r"((?:\w+/)?test_\w+\.py)|::(test_\w+)", row):
            file = named or file
            if not (tests / file).is_file() or f"def {function}" not in (tests / file).read_text():
                missing.append(f"{file}::{function}")
    assert [] == missing


def test_every_server_argument_that_may_be_given_is_in_the_list_and_no_other() -> None:
    text = (DOCS / "sglang.md").read_text()
    rows = text[text.index("| for | names |") : text.index("Not among them")]
    assert sorted(ALLOWED) == sorted(re.findall(r"`(\w+)`", rows))
