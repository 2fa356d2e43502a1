"""A store with the record of a run, made of artifacts that a test hands over, as the executor writes them."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manifests import made, new_record

from dsl.read_toml import read_graph
from executor.records.run_record import Record
from executor.store.artifact_store import Store

PIPELINE = """
[pipeline]
name = "served"

[node.ingest]
op = "ingest"
source = "builtin:digits"

[node.inject]
op = "inject_images"
samples = "@ingest"

[node.tokenize]
op = "tokenize_chat"
samples = "@inject"
processor = "builtin"

[node.target]
op = "load_target"
checkpoint = "{checkpoint}"

[node.capture]
op = "capture_targets"
tokens = "@tokenize"
target = "@target"
target_layer_ids = [1, 3]

[node.shard]
op = "shard_sequence"
features = "@capture"
tokens_per_step = 1024

[node.train]
op = "train_dflash"
features = "@capture"
batches = "@shard"
target = "@target"
block_size = 4

[node.export]
op = "export_draft"
draft = "@train"
target = "@target"

[node.eval]
op = "evaluate"
draft = "@export"
target = "@target"
tokens = "@tokenize"
"""
CHECK = """
[node.check]
op = "check_export"
draft = "@export"
target = "@target"
tokens = "@tokenize"
report = "@eval"
"""
SECOND = """
[node.second]
op = "export_draft"
draft = "@train"
target = "@target"
"""


def record_run(
    folder: Path,
    artifacts: Mapping[str, Path],
    *,
    more: str = CHECK,
    states: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Store, str]:
    """Make a store in folder/runs with a recorded run; returns the store and the run's id.

    artifacts: node -> a folder that is committed as its artifact. more: further nodes. states: fields of a node's state
    that differ from "done".
    """
    folder.mkdir(exist_ok=True)
    (folder / "checkpoint").mkdir()
    file = folder / "served.toml"
    file.write_text(PIPELINE.format(checkpoint=folder / "checkpoint") + more)
    graph = read_graph(file, [])
    store = Store.open(folder / "runs", write=True)
    record = new_record(store.records, graph)
    for node in graph.nodes:
        state = record.state.nodes[node]
        state.state = "done"
        if node in artifacts:
            state.digest = commit(store, f"key-{node}", record.run, artifacts[node])
        for name, value in (states or {}).get(node, {}).items():
            setattr(state, name, value)
    record.state.status = "done"
    record.save_all()
    return store, record.run


def later_partial_run(store: Store, run: str, to: str) -> Record:
    """Record a newer run of the same pipeline, up to a node."""
    record = new_record(store.records, Record.load(store.records / run).graph().up_to([to]))
    for state in record.state.nodes.values():
        state.state = "done"
    record.state.status = "done"
    record.save_all()
    return record


def commit(store: Store, key: str, run: str, folder: Path) -> str:
    with store.lease(key, run) as lease:
        lease.acquire(print)
        lease.empty(keep_state=False)
        shutil.copytree(folder, lease.out_dir, dirs_exist_ok=True)
        digest = store.commit(lease, *made(key, run, op="x"))
        lease.remove()
    return digest


def make_artifacts(folder: Path, model_type: str = "qwen3", max_pixels: int = 2048, **config: Any) -> dict[str, Path]:
    """Make folders with the files that serving reads, without weights; images were resized to at most 1024 pixels.

    max_pixels: of the target's own image processor. config: entries of the target's config.json.
    """
    vision = model_type not in ("qwen3", "qwen3_moe")
    images = (
        [{"sha256": hashlib.sha256(b"PNG").hexdigest(), "pack": "images-00000.bin", "offset": 2, "size": 3}]
        if vision
        else []
    )
    question = [*([{"type": "image"}] if vision else []), {"type": "text", "text": "What is it?"}]
    turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": [{"type": "text", "text": "It is red."}]},
    ]
    row = {"category": "image" if vision else "text", "messages": turns, "images": images}
    limits = {"min_pixels": 64, "max_pixels": 1024}
    images_of = {"image_backend": "torchvision" if vision else None, "pixel_limits": limits if vision else None}
    files: dict[str, dict[str, Any]] = {
        "target": {
            "target.json": {"model_type": model_type, "vision": vision, "trust_remote_code": False},
            "model/config.json": {"model_type": model_type, "dtype": "bfloat16", **config},
            "model/preprocessor_config.json": {"min_pixels": 64, "max_pixels": max_pixels},
        },
        "export": {"config.json": {"block_size": 4}},
        "check": {"draft/config.json": {"block_size": 4}, "check.json": {}},
        "train": {"training.json": {"captured": images_of}},
        "eval": {"report.json": {}},
        "tokenize": {"tokens.json": images_of},
        "inject": {
            "samples.jsonl": [{**row, "id": "a", "split": "train"}, {**row, "id": "b", "split": "test"}],
            "images-00000.bin": b"xxPNGxx",
        },
    }
    return {node: write_folder(folder / node, contents) for node, contents in files.items()}


def write_folder(folder: Path, contents: Mapping[str, Any]) -> Path:
    for name, content in contents.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            file.write_bytes(content)
        elif name.endswith(".jsonl"):
            file.write_text("".join(json.dumps(row) + "\n" for row in content))
        else:
            file.write_text(json.dumps(content))
    return folder


# A real HTTP server that is neither SGLang nor vLLM but answers as both do, for tests of processes. Its arguments say
# how it behaves. Like SGLang it has a child of its own.
SERVER = """
import argparse, json, os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--host")
parser.add_argument("--port", type=int)
options, others = parser.parse_known_args()
print("arguments", json.dumps(others), flush=True)
if "--die" in others:
    print("loading the model", flush=True)
    sys.exit("RuntimeError: out of luck")
if "--refuse" in others:
    sys.exit("ValueError: DFLASH speculative decoding is not supported by CpuPlatform on device 'cpu'.")
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
                          "print('child is deaf', flush=True); time.sleep(600)"])
print("processes", os.getpid(), child.pid, flush=True)
ready_at = time.time() + 1


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.time() > ready_at else 503)
        self.end_headers()

    def do_POST(self):
        if self.path.startswith("/flush_cache"):
            return self.do_GET()
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        drafted = "--no-draft" not in others and {"--speculative-algorithm", "--speculative-config"} & {*others}
        meta = {"spec_verify_ct": 2, "spec_accept_length": 4.5} if drafted else {}
        metrics = {"speculative_decoding": {"num_spec_steps": 2, "mean_acceptance_length": 4.25} if drafted else None}
        answer = {"message": {"content": "It is blue."}, "meta_info": meta, "finish_reason": "stop"}
        body = {"choices": [answer], "usage": {"completion_tokens": 9}, "metrics": metrics}
        body = json.dumps(body).encode()
        print("asked", json.dumps(asked), flush=True)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)


HTTPServer((options.host, options.port), Handler).serve_forever()
"""


def install_vllm(folder: Path, version: str) -> Path:
    """A folder for PATH and PYTHONPATH in which `vllm` of this version is the server of this module."""
    about = folder / f"vllm-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    program = folder / "vllm"
    program.write_text(f"#!{sys.executable}\n{SERVER}")
    program.chmod(0o755)
    return folder


def install_server(folder: Path, version: str) -> Path:
    """A folder for PYTHONPATH in which `sglang` of this version is the server of this module."""
    package, about = folder / "sglang", folder / f"sglang-{version}.dist-info"
    package.mkdir(parents=True)
    about.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(SERVER)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    return folder
