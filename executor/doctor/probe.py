"""A process that imports one library and reports the result, so that a broken library is a finding, not a crash.

`python -m executor.doctor.probe NAME PID` prints a JSON object as its last line; it ends with the process PID, its
parent.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping

from attrs import frozen

from dsl.convert import unstructure
from dsl.imports import no_collection
from executor.system.supervisor import end_with_parent


@frozen(kw_only=True)
class LibraryFacts:
    version: str


@frozen(kw_only=True)
class TorchFacts(LibraryFacts):
    """Facts about torch and its GPUs.

    cuda: the CUDA version that torch is built for. gpus, memory: names and bytes of the usable GPUs. warnings: those of
    CUDA's initialisation. fault: why the first GPU cannot compute; compile_fault: why nothing compiles for it; empty if
    it works.
    """

    cuda: str | None
    gpus: tuple[str, ...] = ()
    memory: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()
    fault: str = ""
    compile_fault: str = ""


def torch_facts() -> TorchFacts:
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    fault = ""
    if count:
        try:
            torch.ones(8, 8, device="cuda").matmul(torch.ones(8, 8, device="cuda")).sum().item()
        except RuntimeError as error:  # a GPU that this build does not support, or one that is full
            fault = str(error).splitlines()[0]
    return TorchFacts(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        gpus=tuple(torch.cuda.get_device_name(index) for index in range(count)),
        memory=tuple(torch.cuda.get_device_properties(index).total_memory for index in range(count)),
        warnings=tuple(str(warning.message) for warning in caught),
        fault=fault,
        compile_fault=compile_fault_on("cuda") if count and not fault else "",
    )


def compile_fault_on(device: str) -> str:
    """The reason why torch.compile does not work on a device, "" if it works: it needs a C compiler, and Triton on a
    GPU.

    No code cached by an earlier process is used. Call it before torch has compiled anything.
    """
    with tempfile.TemporaryDirectory(prefix="dflow-doctor-") as caches:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": caches, "TRITON_CACHE_DIR": caches}
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        import torch

        try:
            if device == "cuda":
                import triton  # noqa: F401 (whether it loads)
            given = torch.full((8,), 2.0, device=device)
            found = torch.compile(lambda values: values * values + 1)(given).tolist()
        except (ImportError, OSError, RuntimeError, AssertionError) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return "" if found == [5.0] * 8 else f"4 + 1 was computed as {found[0]}"


def transformers_facts() -> LibraryFacts:
    """The facts of transformers; it also imports dflow's image processor, which an incompatible torchvision breaks."""
    import transformers

    import ops.lib.vision.processor  # noqa: F401 (whether it loads)

    return LibraryFacts(version=transformers.__version__)


def torchvision_facts() -> LibraryFacts:
    import torchvision

    return LibraryFacts(version=torchvision.__version__)


PROBES: Mapping[str, Callable[[], LibraryFacts]] = {
    "torch": torch_facts,
    "transformers": transformers_facts,
    "torchvision": torchvision_facts,
}

if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    with no_collection():
        facts = PROBES[sys.argv[1]]()
    print(json.dumps(unstructure(facts)))
