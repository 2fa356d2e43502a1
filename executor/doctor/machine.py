"""This machine: Python and the libraries, in the versions that pyproject.toml requires, and whether they load; its
processors, memory, compiler, and limits of the operating system.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import tomli
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from dsl.convert import structure
from dsl.finding import Finding
from dsl.imports import PROJECT, child_environment, module_command
from dsl.memory import machine_memory
from dsl.shown import shown_bytes
from executor.doctor.probe import LibraryFacts, TorchFacts
from executor.keys.node_key import NOT_INSTALLED, LibraryVersions
from executor.system.resource_pool import devices
from ops.lib.kernels.c_library import compiled_sweep

INSTALL = f"{sys.executable} -m pip install -c constraints.txt -e"
EXTRAS = {
    "sglang": "capturing and serving with SGLang, and the gate's live stage",
    "datasets": "Arrow data sets as a source",
    "ray": "nodes on other machines",
}
PROBE_S = 180
PROBED = ("torch", "transformers", "torchvision")
TORCH_INDEX = "https://pytorch.org/get-started/locally"
OPEN_FILES = 1024
SHARED_MEMORY = 1_000_000_000
SHARED = Path("/dev/shm")


def start_probes() -> dict[str, subprocess.Popen[str]]:
    """Start a process for each installed library that is slow to import, all at once; returned by library."""
    return {
        name: subprocess.Popen(
            module_command("executor.doctor.probe", name, str(os.getpid())),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=child_environment(),
        )
        for name in PROBED
        if importlib.util.find_spec(name) is not None
    }


def version_findings() -> Iterator[Finding]:
    """Findings on the versions of Python, of dflow's required libraries, and of those of its extras."""
    python, requirements = declared()
    version = ".".join(map(str, sys.version_info[:3]))
    if python.contains(version):
        yield Finding(f"{version} ({sys.executable})", level="good", code="Python")
    else:
        yield Finding(f"{version}, but dflow needs {python}", level="fatal", code="Python")
    versions = LibraryVersions()
    needed = requirements[""]
    unsatisfied = [each for each in needed if not _allows(each, versions[each.name])]
    for each in unsatisfied:
        remedy = f"{INSTALL} . in {PROJECT}"
        if versions[each.name] == NOT_INSTALLED:
            yield Finding(f"not installed; dflow needs {each.specifier}", advice=remedy, level="fatal", code=each.name)
        else:
            yield Finding(
                f"{versions[each.name]}, but dflow requires {each.specifier}",
                advice=remedy,
                level="warning",
                code=each.name,
            )
    if not unsatisfied:
        yield Finding(
            f"all {len(needed)} required libraries are installed, in supported versions", level="good", code="libraries"
        )
    for extra in EXTRAS:
        for each in requirements[extra]:
            yield _extra(extra, each, versions[each.name])


def declared() -> tuple[SpecifierSet, dict[str, list[Requirement]]]:
    """Python's version bounds, and the requirements of each extra; dflow's own stand under "".

    They are read from pyproject.toml in a checkout, else from the installed distribution.
    """
    file = PROJECT / "pyproject.toml"
    if file.is_file():
        project = tomli.loads(file.read_text("utf-8"))["project"]
        texts = {"": project["dependencies"], **project["optional-dependencies"]}
        required = {extra: list(map(Requirement, texts[extra])) for extra in ("", *EXTRAS)}
        return SpecifierSet(project["requires-python"]), required
    from importlib import metadata

    installed = [Requirement(text) for text in metadata.requires("dflow") or []]
    marked = [(each, each.marker) for each in installed if each.marker is not None]
    extras = {extra: [each for each, marker in marked if marker.evaluate({"extra": extra})] for extra in EXTRAS}
    own = [each for each in installed if each.marker is None]
    return SpecifierSet(str(metadata.metadata("dflow")["Requires-Python"])), {"": own, **extras}


def loaded_findings(probes: Mapping[str, subprocess.Popen[str]]) -> Iterator[Finding]:
    """The findings of the probe processes, in a fixed order."""
    for name in PROBED:
        if name in probes:
            yield from _LOADED[name](_probe_result(probes[name], TorchFacts if name == "torch" else LibraryFacts))
        elif name == "torchvision":
            yield Finding("not installed, and not needed: images are resized with pillow", level="good", code=name)


def _probe_result(process: subprocess.Popen[str], kind: type[LibraryFacts]) -> LibraryFacts | str:
    """The facts that a probe printed, or why it printed none."""
    try:
        output, errors = process.communicate(timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"importing it took more than {PROBE_S} s"
    if process.returncode == 0:
        return structure(kind, json.loads(output.splitlines()[-1]))
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"the process that imported it ended with {process.returncode}"


def _torch(found: LibraryFacts | str) -> Iterator[Finding]:
    if not isinstance(found, TorchFacts):
        yield Finding(f"cannot be imported: {found}", advice=f"{INSTALL} . in {PROJECT}", level="fatal", code="torch")
        return
    build = f"CUDA {found.cuda}" if found.cuda else "CPU"
    yield Finding(f"{found.version}, built for {build}", level="good", code="torch")
    listed = devices()
    if found.fault:
        yield Finding(f"{found.gpus[0]}: {found.fault}", advice=f"a build of torch for it: {TORCH_INDEX}", code="GPU")
    elif found.gpus:
        sizes = {f"{name}, {shown_bytes(size)}" for name, size in zip(found.gpus, found.memory, strict=True)}
        yield Finding(f"{len(found.gpus)} x {' and '.join(sorted(sizes))}", level="good", code="GPU")
        yield _compile(found.compile_fault)
    elif listed and not found.cuda:
        yield Finding(f"{len(listed)} found, but this torch is built for CPUs", advice=TORCH_INDEX, code="GPU")
    elif listed:
        why = found.warnings[0].splitlines()[0] if found.warnings else "torch finds none"
        remedy = "install a newer driver, or a torch built for an older CUDA"
        yield Finding(f"{len(listed)} found, but torch cannot use them: {why}", advice=remedy, code="GPU")
    else:
        yield Finding("none: everything runs on the CPU, which suits only tiny targets", level="warning", code="GPU")


def _compile(fault: str) -> Finding:
    """A finding on whether kernels can be compiled for the GPU. fault: why not, "" if they can."""
    if not fault:
        return Finding("a C compiler and Triton compile kernels for the GPU", level="good", code="torch.compile")
    remedy = "install gcc, Python's headers (python3-dev), and the Triton that torch was released with"
    return Finding(f"cannot compile for the GPU, which training needs: {fault}", advice=remedy, code="torch.compile")


def _transformers(found: LibraryFacts | str) -> Iterator[Finding]:
    if isinstance(found, str):
        remedy = f"if torchvision is the cause, uninstall it, else {INSTALL} . in {PROJECT}"
        yield Finding(f"cannot be imported: {found}", advice=remedy, level="fatal", code="transformers")
    else:
        yield Finding(f"{found.version}, with dflow's processors", level="good", code="transformers")


def _torchvision(found: LibraryFacts | str) -> Iterator[Finding]:
    if isinstance(found, str):
        message = f"does not match this torch, and breaks transformers: {found}"
        yield Finding(message, advice="uninstall it, or install the matching build", code="torchvision")
    else:
        yield Finding(f'{found.version}: image_backend = "torchvision" works', level="good", code="torchvision")


_LOADED = {"torch": _torch, "transformers": _transformers, "torchvision": _torchvision}


def _extra(extra: str, each: Requirement, version: str) -> Finding:
    what, remedy = EXTRAS[extra], f"{INSTALL} '.[{extra}]' in {PROJECT}"
    if version == NOT_INSTALLED:
        return Finding(f"not installed, so no {what}", advice=remedy, code=each.name)
    if not _allows(each, version):
        return Finding(
            f"{version}, but dflow requires {each.specifier}", advice=remedy, level="warning", code=each.name
        )
    return Finding(f"{version}: {what}", level="good", code=each.name)


def _allows(each: Requirement, version: str) -> bool:
    """Whether a requirement allows a version by PEP 440, pre-releases included."""
    return version != NOT_INSTALLED and each.specifier.contains(version, prereleases=True)


def host_findings() -> Iterator[Finding]:
    cpus = len(os.sched_getaffinity(0))
    yield Finding(f"{cpus} CPUs, {shown_bytes(machine_memory())} of memory", level="good", code="machine")
    compiler, library = compiled_sweep()
    if library is not None:
        yield Finding(f"{compiler}: the loss on CPUs is compiled", level="good", code="C compiler")
    else:
        message = f"{compiler}: training on a CPU is slower, and torch.compile does not work"
        yield Finding(message, advice="install gcc or clang", code="C compiler")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        remedy = f"ulimit -n {OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)}"
        yield Finding(f"a process may open {soft}", advice=remedy, level="warning", code="open files")
    else:
        yield Finding(
            "unlimited" if soft == resource.RLIM_INFINITY else f"a process may open {soft:,}",
            level="good",
            code="open files",
        )
    yield _shared_memory()


def _shared_memory() -> Finding:
    try:
        size = shutil.disk_usage(SHARED).total
    except OSError:
        return Finding(
            f"{SHARED} does not exist", advice="several ranks on GPUs need it", level="warning", code="shared memory"
        )
    message = f"{shown_bytes(size)} at {SHARED}"
    if size < SHARED_MEMORY:
        remedy = "several ranks on GPUs, and SGLang, need more: `docker run --shm-size 8g`"
        return Finding(message, advice=remedy, level="warning", code="shared memory")
    return Finding(message, level="good", code="shared memory")
