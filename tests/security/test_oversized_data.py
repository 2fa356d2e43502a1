"""Data of people whom nobody knows that is larger than it looks: lines, tables, ids and nesting."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import re
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import datasets
import numpy as np
import pyarrow
import pytest
from fake_stage import FakeStage
from peak_memory import peak_memory
from PIL import Image
from pyarrow import parquet
from toy_ops import Toy

from dsl import files
from dsl.errors import DataError, ServerError, StoreError, TransientError
from dsl.estimate import PlanContext, Trial
from dsl.files import LineReader, read_json_or_none, read_object_or_none
from dsl.launch import Launch
from executor.maintenance.remote import MOST_BYTES, Remote
from ops.artifacts import TokenShards
from ops.evaluate.benchmark_rows import Benchmark, checked_rows
from ops.evaluate.op import Evaluate
from ops.evaluate.plan import estimate
from ops.ingest import compressed, tables
from ops.ingest.op import Ingest
from ops.ingest.records import LONGEST
from ops.ingest.rows import LONGEST_ID
from ops.ingest.run import ingest
from ops.lib.data.files import LARGEST_JSON, LONGEST_ROW
from ops.lib.data.image_packs import MAX_IMAGE_BYTES, PackWriter
from ops.lib.data.limited_process import memory_limit
from ops.lib.data.sample_account import Unusable
from ops.lib.data.token_shards import TokenReader
from ops.lib.target.checkpoint_check import checkpoint_mistakes
from ops.lib.target.sizes import TargetSizes
from ops.lib.vision.chat_template import CORRECT_IT
from ops.lib.vision.chat_template import LONGEST as LONGEST_TEMPLATE
from ops.lib.vision.images import MOST_SCANS, SCAN, UNDECODABLE, fault_of
from ops.lib.vision.processor import load_processor
from ops.regenerate_answers.client import LARGEST_ANSWER, ChatClient
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.sampling import Sampling
from ops.tokenize_chat import encode
from ops.tokenize_chat.answer_spans import render_answers
from ops.tokenize_chat.builtin import write_builtin_processor
from ops.tokenize_chat.encode import MOST_CHARACTERS, TOO_MANY_CHARACTERS, ChatEncoder
from ops.tokenize_chat.template import ANSWER_NOT_FOUND, Template
from ops.tools.init.survey import Counter, image_size, survey
from ops.tools.serve.chat import post

TURNS = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This one."}]
DEEP = '{"a":' * 200_000
READABLE = "[" * 900 + "]" * 900
PIPELINE = """
[pipeline]
name = "strangers"

[node.ingest]
op = "ingest"
source = "samples.jsonl"
"""


def read(source, folder, **options):
    """Ingest a source file. Returns the ids of the samples kept. Raises DataError."""
    stage = FakeStage(folder / "stage")
    ingest(Ingest(source=str(source), seed=0, **options), stage)
    return [json.loads(line)["id"] for line in (stage.out_dir / "samples.jsonl").read_text().splitlines()]


def test_a_row_of_a_received_artifact_is_refused_by_file_and_line(tmp_path):
    artifact = TokenShards(tmp_path, "digest")
    (tmp_path / "tokens.json").write_text("{}")
    rows = tmp_path / "samples.jsonl"
    for row, why in (
        (DEEP, "nested too deeply"),
        ("[]", "not a JSON object but a list"),
        ("{", "broken JSON at column 2"),
    ):
        rows.write_text(f'{{"split": "train"}}\n{row}\n')
        with pytest.raises(DataError, match=rf"samples\.jsonl:2: .*{why}"):
            TokenReader(artifact)
    rows.write_text('{"split": "')
    with rows.open("r+b") as file:
        file.truncate(1 << 30)  # takes no space
    with memory_limit(3 * LONGEST_ROW), pytest.raises(DataError, match=r"samples\.jsonl:1: longer than 256 MiB"):
        TokenReader(artifact)


@pytest.mark.parametrize("begin", ['{"id": "', '[\n{"id": "'], ids=["a line", "an element of an array"])
def test_a_sample_of_a_gigabyte_is_refused_by_name_without_reading_it(tmp_path, begin):
    path = tmp_path / "samples.jsonl"
    path.write_text(begin)
    with path.open("r+b") as file:
        file.truncate(1 << 30)  # takes no space
    for attempt in (lambda: read(path, tmp_path), lambda: checked_rows(Benchmark(path))):
        with memory_limit(8 * LONGEST), pytest.raises(DataError, match=rf"{path.name}:[12]: .*longer than 64 MiB"):
            attempt()


def test_files_of_a_store_that_are_larger_than_any_are_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE", 1 << 20)
    monkeypatch.setattr(files, "LARGEST", 1 << 20)
    lines, whole = tmp_path / "events.jsonl", tmp_path / "manifest.json"
    lines.write_text('{"a": 1}\n{"b": "')
    whole.write_text('{"a": "')
    for path in (lines, whole):
        with path.open("r+b") as file:
            file.truncate(300 << 20)
    with lines.open("ab") as file:
        file.write(b'"}\n{"c": 3}\n{"d"')
    with memory_limit(100 << 20):
        reader = LineReader(lines)
        assert reader.read() == [{"a": 1}, {"c": 3}]
        with lines.open("ab") as file:
            file.write(b": 4}\n")
        assert reader.read() == [{"d": 4}]
        assert read_object_or_none(whole) is None
        with pytest.raises(ValueError, match="larger than 1 MiB"):
            read_json_or_none(whole)


def write_values(file, text, rows):
    """Write a small Parquet file of many rows: each is the same conversation, whose texts are stored once."""
    roles = pyarrow.array(["user", "assistant"] * rows)
    texts = pyarrow.DictionaryArray.from_arrays(np.zeros(2 * rows, np.int32), [text])
    turns = pyarrow.StructArray.from_arrays([roles, texts], ["role", "content"])
    messages = pyarrow.ListArray.from_arrays(np.arange(0, 2 * rows + 1, 2, np.int32), turns)
    parquet.write_table(pyarrow.table({"messages": messages}), file, compression="zstd", store_schema=False)


def test_a_parquet_file_that_unpacks_to_100_gigabytes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MOST_MEMORY", 256 << 20)
    write_values(tmp_path / "a.parquet", "x" * (8 << 20), 7000)
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    with memory_limit(1 << 30), pytest.raises(DataError, match=r"a\.parquet: .* a few of its rows need more than"):
        read(tmp_path / "a.parquet", tmp_path)


def test_a_parquet_row_with_a_list_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MOST_MEMORY", 256 << 20)
    count = 5_000_000
    names = pyarrow.DictionaryArray.from_arrays(np.zeros(count, np.int32), ["x" * 100])
    images = pyarrow.ListArray.from_arrays(np.array([0, count], np.int32), names)
    parquet.write_table(pyarrow.table({"images": images}), tmp_path / "a.parquet", store_schema=False)
    with memory_limit(1 << 30), pytest.raises(DataError, match=r"a\.parquet: .* a few of its rows need more than"):
        read(tmp_path / "a.parquet", tmp_path)


def test_a_table_has_no_more_rows_and_bytes_than_its_size_can_mean(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MOST_ROWS", 1000)
    write_values(tmp_path / "rows.parquet", "x", 50_000)
    with pytest.raises(DataError, match=r"row \d+: \d+ bytes unpack to 50000 rows"):
        read(tmp_path / "rows.parquet", tmp_path)
    monkeypatch.setattr(compressed, "UNPACKED", 16 << 20)
    write_values(tmp_path / "bytes.parquet", "x" * 100_000, 900)
    with pytest.raises(DataError, match=r"row \d+: \d+ bytes unpack to 900 rows, and to \d+ bytes so far"):
        read(tmp_path / "bytes.parquet", tmp_path)


def test_an_arrow_file_that_unpacks_to_gigabytes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MOST_MEMORY", 256 << 20)
    folder = tmp_path / "arrow"
    datasets.Dataset.from_list([{"id": "a", "messages": TURNS}]).save_to_disk(folder)
    (file,) = folder.glob("*.arrow")
    with pyarrow.ipc.open_stream(file.read_bytes()) as stream:
        rows = stream.read_all()
    large = rows.set_column(0, "id", pyarrow.array(["x" * (300 << 20)]))
    with pyarrow.ipc.new_stream(file, rows.schema, options=pyarrow.ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_table(large.cast(rows.schema))
    assert file.stat().st_size < 1 << 20
    del rows, large
    pyarrow.default_memory_pool().release_unused()
    # Where this process has room from earlier tests, the text fits and is refused for its length
    refused = r"arrow: (cannot be read as an Arrow data set: a few of|row 1: \"id\" has 314572800 characters)"
    with memory_limit(1 << 30), pytest.raises(DataError, match=refused):
        read(folder, tmp_path)


def test_a_parquet_text_that_is_no_utf_8_is_refused(tmp_path):
    broken = pyarrow.StringArray.from_buffers(1, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe"))
    parquet.write_table(pyarrow.table({"id": broken}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as Parquet: .*UTF8"):
        read(tmp_path / "a.parquet", tmp_path)


@pytest.mark.parametrize("sample_id", ["9" * 100_000, '"%s"' % ("x" * 100_000), READABLE], ids=["int", "text", "deep"])
def test_an_id_of_100000_characters_is_a_mistake_of_its_line(tmp_path, sample_id):
    path = tmp_path / "samples.jsonl"
    path.write_text(f'{{"id": {sample_id}, "messages": {json.dumps(TURNS)}}}\n')
    with pytest.raises(DataError, match=r"samples\.jsonl:1: ") as raised:
        read(path, tmp_path)
    assert len(str(raised.value)) < 1000
    rows = pyarrow.Table.from_pylist([{"id": "x" * (LONGEST_ID + 1), "messages": TURNS}])
    parquet.write_table(rows, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=f'row 1: "id" has {LONGEST_ID + 1} characters'):
        read(tmp_path / "a.parquet", tmp_path)


@pytest.mark.parametrize("key", ["id", "split", "image", "images", "system", "label", "other", "messages"])
@pytest.mark.parametrize("deep", [READABLE, '{"a":' * 900 + "1" + "}" * 900])
def test_nesting_that_can_just_be_read_is_a_mistake_or_ignored(tmp_path, key, deep):
    path = tmp_path / "samples.jsonl"
    row = {"id": "a", "messages": TURNS, key: "@"}
    path.write_text(json.dumps(row).replace('"@"', deep) + "\n")
    try:
        assert read(path, tmp_path) == ["a"]
    except DataError as error:
        assert str(error).startswith(f"{path}:1: ") and len(str(error)) < 1000


def test_a_run_names_the_line_that_is_nested_too_deeply(tmp_path):
    toy = Toy(tmp_path, PIPELINE)
    (tmp_path / "samples.jsonl").write_text(f"{json.dumps({'messages': TURNS})}\n{DEEP}\n")
    for command in ("plan", "run"):
        result = toy.dflow(command, str(toy.file))
        assert "Traceback" not in result.stdout + result.stderr
    assert result.returncode == 1
    assert "samples.jsonl:2: broken JSON: nested too deeply" in result.stdout + result.stderr


NAMES = ("config", "generation_config", "tokenizer", "tokenizer_config", "preprocessor_config", "chat_template")


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 500 + "1" + "}" * 500, "[]"], ids=["too deep", "deep", "a list"])
def test_a_checkpoints_json_that_libraries_cannot_read_is_refused_by_name(tmp_path, text):
    for name in NAMES:
        folder = tmp_path / name
        write_builtin_processor(folder, [[{"role": "user", "content": [{"type": "text", "text": "a"}]}]], 340)
        (folder / f"{name}.json").write_text(text)
        with pytest.raises(DataError, match=rf"{name}\.json:(1:1:)? .*(nested too deeply|not a JSON object)"):
            load_processor(str(folder))


def test_a_servers_answer_that_is_nested_too_deeply_is_no_answer():
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))  # else closing resets the connection
            self.send_response(200)
            self.end_headers()
            self.wfile.write(DEEP.encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ServerError, match="nested too deeply"):
            post(f"http://127.0.0.1:{server.server_port}", {})
        server.shutdown()


@pytest.mark.parametrize(
    ("encoding", "said"), [("", "an answer of more than 64 MiB"), ("gzip", "content encoding gzip, not asked for")]
)
def test_an_answer_of_more_than_64_mib_is_not_read_to_its_end_and_a_packed_one_is_not_unpacked(encoding, said):
    answer = bytes(LARGEST_ANSWER + (1 << 20))
    packed = gzip.compress(answer) if encoding else answer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            if encoding:
                self.send_header("Content-Encoding", encoding)
            self.send_header("Content-Length", str(len(packed)))
            self.end_headers()
            self.wfile.write(packed)

        def log_message(self, *_):
            pass

    async def ask(url):
        server = {"backend": "endpoint", "endpoint": url, "model": "served", "processor": "unused", "retries": 0}
        async with ChatClient.of(RegenerateAnswers(samples="@samples", **server), Sampling(), print) as client:
            await client.complete([], None)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(TransientError, match=said):
            asyncio.run(ask(f"http://127.0.0.1:{server.server_port}/v1"))
        server.shutdown()


def test_a_benchmark_that_was_broken_since_the_trial_is_named_by_file_and_line(tmp_path):
    file = tmp_path / "benchmark.jsonl"
    trial = Trial(config=Evaluate(tokens="@t", target="@t", draft="@d"), artifact=tmp_path, inputs={})
    config = Evaluate(tokens="@t", target="@t", draft="@d", benchmark=str(file))
    context = PlanContext(
        launch=Launch(),
        inputs=dict.fromkeys(("tokens", "target", "draft")),
        artifact=None,
        root=tmp_path,
        free_disk=0,
        trial=trial,
    )
    for line in ("[1]", "{}", DEEP):
        file.write_text(f'{{"category": "math"}}\n{line}\n')
        with pytest.raises(DataError, match=r"benchmark\.jsonl:2: "):
            estimate(config, context)


def test_parts_and_duplicates_take_linear_time(tmp_path):
    started = time.process_time()  # which no other process prolongs
    parts = [{"type": "text", "text": "x" * 50}] * 100_000
    rows = [{"id": "a", "messages": TURNS}] * 30_000
    rows[0] = {"id": "a", "messages": [{"role": "user", "content": parts}, TURNS[1]]}
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert read(path, tmp_path, duplicate_ids="number")[-1] == "a#30000"
    assert time.process_time() - started < 60


PROMPTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}TT{% endif %}"
    "{{ m.content[0].text }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\nTT{% endif %}"
)


def test_blanks_take_linear_time_and_no_sample_uses_up_the_marks(tmp_path):
    started = time.process_time()  # which no other process prolongs
    write_builtin_processor(tmp_path, [[{"role": "user", "content": [{"type": "text", "text": "a"}]}]], 340)
    processor = load_processor(str(tmp_path))
    processor.tokenizer.chat_template = PROMPTS
    template = Template(processor)
    for earlier, last in ((" " * 800_000 + "b", "c"), ("b", "".join(map(chr, range(0xF0000, 0xFFFFE))))):
        turns = [("user", "a"), ("assistant", earlier), ("user", "a"), ("assistant", last)]
        messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
        try:
            assert len(template.finish(render_answers(template.has_marks, messages, last_only=False)).answers) == 2
        except Unusable as error:
            assert error.reason == ANSWER_NOT_FOUND
    assert time.process_time() - started < 60


@pytest.mark.parametrize("size", [10**9, -1, 1e400, "64", [64]])
@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
def test_a_config_with_an_impossible_size_is_refused(name, size):
    config = {"vocab_size": 32, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    sound = {**config, "num_hidden_layers": 2, "model_type": "qwen3"}
    assert 0 < TargetSizes.of(sound).parameters
    with pytest.raises(DataError, match=rf"config.json: the target's size cannot be computed: {name} is "):
        TargetSizes.of({**sound, name: size})


def test_a_text_of_millions_of_blanks_is_dropped_not_tokenised(tmp_path):
    messages = [{"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]
    write_builtin_processor(tmp_path, [messages], 340)
    encoder = ChatEncoder(load_processor(str(tmp_path)), render_seconds=60.0)
    blanks = [{"role": "user", "content": [{"type": "text", "text": " " * MOST_CHARACTERS}]}, messages[1]]
    sound, dropped = encoder.encode_batch([messages, blanks], [(), ()], ["a", "b"])
    assert 0 < sound.loss_tokens
    assert dropped.reason == TOO_MANY_CHARACTERS
    with pytest.raises(Unusable, match=TOO_MANY_CHARACTERS):
        encoder.prompt(blanks[:1], "b")


def test_a_jpeg_of_thousands_of_scans_is_undecodable():
    encoded = io.BytesIO()
    Image.new("RGB", (16, 16)).save(encoded, "JPEG", progressive=True)
    sound = encoded.getvalue()
    begin = sound.index(SCAN)
    scan = sound[begin : sound.index(SCAN, begin + 1)]
    many = sound[:begin] + scan * (MOST_SCANS + 1) + sound[begin:]
    assert ("", "") == fault_of(sound, 1 << 20, 1)
    reason, detail = fault_of(many, 1 << 20, 1)
    assert reason == UNDECODABLE and detail.endswith(f"a JPEG of more than {MOST_SCANS} scans")


MOST_MEMORY = 1536  # MiB, of a process that reads what a stranger wrote
REMOTE = """
import sys
from pathlib import Path
from dsl.errors import StoreError
from executor.maintenance.remote import Remote
remote, key, digest = Remote(sys.argv[1]), "0" * 64, "1" * 64
for read in (lambda: remote.check_format(write=False), lambda: remote.lines(key), lambda: remote.manifest(digest),
             lambda: remote.get("objects/" + digest + "/a", Path(sys.argv[2]), 5)):
    try:
        read()
    except StoreError as error:
        print(error)
"""


def test_a_file_of_a_remote_is_not_read_further_than_dflow_writes_it(tmp_path):
    remote = tmp_path / "remote"
    named = ("format", f"index/{'0' * 64}/{'1' * 64}", f"objects/{'1' * 64}/manifest.json")
    for name in named:
        (remote / name).parent.mkdir(parents=True, exist_ok=True)
        (remote / name).touch()
        os.truncate(remote / name, 3 << 30)
    (remote / "objects" / ("1" * 64) / "a").write_text("small")
    said, peak = peak_memory(REMOTE, remote, tmp_path / "a")
    larger = "is larger than dflow writes it; use another URL, or remove it there"
    assert [f"{remote}: {name} {larger}" for name in named] == said
    assert peak < MOST_MEMORY


def test_many_index_lines_of_a_key_are_no_more_than_a_large_one(tmp_path):
    folder = tmp_path / "index" / ("0" * 64)
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"{number:064x}").touch()
        os.truncate(folder / f"{number:064x}", MOST_BYTES // 2)
    with pytest.raises(StoreError, match=f"{2:064x} is larger than dflow writes it"):
        Remote(str(tmp_path)).lines("0" * 64)


def test_a_body_without_end_is_left(tmp_path):
    class Endless(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200)
            self.end_headers()

        def do_GET(self):
            self.do_HEAD()
            try:
                while True:
                    self.wfile.write(b"1" * (1 << 20))
            except OSError:
                self.close_connection = True

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        said, peak = peak_memory(REMOTE, url, tmp_path / "a")
        server.shutdown()
    larger = "is larger than dflow writes it; use another URL, or remove it there"
    key, digest = "0" * 64, "1" * 64
    assert [f"{url}: {name} {larger}" for name in ("format", f"index/{key}", f"objects/{digest}/manifest.json")] == [
        *said[:3]
    ]
    assert f"{url}: objects/{digest}/a has more than its 5 bytes; push it again" == said[3]
    assert (tmp_path / "a").stat().st_size < 64 << 20
    assert peak < MOST_MEMORY


@pytest.mark.parametrize("read", [read, lambda source, _: survey((source,), Counter.of(None))], ids=["ingest", "init"])
@pytest.mark.parametrize("value", ["abcdefg", b"abcdefg"], ids=["text", "bytes"])
@pytest.mark.parametrize(
    "offsets",
    [(0, 7, 21, 42, 1 << 30), (0, 7, -5, 42, 70), (1 << 29, 7, 21, 42, 70), (-(1 << 31), 7, 21, 42, 70)],
    ids=str,
)
def test_offsets_of_an_arrow_file_stay_in_its_buffers(offsets, value, read, tmp_path):
    """They read the memory of the process into the image pack, or ended it by SIGBUS or a SystemError."""
    saved = tmp_path / "saved"
    rows = [{"id": str(row), "messages": TURNS, "image": value * (row + 1)} for row in range(4)]
    datasets.Dataset.from_list(rows).save_to_disk(saved)
    [file] = saved.glob("*.arrow")
    sound = struct.pack("<5i", 0, 7, 21, 42, 70)
    content = file.read_bytes()
    assert 1 == content.count(sound)
    file.write_bytes(content.replace(sound, struct.pack("<5i", *offsets)))
    with pytest.raises(DataError, match=r"saved: cannot be read as an Arrow data set: .*[Oo]ffset"):
        read(saved, tmp_path)


SIZES = [
    ("preprocessor_config.json", {"size": {"longest_edge": 10**9, "shortest_edge": 1}}, "longest_edge is 1000000000"),
    ("preprocessor_config.json", {"min_pixels": 10**9}, "min_pixels is 1000000000"),
    ("preprocessor_config.json", {"patch_size": 10**5}, "patch_size is 100000"),
    ("preprocessor_config.json", {"patch_size": 0}, "patch_size is 0"),
    ("preprocessor_config.json", {"patch_size": True}, "patch_size is True"),
    ("preprocessor_config.json", {"merge_size": 10**6}, "merge_size is 1000000"),
    ("preprocessor_config.json", {"temporal_patch_size": "2"}, "temporal_patch_size is '2'"),
    ("processor_config.json", {"image_processor": {"size": {"shortest_edge": -1}}}, "shortest_edge is -1"),
    ("config.json", {"vision_config": {"patch_size": 0}}, "config.json: vision_config: patch_size is 0"),
    ("config.json", {"vision_config": {"spatial_merge_size": 10**6}}, "spatial_merge_size is 1000000"),
    ("config.json", {"rope_parameters": "yarn"}, "rope_parameters must be an object, got 'yarn'"),
    ("config.json", {"text_config": {"rope_scaling": [2.0]}}, "rope_scaling must be an object, got \\[2.0\\]"),
    ("config.json", {"vision_config": [1]}, "vision_config must be an object, got \\[1\\]"),
]


def made_processor(folder):
    write_builtin_processor(folder, [[{"role": "user", "content": [{"type": "text", "text": "a"}]}]], 340)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 340}))
    return folder


@pytest.mark.parametrize(("name", "changed", "said"), SIZES, ids=[said for *_, said in SIZES])
def test_sizes_that_no_image_could_be_processed_with_are_refused_by_plan(name, changed, said, tmp_path):
    folder = made_processor(tmp_path / "checkpoint")
    file = folder / name
    file.write_text(json.dumps((json.loads(file.read_text()) if file.is_file() else {}) | changed))
    assert any(re.search(said, mistake) for mistake in checkpoint_mistakes(folder))
    if name != "config.json":
        with pytest.raises(DataError, match=f"{name}: {said}, not a number "):
            load_processor(str(folder))


CHECKPOINT = """
import sys
from pathlib import Path
from dsl.errors import DataError
from ops.lib.target.checkpoint_check import checkpoint_mistakes
from ops.tools.init.target import read_target
print(*[each for each in checkpoint_mistakes(Path(sys.argv[1])) if sys.argv[2] in each], sep="\\n")
try:
    read_target(sys.argv[1])
except DataError as error:
    print(next(line for line in str(error).splitlines() if sys.argv[2] in line))
"""


TEXTS = (
    *("config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/x.jinja", "merges.txt"),
    *("vocab.json", "model.safetensors.index.json"),
)


def too_large(file):
    return f"{file}: {3 << 30:,} bytes, more than {LARGEST_JSON:,}; replace it by the original file"


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_of_a_checkpoint_is_refused_by_its_size(name, tmp_path):
    folder = made_processor(tmp_path / "checkpoint")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    os.truncate(folder / name, 3 << 30)
    assert too_large(folder / name) in checkpoint_mistakes(folder)


def test_a_text_of_a_checkpoint_is_not_read_before_its_size_is_known(tmp_path):
    folder = made_processor(tmp_path / "checkpoint")
    os.truncate(folder / "chat_template.jinja", 3 << 30)
    said, peak = peak_memory(CHECKPOINT, folder, "chat_template.jinja")
    assert [too_large(folder / "chat_template.jinja")] * 2 == said
    assert peak < MOST_MEMORY


LARGEST = """
import sys
from pathlib import Path
from dsl.errors import DataError
from ops.lib.data.files import read_object
try:
    read_object(Path(sys.argv[1]))
except DataError as error:
    print(error)
"""


def test_the_largest_json_that_is_read_needs_no_more_than_its_share_of_memory(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text("[" + "{}," * ((LARGEST_JSON - 4) // 3) + "{}]")
    said, peak = peak_memory(LARGEST, file)
    assert [f"{file}: not a JSON object but a list"] == said
    assert peak < MOST_MEMORY


def test_a_long_text_in_the_place_of_a_template_is_not_parsed(tmp_path):
    folder = made_processor(tmp_path / "checkpoint")
    text = "{{a}}" * (LONGEST_TEMPLATE // 4)
    (folder / "chat_template.jinja").write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": text}))
    said = [each for each in checkpoint_mistakes(folder) if "template" in each]
    places = (str(folder / "chat_template.jinja"), f"{folder / 'tokenizer_config.json'}, chat_template")
    assert [
        f"{each}: not a chat template: 1,310,720 characters, more than 1,048,576; {CORRECT_IT}" for each in places
    ] == said


def test_a_pipe_in_the_place_of_a_checkpoints_file_is_refused(tmp_path):
    folder = made_processor(tmp_path / "checkpoint")
    os.mkfifo(folder / "generation_config.json")
    said = f"{folder / 'generation_config.json'}: is no regular file; replace it by one"
    assert said in checkpoint_mistakes(folder)


SURVEY = """
import sys
from pathlib import Path
from ops.tools.init.survey import Counter, image_size
from ops.tools.init.survey import survey
found = survey((Path(sys.argv[1]),), Counter.of(None))
print(dict(found.dropped), *found.examples.values())
"""


def test_init_reads_no_file_that_ingest_takes_for_no_image(tmp_path):
    (tmp_path / "large.png").touch()
    os.truncate(tmp_path / "large.png", 12 << 30)
    rows = tmp_path / "rows.jsonl"
    written = ({"id": "a", "image": "large.png", "messages": TURNS}, {"id": "b", "messages": TURNS})
    rows.write_text("".join(json.dumps(row) + "\n" for row in written))
    said, peak = peak_memory(SURVEY, rows)
    size = f"{12 << 30} bytes, more than {MAX_IMAGE_BYTES}"
    assert [f"{{'image file too large': 1}} a: large.png: {size}"] == said
    assert peak < MOST_MEMORY


@pytest.mark.parametrize("form", ["ICO", "PPM", "TGA", "PCX"])
def test_init_opens_pictures_of_the_formats_that_ingest_takes(form):
    encoded = io.BytesIO()
    Image.new("RGB", (16, 16)).save(encoded, form)
    assert image_size(encoded.getvalue()) is None


def test_the_images_of_a_row_are_no_more_than_the_largest_image(tmp_path):
    (tmp_path / "large.png").touch()
    os.truncate(tmp_path / "large.png", MAX_IMAGE_BYTES // 2 + 1)
    source = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "<image><image>"}, TURNS[1]]
    row = {"images": ["large.png", "large.png"], "messages": turns}
    source.write_text(json.dumps({"id": "a", **row}) + "\n" + json.dumps({"id": "b", "messages": TURNS}) + "\n")
    assert ["b"] == read(source, tmp_path)
    size = f"large.png: {MAX_IMAGE_BYTES // 2 + 1} bytes, more than {MAX_IMAGE_BYTES}, with those before it"
    assert (
        f'a,image file too large,"{size}; write it as a smaller JPEG or PNG"'
        == (tmp_path / "stage" / "out" / "dropped.csv").read_text().splitlines()[1]
    )


def png(side, **options):
    encoded = io.BytesIO()
    Image.new("L", (side, side)).save(encoded, "PNG", **options)
    return encoded.getvalue()


def test_one_large_picture_that_a_row_names_many_times_is_counted_before_it_is_decoded_once(tmp_path):
    """Of the first, there is only the header."""
    folder = str(made_processor(tmp_path / "checkpoint"))
    packs = PackWriter(tmp_path)
    header = packs.add(png(4000, compress_level=1)[:100])
    with pytest.raises(Unusable) as fault:
        encode.load_images([header] * 8, tmp_path, load_processor(folder, 64, 16_777_216), 9_000, 20)
    assert ("longer than max_length", f"{500 * 500 * 8 + 12} tokens") == (fault.value.reason, fault.value.detail)
    made = encode.load_images([packs.add(png(64))] * 8, tmp_path, load_processor(folder), 9_000, 20)
    assert ([64] * 8, 1) == ([image.num_tokens for image in made], len(set(map(id, made))))


EIGHT_TIMES = """
import sys
from pathlib import Path
from PIL import Image
from ops.lib.data.image_packs import PackWriter
from ops.lib.vision.processor import load_processor
from ops.tokenize_chat.encode import load_images
folder = Path(sys.argv[1])
Image.new("L", (7900, 8000)).save(folder / "large.png")
packed = PackWriter(folder).add((folder / "large.png").read_bytes())
images = load_images([packed] * 8, folder, load_processor(sys.argv[2]), 10_000_000, 0)
print(len(images), len(set(map(id, images))))
"""


def test_one_large_picture_that_a_row_names_eight_times_takes_the_memory_of_one(tmp_path):
    """It took 7.3 GiB."""
    said, peak = peak_memory(EIGHT_TIMES, tmp_path, made_processor(tmp_path / "checkpoint"))
    assert ["8 1"] == said
    assert peak < MOST_MEMORY


def test_the_pixels_of_a_sample_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "MOST_PIXELS", 512)
    packs, references = PackWriter(tmp_path), []
    for side in (15, 14, 13):
        references.append(packs.add(png(side)))
    processor = load_processor(str(made_processor(tmp_path / "checkpoint")))
    assert 4 == len(encode.load_images([references[0]] * 4, tmp_path, processor))
    with pytest.raises(
        Unusable, match="'image too large', 'the images of the sample have more than 512 pixels together'"
    ):
        encode.load_images(references, tmp_path, processor)
