"""The code in docs/ runs as it stands there."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import tomli
from fake_stage import FakeStage
from PIL import ImageEnhance

from dsl.launch import FIELDS
from dsl.op import Ref, op_of
from dsl.op_table import all_ops
from executor.cli import COMMANDS
from executor.commands.ops import reference
from ops.artifacts import ImageSamples, Samples
from ops.capture_targets.server_args import ALLOWED
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.inject_images.op import InjectImages
from ops.inject_images.run import inject_images
from ops.lib.data.files import read_json, read_jsonl
from ops.lib.vision.images import read_images

DOCS = Path(__file__).parents[1] / "docs"
QUOTED = r"'[^']*'|\"[^\"]*\""
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]


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


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of docs/ops.md, each with its name in the first line, and a store in which its pipelines have run."""
    folder = tmp_path_factory.mktemp("guide")
    blocks = re.findall(r"```(?:python|toml)\n# ([\w.]+)\n(.*?)```", (DOCS / "ops.md").read_text(), re.DOTALL)
    assert ["my_ops.py", "long.toml", "image_ops.py", "image_run.py", "bright.toml"] == [name for name, _ in blocks]
    for name, code in blocks:
        (folder / name).write_text(code)
    for pipeline in ("long.toml", "bright.toml"):
        command = [sys.executable, "-m", "executor.cli", "run", str(folder / pipeline)]
        command += ["--store", str(folder / "runs"), "-s", "mlflow.tracking=false"]
        done = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, check=False)
        assert 0 == done.returncode, done.stdout + done.stderr
    return folder


def artifact(guide: Path, op: str) -> Path:
    manifests = (guide / "runs" / "objects").glob("*/manifest.json")
    (found,) = [path.parent for path in manifests if op == read_json(path)["op"]]
    return found


def test_the_op_of_the_guide_runs_as_it_stands_there(guide: Path) -> None:
    rows = read_jsonl(artifact(guide, "keep_long_answers") / "samples.jsonl")
    lengths = [sum(len(part.get("text", "")) for part in row["conversations"][-1]["content"]) for row in rows]
    assert lengths and min(lengths) >= 60


def test_the_op_of_the_guide_that_augments_images_makes_them_brighter(guide: Path) -> None:
    before = {
        row["id"]: (row, images) for row, images in read_images(ImageSamples(artifact(guide, "inject_images"), ""))
    }
    after = {row["id"]: images for row, images in read_images(ImageSamples(artifact(guide, "brighten"), ""))}
    added = {f"{name}-bright" for name, (row, images) in before.items() if images and row["split"] == "train"}
    assert added and {*before, *added} == set(after)
    for name, (_, images) in before.items():
        assert [image.tobytes() for image in images] == [image.tobytes() for image in after[name]]
    for name in added:
        (dark,), (bright,) = after[name.removesuffix("-bright")], after[name]
        assert ImageEnhance.Brightness(dark).enhance(1.5).tobytes() == bright.tobytes() != dark.tobytes()


def test_the_op_of_the_guide_that_logs_a_figure_leaves_it_in_the_record(guide: Path) -> None:
    sizes = read_json(artifact(guide, "plot_sizes") / "sizes.json")
    (figure,) = (guide / "runs" / "records").glob("*/figures/sizes/*.png")
    assert "image sizes.png" == figure.name
    assert len(sizes) == sum(len(images) for _, images in read_images(ImageSamples(artifact(guide, "brighten"), "")))


def test_the_reference_is_what_the_ops_say() -> None:
    assert reference(all_ops()) == (DOCS / "reference.md").read_text(), "run `make generated`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert [] == dead


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_line_is_one_that_dflow_takes(page: Path) -> None:
    assert [] == [command for command in commands(page.read_text()) if not parses(command)]


def commands(text: str) -> list[str]:
    """The commands in lines of code or between backquotes, without what follows them."""
    fenced = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    text = fenced.sub(lambda block: textwrap.indent(block[1], "    "), text)
    lines = re.findall(r"^ +(?:\$ )?(?:\.venv/bin/)?(dflow .*)$", text, re.MULTILINE)
    lines += re.findall(r"`(?:\.venv/bin/)?(dflow [^`]*)`", text)
    end = r"(?=\s{2,}|\s#|[|>&\\]|$)"
    cut = [re.match(rf"(?:{QUOTED}|.)*?{end}", " ".join(line.splitlines()))[0].strip() for line in lines]
    return [each for line in cut for each in re.split(r", (?=dflow )", line)]


def parses(command: str) -> bool:
    """Several names, "dflow gc, rm", are looked up; brackets stand around what may be left out.

    What is not quoted must hold nothing that a shell reads as a pattern: zsh refuses train.lr=[1e-4,3e-4].
    """
    plain = re.sub(r"(?<=\s)\[|\](?=\s|$)", "", command.split(" -- ")[0])
    words = shlex.split(plain)[1:]
    if words[0].isupper():
        return True
    if len(words) == 1 or words[0].endswith(",") or words[0] not in COMMANDS:
        return all(word in COMMANDS for word in re.findall(r"^[\w-]+|(?<=, )[\w-]+", " ".join(words)))
    if re.search(r"[][{}*?]", re.sub(QUOTED, "", plain)):
        return False
    parser = argparse.ArgumentParser()
    importlib.import_module(f"executor.commands.{words[0].replace('-', '_')}").add_arguments(parser)
    try:
        parser.parse_args(words[1:])
    except SystemExit:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("    dflow run FILE --sweep train.lr=[3e-4,1e-3]    # two", False),
        ("    dflow run FILE --sweep 'train.lr=[3e-4, 1e-3]'  # two", True),
        ("```\ndflow run FILE --swept x\n```", False),
        ("as `dflow plan FILE --jsn` says", False),
        ("as `dflow diff RUN [RUN]` says, as `dflow COMMAND --help` does", True),
        ("    dflow gc, gk", False),
    ],
)
def test_a_wrong_command_line_is_found_wherever_it_stands(text: str, expected: bool) -> None:
    assert expected == all(map(parses, commands(text))) and commands(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_value_that_a_command_line_changes_is_there(page: Path) -> None:
    paths = re.findall(r"(?:-s|--sweep) '?([a-z]\w*)(?:-\w+)*\.(\w+)[\w.]*=", page.read_text())
    unknown = [f"{node}.{field}" for node, field in paths if field not in known_fields()[node] and node != "node"]
    assert [] == unknown


@cache
def known_fields() -> Mapping[str, set[str]]:
    """The fields by node id, from the tables and from the nodes in the pipelines of this repository."""
    known: defaultdict[str, set[str]] = defaultdict(set, {name: set(fields) for name, fields in FIELDS.items()})
    ops = all_ops()
    for file in (DOCS.parent / "pipelines").glob("*.toml"):
        for node, values in tomli.loads(file.read_text()).get("node", {}).items():
            if "op" in values:
                known[node] |= {"launch", *ops[values["op"]].fields}
    return known


@pytest.mark.parametrize("page", [*PAGES, DOCS.parent / "CHANGELOG.md"], ids=lambda page: page.name)
def test_no_page_holds_two_versions_of_a_text_that_a_merge_left(page: Path) -> None:
    assert not re.search(r"^(<<<<<<<|=======$|>>>>>>>)", page.read_text(), re.MULTILINE)


def test_every_test_that_the_features_table_names_exists() -> None:
    tests = Path(__file__).parent
    missing = []
    for row in (DOCS / "FEATURES.md").read_text().splitlines():
        file = ""
        for named, function in re.findall(r"((?:\w+/)*test_\w+\.py)|::(test_\w+)", row):
            file = named or file
            if not (tests / file).is_file() or f"def {function}" not in (tests / file).read_text():
                missing.append(f"{file}::{function}")
    assert [] == missing


def test_every_server_argument_that_may_be_given_is_in_the_list_and_no_other() -> None:
    text = (DOCS / "sglang.md").read_text()
    rows = text[text.index("| for | names |") : text.index("Not allowed: ")]
    assert sorted(ALLOWED) == sorted(re.findall(r"`(\w+)`", rows))
