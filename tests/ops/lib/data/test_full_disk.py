"""What ops write on a full disk ends in an error, never in the signal that a write to a memory map would get."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from full_disk import can_mount, mount, unmount

PROJECT = Path(__file__).resolve().parents[4]
# Ways to write through a memory map, or to make a file longer than the blocks it has.
SPARSE = {"memmap", "mmap", "open_memmap", "from_file", "truncate", "ftruncate"}
READS = "Tokenizer.from_file"  # only has such a name
CUTS = {("shards.py", "os.truncate"), ("turns.py", "os.truncate")}  # only ever make a file shorter
WRITE_SHARD = """
import sys
from pathlib import Path
import torch
from ops.lib.target.feature_shards import write_feature_shard

ids, mask = torch.zeros(4096, dtype=torch.int64), torch.ones(4096, dtype=torch.bool)
write_feature_shard(Path(sys.argv[1]), torch.ones(4096, 256), ids, mask, torch.tensor([0, 4096]))
"""


def test_no_op_writes_through_a_memory_map():
    """Where one comes to need it: allocate the file's blocks before, by os.posix_fallocate."""
    found = []
    for path in (PROJECT / "ops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SPARSE:
                call = ast.unparse(node.func)
                if not call.endswith(READS) and (path.name, call) not in CUTS:
                    found.append(f"{path.relative_to(PROJECT)}:{node.lineno}: {call}")
    assert [] == found


def test_a_feature_shard_on_a_full_disk_is_an_error(tmp_path):
    folder = tmp_path / "small"
    if not can_mount(folder):
        pytest.skip("this user may not mount a file system")
    mount(folder, "1m")
    try:
        command = [sys.executable, "-W", "ignore", "-c", WRITE_SHARD, str(folder / "shard.safetensors")]
        ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    finally:
        unmount(folder)
    assert 1 == ended.returncode  # a signal would be negative
    assert "No space left on device" in ended.stderr
