"""Files of strangers that name others, by a link or by a path: none of the victim's is read, none is written."""

from __future__ import annotations

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import datasets
import pytest

from dsl.errors import DataError, ServerError
from executor.cli import main
from executor.keys.external_inputs import MOST_PATHS, tree_of
from ops.ingest.source import parts_of
from ops.lib.target.fetch import find_checkpoint
from ops.lib.vision.processor import load_processor
from ops.tokenize_chat.builtin import write_builtin_processor
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
    """Each way to a directory: as a processor, and as a checkpoint."""
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
