"""What a stage would refuse by its config and by files that exist, plan refuses before anything runs."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from init_cases import TEXT, VISION, chat, checkpoint, write_flat_photos
from safetensors.numpy import save_file

from dsl.estimate import PlanContext
from dsl.launch import Launch
from dsl.op import Ref
from executor.cli import main
from ops.ingest.tables import NEEDS_DATASETS
from ops.lib.sglang import version
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.plan import estimate
from ops.tokenize_chat.conflicts import conflicts
from ops.tokenize_chat.op import TokenizeChat

HEAD = """
[pipeline]
name = "refused"
[mlflow]
tracking = false
"""
INGEST = """
[node.ingest]
op = "ingest"
source = "{source}"
"""
DATA = INGEST.format(source="chat.jsonl")
INJECT = """
[node.inject]
op = "inject_images"
samples = "@ingest"
"""
TOKENIZE = """
[node.tokenize]
op = "tokenize_chat"
samples = "@inject"
"""
TARGET = """
[node.target]
op = "load_target"
checkpoint = "target"
"""
FINETUNE = """
[node.target]
op = "finetune_vlm"
tokens = "@tokenize"
"""
REGENERATE = """
[node.answers]
op = "regenerate_answers"
samples = "@inject"
backend = "endpoint"
endpoint = "http://127.0.0.1:1/v1"
model = "m"
processor = "target"
"""
CAPTURE = """
[node.capture]
op = "capture_targets"
tokens = "@tokenize"
target = "@target"
backend = "sglang"
num_layers = 3
"""
TRAIN = """
[node.shard]
op = "shard_sequence"
tokens = "@tokenize"
tokens_per_step = 4096

[node.train]
op = "train_dflash"
batches = "@shard"
tokens = "@tokenize"
target = "@target"
capture = "online"
capture_layers = 3
"""
REMEDY = 'say which: format = "json", "csv", "parquet", "arrow" or "image-folder"'
COLUMNS = "the first line must name the columns, and it is a, b"
Write = Callable[[Path], Any]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], text: str, *overrides: str) -> list[str]:
    """The lines with which plan and run refuse, which must be the same."""
    Path("refused.toml").write_text(HEAD + text)
    given = [argument for override in overrides for argument in ("-s", override)]
    code = main(["plan", "refused.toml", "--json", *given])
    missing_here: list[str] = json.loads(capsys.readouterr().out)["missing_here"]
    assert (2 if missing_here else 0) == code
    if missing_here:
        assert 2 == main(["run", "refused.toml", *given])
        assert missing_here == capsys.readouterr().err.splitlines()
        assert [] == list(Path("runs").glob("records/*"))
    return missing_here


def two_formats(folder: Path) -> None:
    chat(folder / "a.jsonl", 1)
    (folder / "b.parquet").write_bytes(b"PAR1")


def link_out(folder: Path) -> None:
    chat(folder.parent / "elsewhere.jsonl", 1)
    (folder / "a.jsonl").symlink_to(folder.parent / "elsewhere.jsonl")


def broken_parquet(folder: Path) -> None:
    (folder / "a.parquet").write_bytes(b"PAR1 and no more")


def broken_first_row(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"messages": [}\n')


def rows_of_another_form(folder: Path) -> None:
    chat(folder / "a.jsonl", 1)
    (folder / "b.jsonl").write_text('{"texts": []}\n')


def arrow_set(folder: Path) -> None:
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../private.arrow"}]}))


SOURCES: list[tuple[str, Write, tuple[str, ...], str]] = [
    ("no file of the format", lambda folder: chat(folder / "a.jsonl", 1), ("ingest.format=csv",),
     'SOURCE: has no file that ends in .csv, .tsv (format = "csv")'),
    ("nothing that is data", lambda folder: (folder / "a.tar.gz").write_bytes(gzip.compress(b"{}")), (),
     f"SOURCE: contains neither JSON, Parquet nor CSV files, no Arrow data set and no images; {REMEDY}"),
    ("two formats", two_formats, (),
     f"SOURCE: contains JSON files and Parquet files; {REMEDY}, or name one file"),
    ("a link that leads out", link_out, (), "SOURCE/a.jsonl: is a link that leads out of SOURCE, to "),
    ("a header of other columns", lambda folder: (folder / "a.csv").write_text("a,b\n1,2\n"), (), "SOURCE/a.csv:1: "),
    ("a first row that is no JSON", broken_first_row, (), "SOURCE/a.jsonl:1: broken JSON"),
    ("a file with rows of another form", rows_of_another_form, (), "SOURCE/b.jsonl:1: "),
    ("empty files", lambda folder: (folder / "a.jsonl").write_text("\n"), (),
     "SOURCE: has no rows; `source` must name a data file or folder with samples"),
    ("Parquet that is none", broken_parquet, (), "SOURCE/a.parquet: cannot be read as Parquet: "),
]  # fmt: skip


@pytest.mark.parametrize(
    ("write", "overrides", "line"), [case[1:] for case in SOURCES], ids=[case[0] for case in SOURCES]
)
def test_a_source_that_cannot_be_read_is_refused(
    capsys: pytest.CaptureFixture[str], here: Path, write: Write, overrides: tuple[str, ...], line: str
) -> None:
    (here / "data").mkdir()
    write(here / "data")
    [found] = refused(capsys, INGEST.format(source="data"), *overrides)
    assert found.startswith("node.ingest.source: " + line.replace("SOURCE", str(here / "data")))


def test_a_header_without_turns_says_which_columns_it_has(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "a.csv").write_text("a,b\n1,2\n")
    [found] = refused(capsys, INGEST.format(source="a.csv"))
    assert found.endswith(COLUMNS)


def test_an_unknown_sample_and_descriptions_that_lead_out_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    [found] = refused(capsys, INGEST.format(source="builtin:letters"))
    assert 'node.ingest.source: source "builtin:letters": the only built-in sample is "builtin:digits"' == found
    Path("data").mkdir()
    arrow_set(Path("data"))
    [found] = refused(capsys, INGEST.format(source="data"))
    assert found.endswith("state.json: '../private.arrow' is no file or folder beside it")


@pytest.mark.parametrize(
    ("name", "content", "overrides", "line"),
    [
        ("a.gz", gzip.compress(b"\0"), (), "compressed; unpack it first"),
        ("a.jsonl.gz", gzip.compress(b"{}")[:-9], (),
         "cannot be unpacked as gzip (Compressed file ended before the end-of-stream marker was reached); fetch it "
         "again"),
        ("a.pkl", b"\x80\x04.", (), "a pickle, which may run code when it is read; let SGLang write its requests with "
         "--log-requests --log-requests-level 3 --log-requests-format json"),
        ("a.arrow", b"ARROW1", (), "a file of an Arrow data set; name the folder that `save_to_disk` wrote"),
        ("a.txt", b"words", (), f"neither JSON, Parquet nor CSV; {REMEDY}"),
        ("a.json", b"[]", ("-s", "ingest.format=arrow"), 'format = "arrow" reads a folder, but this is a file'),
    ],
    ids=["compressed", "a cut archive", "a pickle", "arrow", "text", "a file as a folder"],
)  # fmt: skip
def test_a_single_file_of_no_known_format_is_refused(
    capsys: pytest.CaptureFixture[str], here: Path, name: str, content: bytes, overrides: tuple[str, ...], line: str
) -> None:
    (here / name).write_bytes(content)
    Path("refused.toml").write_text(HEAD + INGEST.format(source=name))
    assert 2 == main(["plan", "refused.toml", *overrides])  # its key cannot be made
    assert f"refused.toml:7:7: node.ingest: {here / name}: {line}\n" == capsys.readouterr().err


def test_an_arrow_data_set_needs_its_library(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import util

    (here / "data").mkdir()
    (here / "data" / "state.json").write_text("{}")
    found = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "datasets" else found(name))
    assert [f"node.ingest.source: {here / 'data'}: {NEEDS_DATASETS}"] == refused(capsys, INGEST.format(source="data"))


@pytest.mark.parametrize("write", [lambda folder: chat(folder / "chat.jsonl", 3), write_flat_photos])
def test_a_sound_source_is_refused_nothing(capsys: pytest.CaptureFixture[str], here: Path, write: Write) -> None:
    write(here)
    source = "chat.jsonl" if (here / "chat.jsonl").exists() else "photos"
    assert [] == refused(capsys, INGEST.format(source=source))
    (here / "empty.jsonl").write_text("")
    both = f'ingest.source=["{source}", "empty.jsonl"]'
    assert [] == refused(capsys, INGEST.format(source=source), both)


@pytest.fixture
def data(here: Path) -> Path:
    chat(here / "chat.jsonl", 3)
    checkpoint(here / "target", sees=False)
    return here


TEMPLATE = "own.jinja"
UNREAD = "does not read enable_thinking: remove it"
NODES: list[tuple[str, str, tuple[str, ...], str]] = [
    ("thinking of the built-in template", TOKENIZE, ("tokenize.enable_thinking=false",),
     f'node.tokenize.enable_thinking: the chat template of processor = "builtin" {UNREAD}'),
    ("thinking of a processor's template", TOKENIZE, ("tokenize.enable_thinking=true", "tokenize.processor=target"),
     f"node.tokenize.enable_thinking: the chat template of HERE/target {UNREAD}"),
    ("thinking of a template of one's own", TOKENIZE,
     ("tokenize.enable_thinking=true", "tokenize.processor=target", f"tokenize.chat_template={TEMPLATE}"),
     f"node.tokenize.enable_thinking: the chat template of HERE/{TEMPLATE} {UNREAD}"),
    ("thinking of a server's template", REGENERATE, ("answers.enable_thinking=false",),
     f"node.answers.enable_thinking: the chat template of HERE/target {UNREAD}"),
    ("a key of two lines", REGENERATE, ("answers.api_key_env=REFUSED_KEY",),
     'node.answers.api_key_env: api_key_env = "REFUSED_KEY": the variable must be one line of ASCII'),
    ("an unknown built-in target", TOKENIZE + FINETUNE, ("target.init=builtin:huge",),
     'node.target.init: init = "builtin:huge": the only built-in target is "builtin:tiny-qwen3-vl"'),
    ("a vision tower of a text model", TOKENIZE + FINETUNE,
     ("tokenize.processor=target", "target.init=target", 'target.freeze=["vision"]'),
     'node.target: freeze = "vision": a qwen3 target has no such part'),
    ("a rate of a part that is not there", TOKENIZE + FINETUNE,
     ("tokenize.processor=target", "target.init=target", "target.lr_projector=0.001"),
     "node.target: lr_projector: a qwen3 target has no such part"),
    ("nothing left to train", TOKENIZE + FINETUNE,
     ("tokenize.processor=target", "target.init=target", 'target.freeze=["text", "embeddings"]'),
     "node.target: freeze = ['text', 'embeddings']: no part of the target is left to train"),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "overrides", "line"), [case[1:] for case in NODES], ids=[case[0] for case in NODES])
def test_a_value_that_does_not_fit_files_that_exist_is_refused(
    capsys: pytest.CaptureFixture[str],
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: str,
    overrides: tuple[str, ...],
    line: str,
) -> None:
    monkeypatch.setenv("REFUSED_KEY", "one\ntwo")
    (data / TEMPLATE).write_text("{{ messages }}")
    [found] = refused(capsys, DATA + INJECT + nodes, *overrides)
    assert found.startswith(line.replace("HERE", str(data)))


def test_prompts_that_another_processor_answered_are_refused(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    nodes = DATA + INJECT + REGENERATE + TOKENIZE
    read = ("tokenize.samples=@answers", "tokenize.processor=other")
    shutil.copytree(data / "target", data / "other")
    assert [] == refused(capsys, nodes, *read)
    template = data / "other" / "chat_template.jinja"
    template.write_text(template.read_text().replace("user", "User") + "\n")
    same = "give regenerate_answers and tokenize_chat the same"
    assert [
        f"node.tokenize.processor: the answers were generated with another chat template: {same} processor"
    ] == refused(capsys, nodes, *read)
    assert [] == refused(capsys, nodes, *read, 'answers.answers="data"')
    assert [
        f"node.tokenize.processor: the answers are those of a server, whose tokenizer this is not: {same} processor"
    ] == refused(capsys, nodes, *read[:1])


@pytest.mark.parametrize(("read", "is_refused"), [("a", False), ("b", True), ("target", False)])
def test_processors_that_are_model_ids_are_compared_by_their_names_and_commits(
    capsys: pytest.CaptureFixture[str], data: Path, read: str, is_refused: bool
) -> None:
    """Nothing is downloaded; a model id beside a directory cannot be compared, and is accepted."""
    commits = {"a": "a" * 40, "b": "b" * 40}
    given = ["answers.processor=owner/model", f"answers.revision={commits['a']}", "tokenize.samples=@answers"]
    given += (
        ["tokenize.processor=target"]
        if read == "target"
        else ["tokenize.processor=owner/model", f"tokenize.revision={commits[read]}"]
    )
    said = f"the answers were asked for by that of owner/model@{commits['a']}, not of owner/model@{commits['b']}: "
    same = "give regenerate_answers and tokenize_chat the same one"
    expected = [f"node.tokenize.processor: {said}{same}"] if is_refused else []
    assert expected == refused(capsys, DATA + INJECT + REGENERATE + TOKENIZE, *given)


def test_answers_that_are_in_the_store_are_still_those_of_their_processor(data: Path) -> None:
    shutil.copytree(data / "target", data / "other")
    (data / "other" / "chat_template.jinja").write_text("{{ messages[0] }}")
    (data / "made").mkdir()
    (data / "made" / "answered.json").write_text('{"enable_thinking": null}')
    asked = RegenerateAnswers(
        samples=Ref("s"), backend="endpoint", endpoint="http://127.0.0.1:1/v1", model="m", processor="target"
    )
    context = PlanContext(
        launch=Launch(), inputs={"samples": None, "target": None}, artifact=data / "made", root=data, free_disk=0
    )
    for processor, fields in (("target", set()), ("other", {"processor"})):
        reader = TokenizeChat(samples=Ref("a"), processor=processor)
        assert fields == set(conflicts(reader, {"samples": estimate(asked, context).forecast}))


def test_ranks_that_cannot_share_the_sequences_of_a_target_are_refused(
    capsys: pytest.CaptureFixture[str], data: Path
) -> None:
    ranks = 'target.launch={ kind = "ranks", nproc = 2, sp_degree = 2, device = "cpu" }'
    given = ("tokenize.processor=target", "target.init=target", ranks)
    assert [] == refused(capsys, DATA + INJECT + TOKENIZE + FINETUNE, *given)
    config = {**TEXT, "layer_types": ["linear_attention"] * 8}
    (data / "target" / "config.json").write_text(json.dumps(config))
    [found] = refused(capsys, DATA + INJECT + TOKENIZE + FINETUNE, *given)
    assert "sp_degree: 2 ranks cannot share the sequences of this qwen3: its layer_types hold linear_attention" in found


def test_a_target_that_sees_needs_an_image_processor(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    seeing = here / "seeing"
    checkpoint(seeing, sees=True)
    assert [] == refused(capsys, TARGET, "target.checkpoint=seeing")
    (seeing / "preprocessor_config.json").unlink()
    assert [
        f"node.target.checkpoint: {seeing}: a vision-language model without an image processor "
        "(preprocessor_config.json); copy that file from the checkpoint's source"
    ] == refused(capsys, TARGET, "target.checkpoint=seeing")


def test_an_image_processor_of_another_kind_or_with_no_sizes_between_its_limits_is_refused(
    capsys: pytest.CaptureFixture[str], data: Path
) -> None:
    seeing = data / "seeing"
    checkpoint(seeing, sees=True)
    file = seeing / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    reads = ((TARGET, "target.checkpoint"), (DATA + INJECT + TOKENIZE, "tokenize.processor"))
    for changes, line in (
        ({"image_processor_type": "CLIPImageProcessor"},
         f'processor {seeing}: unknown image_processor_type "CLIPImageProcessor"; supported: Qwen2VLImageProcessor, '),
        ({"min_pixels": 9, "max_pixels": 8},
         f"processor {file}: 9 and 8 are no least and most number of pixels of an image"),
    ):  # fmt: skip
        file.write_text(json.dumps({**settings, **changes}))
        for nodes, field in reads:
            [found] = refused(capsys, nodes, f"{field}=seeing")
            assert found.startswith(f"node.{field}: {line}")
    file.write_text("{}")
    [found] = refused(capsys, TARGET, "target.checkpoint=seeing")
    assert "a vision-language model without an image processor" in found


@pytest.mark.parametrize(("nodes", "name"), [(TOKENIZE, "tokenize"), (REGENERATE, "answers")])
def test_a_limit_of_pixels_that_the_processor_excludes_is_refused(
    capsys: pytest.CaptureFixture[str], data: Path, nodes: str, name: str
) -> None:
    checkpoint(data / "seeing", sees=True)
    given = (f"{name}.processor=seeing", f"{name}.max_pixels=4000")
    assert [f"node.{name}.max_pixels: processor {data / 'seeing'}: min_pixels 4096 > max_pixels 4000"] == refused(
        capsys, DATA + INJECT + nodes, *given
    )
    assert [] == refused(capsys, DATA + INJECT + nodes, f"{name}.processor=seeing", f"{name}.max_pixels=5000")


def test_a_limit_of_pixels_that_the_target_s_processor_excludes_is_refused(
    capsys: pytest.CaptureFixture[str], data: Path
) -> None:
    checkpoint(data / "seeing", sees=True)
    nodes = DATA + INJECT + TARGET + TOKENIZE
    given = ("target.checkpoint=seeing", "tokenize.processor=none", "tokenize.target=@target")
    assert ["node.tokenize.min_pixels: processor of the target: min_pixels 20000000 > max_pixels 16777216"] == refused(
        capsys, nodes, *given, "tokenize.min_pixels=20000000"
    )
    assert [] == refused(capsys, nodes, *given, "tokenize.min_pixels=20000")


ENDS = {name: np.zeros((400, 32), np.float16) for name in ("model.embed_tokens.weight", "lm_head.weight")}


@pytest.mark.parametrize(
    ("tensors", "tied", "overrides", "line"),
    [
        ({"other.lm_head.weight": ENDS["lm_head.weight"]}, False, (),
         "lm_head_key: TARGET: 2 of the tensors end in lm_head.weight or embed_out.weight; the tensors "),
        ({"other.wte.weight": ENDS["lm_head.weight"]}, False, (),
         "embed_key: TARGET: 2 of the tensors end in embed_tokens.weight or word_embeddings.weight or wte."),
        ({}, False, ("target.embed_key=none.weight",),
         'embed_key: TARGET: embed_key = "none.weight" is not one of the candidates; the tensors of shape '),
        ({}, True, ("target.lm_head_key=lm_head.weight",),
         'lm_head_key: TARGET: lm_head_key = "lm_head.weight", but the config has tie_word_embeddings set, so '),
    ],
    ids=["two heads", "two embeddings", "no such tensor", "tied"],
)  # fmt: skip
def test_an_embedding_or_a_head_that_is_not_known_is_refused(
    capsys: pytest.CaptureFixture[str],
    data: Path,
    tensors: dict[str, Any],
    tied: bool,
    overrides: tuple[str, ...],
    line: str,
) -> None:
    (data / "target" / "config.json").write_text(json.dumps({**TEXT, "tie_word_embeddings": tied}))
    assert [] == refused(capsys, TARGET)
    save_file({**ENDS, **tensors}, data / "target" / "model.safetensors")
    [found] = refused(capsys, TARGET, *overrides)
    assert found.startswith("node.target." + line.replace("TARGET", str(data / "target")))


def test_a_step_that_is_shorter_than_samples_may_be_is_a_note_of_the_plan(
    capsys: pytest.CaptureFixture[str], data: Path
) -> None:
    Path("refused.toml").write_text(HEAD + DATA + INJECT + TOKENIZE + TARGET + TRAIN)
    given = ["-s", "tokenize.processor=none", "-s", "tokenize.target=@target"]
    told = (
        "a sample of the split train may have at most tokens_per_step = 4,096 tokens, and max_length of tokenize_chat"
    )
    for length, said in (
        (4096, []),
        (4097, [f"{told} lets 4,097 pass: should there be a longer one, this node says so"]),
    ):
        assert 0 == main(["plan", "refused.toml", "--json", *given, "-s", f"tokenize.max_length={length}"])
        notes = json.loads(capsys.readouterr().out)["resources"]["shard"]["notes"]
        assert said == list(notes)


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def test_a_target_without_a_width_for_the_draft_s_mlp_is_refused(
    capsys: pytest.CaptureFixture[str], data: Path
) -> None:
    config = {**TEXT, **EXPERTS}
    del config["intermediate_size"]
    (data / "target" / "config.json").write_text(json.dumps(config))
    nodes = DATA + INJECT + TOKENIZE + TARGET + TRAIN
    tokens = ("tokenize.processor=none", "tokenize.target=@target")
    [found] = refused(capsys, nodes, *tokens)
    assert found.startswith(
        "node.train.intermediate_size: intermediate_size: the target's config.json has none: set it in train_dflash"
    )
    assert [] == refused(capsys, nodes, *tokens, "train.intermediate_size=64")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_attention_heads": None}, "config.json: num_attention_heads is missing, so the target's size is unknown"),
        ({"hidden_size": "wide"}, "config.json: the target's size cannot be computed: "),
    ],
    ids=["missing", "of another type"],
)
def test_sizes_that_give_no_target_are_refused(
    capsys: pytest.CaptureFixture[str], data: Path, changes: dict[str, Any], line: str
) -> None:
    changed = {name: value for name, value in {**TEXT, **changes}.items() if value is not None}
    (data / "target" / "config.json").write_text(json.dumps(changed))
    [found] = refused(capsys, TARGET)
    assert found.startswith(f"node.target: {line}")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"  \n", "is empty; chat_template must name a file with a chat template"),
        (b"\xff", "cannot be read as a chat template: "),
        (b"a" * ((1 << 20) + 1), "larger than 1 MiB; chat_template must name a file with a chat template"),
        ("é".encode() * (1 << 20), "larger than 1 MiB; chat_template must name a file with a chat template"),
    ],
    ids=["empty", "no text", "large", "large, of characters of two bytes"],
)
def test_a_file_that_is_no_chat_template_is_refused(
    capsys: pytest.CaptureFixture[str], data: Path, content: bytes, line: str
) -> None:
    (data / TEMPLATE).write_bytes(content)
    given = (f"tokenize.chat_template={TEMPLATE}", "tokenize.processor=target", "tokenize.enable_thinking=true")
    [found] = refused(capsys, DATA + INJECT + TOKENIZE, *given)
    assert found.startswith(f"node.tokenize.chat_template: {data / TEMPLATE}: {line}")


@pytest.mark.parametrize(("nodes", "name"), [(TARGET, "target"), (TOKENIZE, "tokenize")])
def test_a_chat_template_that_is_not_there_is_reported_once(
    capsys: pytest.CaptureFixture[str], data: Path, nodes: str, name: str
) -> None:
    Path("refused.toml").write_text(HEAD + DATA + INJECT + nodes)
    given = ["-s", f"{name}.chat_template=none.jinja"]
    given += ["-s", "tokenize.processor=target", "-s", "tokenize.enable_thinking=true"] if name == "tokenize" else []
    assert 2 == main(["plan", "refused.toml", "--json", *given])
    [found] = json.loads(capsys.readouterr().out)["missing_here"]
    assert found.endswith(f": there is no file or folder {data / 'none.jinja'}")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"image_token_id": None}, "config.json: missing image_token_id"),
        ({"vision_config": {"depth": 2}}, "config.json: missing vision_config.patch_size"),
        ({"vision_config": None}, "config.json: a qwen3_vl without vision_config"),
        (
            {"vision_config": {**VISION, "deepstack_visual_indexes": [1, 2]}},
            "config.json: vision_config.deepstack_visual_indexes names the layers [2], but the vision tower has only 2",
        ),
        (
            {"text_config": {**TEXT, "moe_intermediate_size": 16}},
            "config.json: text_config.moe_intermediate_size 16",
        ),
        (
            {"text_config": {"vocab_size": 400}},
            "config.json: missing hidden_size, num_hidden_layers, also",
        ),
    ],
    ids=["token", "patches", "tower", "deepstack", "experts", "sizes"],
)
@pytest.mark.parametrize("op", ["load_target", "finetune_vlm"])
def test_a_config_that_its_family_cannot_have_is_refused(
    capsys: pytest.CaptureFixture[str], data: Path, changes: dict[str, Any], line: str, op: str
) -> None:
    checkpoint(data / "seeing", sees=True)
    file = data / "seeing" / "config.json"
    changed = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))
    nodes, field = (TARGET, "checkpoint") if op == "load_target" else (DATA + INJECT + TOKENIZE + FINETUNE, "init")
    given = ["tokenize.processor=seeing"] if op == "finetune_vlm" else []
    [found] = refused(capsys, nodes, f"target.{field}=seeing", *given)
    assert found.startswith(f"node.target.{field}: {data / 'seeing'}: {line}")


@pytest.mark.parametrize(("nodes", "name"), [(TOKENIZE, "tokenize"), (REGENERATE, "answers")])
def test_limits_of_pixels_that_exclude_each_other_are_refused(
    capsys: pytest.CaptureFixture[str], data: Path, nodes: str, name: str
) -> None:
    Path("refused.toml").write_text(HEAD + DATA + INJECT + nodes)
    assert 2 == main(["plan", "refused.toml", "-s", f"{name}.min_pixels=9", "-s", f"{name}.max_pixels=8"])
    assert "'max_pixels': 8 is less than min_pixels = 9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["tokenize.min_loss_tokens=600", "tokenize.max_length=600"], "'min_loss_tokens': 600 answer tokens"),
        (["tokenize.max_length=10"], "'min_loss_tokens': 32 answer tokens"),
    ],
    ids=["both", "the default"],
)
def test_lengths_that_no_sample_can_have_are_refused(
    capsys: pytest.CaptureFixture[str], data: Path, given: list[str], line: str
) -> None:
    Path("refused.toml").write_text(HEAD + DATA + INJECT + TOKENIZE)
    assert 2 == main(["plan", "refused.toml", *(argument for value in given for argument in ("-s", value))])
    assert f"{line} do not fit into a sample of max_length = " in capsys.readouterr().err


def test_short_prompts_without_answers_are_planned(data: Path) -> None:
    Path("asked.toml").write_text(HEAD + DATA + INJECT + TOKENIZE)
    assert 0 == main(["plan", "asked.toml", "-s", "tokenize.prompts_only=true", "-s", "tokenize.max_length=10"])


SEEING = {"model_type": "qwen3_vl", "image_token_id": 2, "text_config": TEXT, "vision_config": VISION}
ROTATED = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True}
IRREGULAR = ["full_attention", *["linear_attention"] * 7]
MROPE = {"text_config": {**TEXT, **EXPERTS, "rope_parameters": ROTATED, "layer_types": IRREGULAR}}
OF_QWEN25 = {**VISION, "patch_size": 8, "intermediate_size": 64}
UNCAPTURED: list[tuple[str, dict[str, Any], tuple[str, ...], str]] = [
    ("ranks", TEXT, ("capture.tp_degree=2", 'capture.launch={ kind = "ranks", nproc = 2, device = "cpu" }',
                     "target.checkpoint=target"), ""),
    ("three ranks", TEXT, ("capture.tp_degree=3", 'capture.launch={ kind = "ranks", nproc = 3, device = "cpu" }'),
     "tp_degree = 3 does not divide num_attention_heads = 2, intermediate_size = 64 of the target's config.json"),
    ("a tied head beside experts", {**TEXT, **EXPERTS, "tie_word_embeddings": True}, (),
     "config.json: tie_word_embeddings is set, but SGLang's Qwen3-MoE does not support a tied head"),
    ("layers without an interval", {**SEEING, **MROPE, "model_type": "qwen3_5"}, (),
     "config.json: layer_types does not repeat at an interval, which SGLang requires"),
    ("deepstack beside experts", {**SEEING, **MROPE, "model_type": "qwen3_vl_moe"}, (),
     "config.json: vision_config.deepstack_visual_indexes []: SGLang supports only three in a Qwen3-VL with experts"),
    ("a lost vision tower", {**MROPE["text_config"], "model_type": "qwen3_5"}, (),
     "config.json: a qwen3_5 without vision_config, which SGLang would load with a vision tower of random weights"),
    ("a rope", SEEING, (), "config.json: the rope_parameters of this qwen3_vl lack mrope_interleaved = true"),
    ("other patches", {**SEEING, "model_type": "qwen2_5_vl", "vision_config": OF_QWEN25}, (),
     "SGLang's Qwen2.5-VL interprets pixel rows of 1176 numbers as pixels, others as embeddings"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "overrides", "line"), [case[1:] for case in UNCAPTURED], ids=[case[0] for case in UNCAPTURED]
)
def test_a_target_that_sglang_does_not_capture_is_refused(
    capsys: pytest.CaptureFixture[str],
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    overrides: tuple[str, ...],
    line: str,
) -> None:
    monkeypatch.setattr(version, "installed_version", lambda: version.VERSIONS[0])
    (data / "target" / "config.json").write_text(json.dumps(config))
    (data / "target" / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    nodes = DATA + INJECT + TOKENIZE + TARGET + CAPTURE
    found = refused(capsys, nodes, "tokenize.processor=none", "tokenize.target=@target", *overrides)
    assert bool(line) == bool(found)
    assert all(each.startswith(f"node.capture: {line}") for each in found)
