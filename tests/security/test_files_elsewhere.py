"""Files of strangers that name others, by a link or by a path: none of the victim's is read, none is written."""

from __future__ import annotations

import ast
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pytest

import ops
from dsl.errors import DataError, ServerError
from dsl.estimate import PlanContext
from dsl.launch import Launch
from dsl.op import Ref
from executor.cli import main
from executor.keys.external_inputs import MOST_PATHS, tree_of
from ops.artifacts import TargetFeatures, TokenShards
from ops.ingest.source import parts_of
from ops.lib.data.image_packs import PackWriter, link_packs, read_packed
from ops.lib.data.token_shards import TokenReader
from ops.lib.target.checkpoint_check import checkpoint_mistakes
from ops.lib.target.feature_shards import FeatureReader
from ops.lib.target.fetch import find_checkpoint
from ops.lib.vision.processor import load_processor
from ops.tokenize_chat.builtin import write_builtin_processor
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.plan import estimate as tokenize_estimate
from ops.tools.serve.chat import post


@pytest.fixture
def processor(tmp_path):
    messages = [[{"role": "user", "content": [{"type": "text", "text": "a"}]}]]
    write_builtin_processor(tmp_path / "processor", messages, 340)
    (tmp_path / "processor" / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "processor" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "private").write_text("[UNK]\nnobody else's\n")
    return tmp_path / "processor"


def both(folder):
    """Load a directory as a processor and as a checkpoint; both must fail. Returns the two error messages."""
    with pytest.raises(DataError) as of_processor:
        load_processor(str(folder))
    with pytest.raises(DataError) as of_checkpoint:
        find_checkpoint(str(folder), None)
    return str(of_processor.value), str(of_checkpoint.value)


def test_a_sound_processor_loads(processor):
    assert load_processor(str(processor)).source == str(processor)


@pytest.mark.parametrize("key", ["vocab_file", "tokenizer_file", "merges_file", "init_inputs"])
def test_a_tokenizers_json_reads_no_file_from_elsewhere(key, processor, tmp_path):
    file = processor / "tokenizer_config.json"
    path = str(tmp_path / "private")
    file.write_text(json.dumps({**json.loads(file.read_text()), key: [path] if key == "init_inputs" else path}))
    assert both(processor) == (f"{file}: {key} names {path}, which lies outside; remove it",) * 2


def test_a_path_of_its_authors_machine_does_no_harm(processor):
    file = processor / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "special_tokens_map_file": "/fsx/there/map.json"}))
    assert load_processor(str(processor)).source == str(processor)


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "additional_chat_templates/x.jinja", "additional_chat_templates"]
)
def test_a_link_out_of_a_processor_is_not_read(name, processor, tmp_path):
    link = processor / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path / "private" if link.suffix else tmp_path)
    assert all(f"{link}: a link out of the checkpoint" in said for said in both(processor))


def test_an_index_names_no_shard_elsewhere(processor, tmp_path):
    (processor / "model.safetensors").rename(tmp_path / "private.safetensors")
    index = processor / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../private.safetensors"}}))
    said = f"{index}: names ../private.safetensors, which is no file of this directory; copy or download it again"
    assert said in checkpoint_mistakes(processor)


@pytest.mark.parametrize("name", ["pipeline.toml", "dflow.schema.json"])
def test_init_writes_through_no_link(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).symlink_to(tmp_path / "private")
    (tmp_path / "data" / "d.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 12)
    monkeypatch.chdir(tmp_path / "data")
    main(["init", "d.jsonl"])
    assert not (tmp_path / "private").exists()
    main(["init", "d.jsonl", "--force"])
    assert not (tmp_path / "private").exists()
    assert (tmp_path / "data" / name).is_file() and not (tmp_path / "data" / name).is_symlink(), capsys.readouterr()


def test_a_proxy_or_a_redirect_gets_no_key_of_a_server_of_this_machine(monkeypatch):
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append((self.path, self.headers["Authorization"]))
            self.send_response(307)
            self.send_header("Location", f"http://127.0.0.1:{server.server_port}/elsewhere")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        with pytest.raises(ServerError):
            post(f"http://127.0.0.1:{server.server_port}/v1", {}, key="open-sesame")
        server.shutdown()
    assert seen == [("/v1", "Bearer open-sesame")]


def named(state, name):
    state["_data_files"][0]["filename"] = name


@pytest.mark.parametrize("name", ["../private.arrow", "/dev/zero", "", 5])
def test_an_arrow_data_set_names_no_file_elsewhere(name, tmp_path):
    saved = tmp_path / "saved"
    datasets.Dataset.from_list([{"id": "a"}]).save_to_disk(saved)
    next(saved.glob("*.arrow")).rename(tmp_path / "private.arrow")
    state = json.loads((saved / "state.json").read_text())
    named(state, name)
    (saved / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=r"state.json: '.*' is no file or folder beside it"):
        list(parts_of(saved, "arrow"))


def test_divisions_of_an_arrow_data_set_lie_in_it(tmp_path):
    datasets.Dataset.from_list([{"id": "a"}]).save_to_disk(tmp_path / "private")
    datasets.DatasetDict(train=datasets.Dataset.from_list([{"id": "b"}])).save_to_disk(tmp_path / "saved")
    assert ["train"] == [part.name for part in parts_of(tmp_path / "saved", "arrow")]
    (tmp_path / "saved" / "link").symlink_to("../private")
    for name in ("../private", "link"):
        (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
        with pytest.raises(DataError, match="is no file or folder beside it"):
            list(parts_of(tmp_path / "saved", "arrow"))


def test_a_data_file_that_leads_out_of_its_folder_is_refused_but_for_the_cache_of_the_hub(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "af").write_text("{}")
    for folder in ("data", "snapshots/commit"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "rows.jsonl").symlink_to(os.path.relpath(tmp_path / "blobs" / "af", tmp_path / folder))
    assert 1 == len(list(parts_of(tmp_path / "snapshots" / "commit", "json")))
    with pytest.raises(DataError, match=r"rows\.jsonl: is a link that leads out of"):
        list(parts_of(tmp_path / "data", "json"))


def test_folders_that_link_to_each_other_2_to_the_n_times_are_refused(tmp_path):
    for number in range(40):
        (tmp_path / str(number)).mkdir()
        for name in "ab":
            (tmp_path / str(number) / name).symlink_to(f"../{number + 1}")
    (tmp_path / "40").mkdir()
    with pytest.raises(DataError, match=f"links lead to this folder by more than {MOST_PATHS} ways"):
        tree_of(tmp_path / "0")


OPENED_BY = "artifact_file"  # of ops/lib/data/files.py
NAMING_FILES = {"pack", "file", "shard"}  # the fields by which an artifact's JSON names files, see ops/artifacts.py
OTHER_MEANINGS = {("ops/evaluate/page.py", "file")}  # an order of the prompts on a page


def read_image(folder, name):
    reference = PackWriter(folder / "made").add(b"encoded")
    read_packed(folder, {**reference, "pack": name})


def read_tokens(folder, name):
    (folder / "tokens.json").write_text("{}")
    row = {"split": "train", "shard": name, "row": 0, "id": "a", "category": "text", "prompt_tokens": 1}
    (folder / "samples.jsonl").write_text(json.dumps(row))
    TokenReader(TokenShards(folder, "digest")).sample(0)


def read_features(folder, name):
    shard = {"file": name, "split": "train", "samples": 1, "tokens": 1}
    info = {"target_layer_ids": [0], "hidden_size": 1, "dtype": "float32", "shards": [shard]}
    (folder / "features.json").write_text(json.dumps(info))
    FeatureReader(TargetFeatures(folder, "digest"), "train")


def estimate_tokens(folder, name):
    shard = {"file": name, "split": "train", "samples": 1, "tokens": 1}
    (folder / "tokens.json").write_text(json.dumps({"vocab_size": 1, "shards": [shard]}))
    context = PlanContext(launch=Launch(), inputs={"samples": None}, artifact=folder, root=folder, free_disk=1)
    tokenize_estimate(TokenizeChat(samples=Ref("samples")), context)


@pytest.mark.parametrize("read", [read_image, read_tokens, read_features, estimate_tokens])
@pytest.mark.parametrize("name", ["../private", "/dev/zero", "pipe", "linked", "folder", "", "..", "none", 5, "a\0b"])
def test_an_artifacts_json_names_no_file_but_a_plain_one_beside_it(read, name, tmp_path):
    """The last node that wrote such a picture into its previews sent it with the next push."""
    folder = tmp_path / "artifact"
    (folder / "made").mkdir(parents=True)
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    private = tmp_path / "private"
    private.write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "linked").symlink_to(private)
    plain = isinstance(name, str) and name in {"pipe", "linked", "folder", "none"}
    with pytest.raises(DataError) as refused:
        read(folder, name)
    said = str(refused.value)
    if plain:
        assert said.startswith(f"{folder / name}: ")
        assert ("is no regular file but a link, a folder or a device" in said) is (name != "none")
    else:
        assert f"{folder}: {name!r} is no plain name of a file of this artifact; verify the store" == said


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"sha256": "0" * 64}, r"at 7\+5 is another image than 0000"),
        ({"offset": 0, "size": 12}, r"at 0\+12 is another image than "),
        ({"offset": -1}, r"-1\+5 is no place of an image"),
        ({"size": -1}, r"7\+-1 is no place of an image"),
        ({"size": 1 << 40}, r"7\+1099511627776 is no place of an image"),
        ({"size": "5"}, r"7\+'5' is no place of an image"),
    ],
)
def test_a_pack_gives_only_the_image_that_was_put_into_it(changed, said, tmp_path):
    packs = PackWriter(tmp_path)
    packs.add(b"private")
    reference = packs.add(b"image")
    assert b"image" == read_packed(tmp_path, reference)
    with pytest.raises(DataError, match=said):
        read_packed(tmp_path, {**reference, **changed})


def test_a_linked_pack_is_not_passed_on(tmp_path):
    (tmp_path / "private").write_text("nobody else's")
    for name in ("in", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "in" / "images-00000.bin").symlink_to(tmp_path / "private")
    with pytest.raises(DataError, match="is no regular file but a link"):
        link_packs(tmp_path / "in", tmp_path / "out")
    assert [] == list((tmp_path / "out").iterdir())


def test_one_function_opens_every_file_that_an_artifacts_json_names():
    """A field that names a file is read only as an argument of that function, and no path is joined with a value that
    is taken out of an object by its name.
    """
    escaping, reads = [], 0
    for file in sorted(Path(ops.__file__).parent.rglob("*.py")):
        place = file.relative_to(Path(ops.__file__).parents[1]).as_posix()
        tree = ast.parse(file.read_text("utf-8"))
        written = {id(key) for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys}
        opened = {
            id(argument.slice)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == OPENED_BY
            for argument in node.args
            if isinstance(argument, ast.Subscript)
        }
        for node in ast.walk(tree):
            names = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NAMING_FILES
            if names and id(node) not in written | opened and (place, node.value) not in OTHER_MEANINGS:
                escaping.append(f"{place}:{node.lineno}: {node.value}")
            reads += names and id(node) in opened
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and joins_a_member(node.right):
                escaping.append(f"{place}:{node.lineno}: {ast.unparse(node)}")
    ratios = ["ops/evaluate/figures.py", "ops/evaluate/summary.py", "ops/lib/target/head_settings.py"]
    assert ratios == [each.split(":")[0] for each in escaping]
    assert 7 == reads


def joins_a_member(right):
    return any(
        (isinstance(each, ast.Subscript) and isinstance(each.slice, ast.Constant) and isinstance(each.slice.value, str))
        or (isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == "get")
        for each in ast.walk(right)
    )
