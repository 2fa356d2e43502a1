"""Of which kind a test file is, by what it does: `unit`, `process` or `chain`; `make quick` runs the first kind."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

PROCESSES = re.compile(r"\b(Toy|counting|tracked_toy|run_ranks|imitated\w*|subprocess|multiprocessing|Popen|pty)\b")
FIXTURES = (
    "tokens|target|features|gate_inputs|damaged|talker|parroted|packed|trained|gate|chain|case|cases|thinker|lively"
)
CHAINS = re.compile(rf"def \w+\((?:[^()]*\W)?(?:{FIXTURES})\b|draft_chain|family_checkpoints|finetune_cases|overfit")

# In one process, but five seconds and more; or two, of what says little beside other tests.
LONG = {
    "test_broken_pipelines",
    "test_cache_trial",
    "test_capture_config",
    "test_classification",
    "test_closure",
    "test_data_memory",
    "test_device_kernels",
    "test_dflash_cuda",
    "test_dflash_fused",
    "test_dflash_traffic",
    "test_diagnose_certainty",
    "test_encode_batch",
    "test_fuzz",
    "test_graph_layout",
    "test_ingest_digits",
    "test_inject_images",
    "test_key_meaning",
    "test_loss_masks",
    "test_other_targets",
    "test_placement",
    "test_prefetch",
    "test_scheduler",
    "test_slot_losses",
    "test_tensor_batch",
    "test_threads",
    "test_tokenize_workers",
    "test_twin_pipelines",
    "test_two_runs_share_cores",
}


@cache
def kind_of(path: Path) -> str:
    """The kind of a test file: `process` starts processes; `chain` runs several ops, a model or long; else `unit`."""
    text = path.read_text(encoding="utf-8")
    if PROCESSES.search(text):
        return "process"
    return "chain" if path.stem in LONG or CHAINS.search(text) else "unit"
