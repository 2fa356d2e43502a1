"""A process that loads one library and says how that went, so that a broken library is a finding and no crash.

`python -m executor.doctor.probe NAME` prints a JSON object as its last line.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def torch_facts() -> dict[str, Any]:
    """Its version and build, and the GPUs that it can compute on; warnings are those of CUDA's initialisation."""
    torch = importlib.import_module("torch")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    memory = [torch.cuda.get_device_properties(index).total_memory for index in range(count)]
    facts = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "gpus": names,
        "memory": memory,
        "warnings": [str(warning.message) for warning in caught],
    }
    fault = ""
    if count:
        try:
            torch.ones(8, 8, device="cuda").matmul(torch.ones(8, 8, device="cuda")).sum().item()
        except RuntimeError as error:  # a GPU that this build has no code for, or one that is full
            fault = str(error).splitlines()[0]
    return {**facts, "fault": fault}


def transformers_facts() -> dict[str, Any]:
    """Loads what dflow takes of it: a torchvision that does not fit breaks that."""
    importlib.import_module("ops.vision.processor")
    return {"version": importlib.import_module("transformers").__version__}


def torchvision_facts() -> dict[str, Any]:
    return {"version": importlib.import_module("torchvision").__version__}


PROBES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "torch": torch_facts,
    "transformers": transformers_facts,
    "torchvision": torchvision_facts,
}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]]()))
