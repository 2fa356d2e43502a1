"""Python and the libraries: whether they are here, in the versions that pyproject.toml asks for, and can be loaded."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tomli
from attrs import frozen

from dsl.sizes import shown_bytes
from executor.doctor.finding import Finding
from executor.keys.library_versions import NOT_INSTALLED, LibraryVersions
from executor.keys.node_key import PROJECT
from executor.system.resource_pool import devices

REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*([^;]*)(?:;.*extra\s*==\s*['\"](\w+)['\"])?")
BOUND = re.compile(r"(>=|<=|==|!=|>|<)\s*([0-9.]+)")
INSTALL = f"{sys.executable} -m pip install -c constraints.txt -e"
EXTRAS = {
    "sglang": "capturing and serving with SGLang, and the gate's live stage",
    "datasets": "Arrow data sets as a source",
}
PROBE_S = 180
PROBED = ("torch", "transformers", "torchvision")
TORCH_INDEX = "https://pytorch.org/get-started/locally"


@frozen
class Requirement:
    """A library, the bounds of its version as they are written, and the extra that asks for it, or an empty text."""

    name: str
    bounds: str
    extra: str

    def allows(self, version: str) -> bool:
        return all(_holds(_release(version), sign, _release(bound)) for sign, bound in BOUND.findall(self.bounds))


def start_probes() -> dict[str, subprocess.Popen[str]]:
    """A process for each library that takes seconds to load, all at once; those that are not installed have none."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "PYTHONSAFEPATH": "1"}
    return {
        name: subprocess.Popen(
            [sys.executable, "-m", "executor.doctor.probe", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        for name in PROBED
        if importlib.util.find_spec(name) is not None
    }


def version_findings() -> Iterator[Finding]:
    """Python, the libraries that dflow needs, and those of its extras."""
    wanted_python, requirements = declared()
    version = ".".join(map(str, sys.version_info[:3]))
    if Requirement("python", wanted_python, "").allows(version):
        yield Finding("Python", "ok", f"{version} ({sys.executable})")
    else:
        yield Finding("Python", "missing", f"{version}, and dflow needs {wanted_python}", is_fatal=True)
    versions = LibraryVersions()
    needed = [each for each in requirements if not each.extra]
    at_fault = [each for each in needed if not each.allows(versions[each.name]) or _is_missing(versions, each)]
    for each in at_fault:
        remedy = f"{INSTALL} . in {PROJECT}"
        if _is_missing(versions, each):
            yield Finding(each.name, "missing", f"not installed; dflow needs {each.bounds}", remedy, is_fatal=True)
        else:
            yield Finding(each.name, "warning", f"{versions[each.name]}, and dflow asks for {each.bounds}", remedy)
    if not at_fault:
        yield Finding("libraries", "ok", f"all {len(needed)} that dflow needs are here, in the versions it asks for")
    for each in requirements:
        if each.extra in EXTRAS:
            yield _extra(each, versions)


def declared() -> tuple[str, list[Requirement]]:
    """(Python's bounds, requirements): of pyproject.toml in a checkout, else of the installed distribution."""
    file = PROJECT / "pyproject.toml"
    if file.is_file():
        project = tomli.loads(file.read_text("utf-8"))["project"]
        own = [_requirement(text, "") for text in project["dependencies"]]
        extras = project["optional-dependencies"]
        return project["requires-python"], own + [
            _requirement(text, extra) for extra, texts in extras.items() for text in texts
        ]
    from importlib import metadata

    python = str(metadata.metadata("dflow")["Requires-Python"])
    return python, [_requirement(text, "") for text in metadata.requires("dflow") or []]


def loaded_findings(probes: Mapping[str, subprocess.Popen[str]]) -> Iterator[Finding]:
    """What the probes say, in a fixed order."""
    for name in PROBED:
        if name in probes:
            facts, error = _heard(probes[name])
            yield from _LOADED[name](facts, error)
        elif name == "torchvision":
            told = "not installed, and not needed: images are resized with pillow"
            yield Finding(name, "ok", told)


def _heard(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """(facts, "") of a probe, or ({}, why there are none)."""
    try:
        said, errors = process.communicate(timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {}, f"importing it took more than {PROBE_S} s"
    if process.returncode == 0:
        facts: dict[str, Any] = json.loads(said.splitlines()[-1])
        return facts, ""
    lines = [line for line in errors.splitlines() if line.strip()]
    ended = f"the process that imported it ended with {process.returncode}"
    return {}, lines[-1].strip() if lines else ended


def _torch(facts: Mapping[str, Any], error: str) -> Iterator[Finding]:
    if error:
        yield Finding("torch", "missing", f"cannot be imported: {error}", f"{INSTALL} . in {PROJECT}", is_fatal=True)
        return
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU"
    yield Finding("torch", "ok", f"{facts['version']}, built for {build}")
    listed = devices()
    if facts["fault"]:
        yield Finding(
            "GPU", "missing", f"{facts['gpus'][0]}: {facts['fault']}", f"a build of torch for it: {TORCH_INDEX}"
        )
    elif facts["gpus"]:
        sizes = {f"{name}, {shown_bytes(size)}" for name, size in zip(facts["gpus"], facts["memory"], strict=True)}
        yield Finding("GPU", "ok", f"{len(facts['gpus'])} x {' and '.join(sorted(sizes))}")
        yield _compile(facts["compile_fault"])
    elif listed and not facts["cuda"]:
        yield Finding("GPU", "missing", f"{len(listed)} here, and this torch is built for CPUs", TORCH_INDEX)
    elif listed:
        why = facts["warnings"][0].splitlines()[0] if facts["warnings"] else "torch sees none"
        remedy = "a newer driver, or a torch that was built for an older CUDA"
        yield Finding("GPU", "missing", f"{len(listed)} here that torch cannot use: {why}", remedy)
    else:
        told = "none: everything runs on the CPU, which is right for tiny targets alone"
        yield Finding("GPU", "warning", told)


def _compile(fault: str) -> Finding:
    """Whether kernels can be compiled for the GPU, as training does there."""
    if not fault:
        return Finding("torch.compile", "ok", "a C compiler and Triton make kernels for the GPU")
    remedy = "install gcc, Python's headers (python3-dev), and the Triton that torch was released with"
    return Finding("torch.compile", "missing", f"makes no kernel for the GPU, which training needs: {fault}", remedy)


def _transformers(facts: Mapping[str, Any], error: str) -> Iterator[Finding]:
    if error:
        remedy = f"where torchvision is at fault uninstall it, else {INSTALL} . in {PROJECT}"
        yield Finding("transformers", "missing", f"cannot be imported: {error}", remedy, is_fatal=True)
    else:
        yield Finding("transformers", "ok", f"{facts['version']}, with dflow's processors")


def _torchvision(facts: Mapping[str, Any], error: str) -> Iterator[Finding]:
    if error:
        told = f"does not fit this torch, and breaks transformers: {error}"
        yield Finding("torchvision", "missing", told, "uninstall it, or install the build that fits")
    else:
        yield Finding("torchvision", "ok", f'{facts["version"]}: image_backend = "torchvision" works')


_LOADED = {"torch": _torch, "transformers": _transformers, "torchvision": _torchvision}


def _extra(each: Requirement, versions: LibraryVersions) -> Finding:
    what, remedy = EXTRAS[each.extra], f"{INSTALL} '.[{each.extra}]' in {PROJECT}"
    if _is_missing(versions, each):
        return Finding(each.name, "missing", f"not installed, so no {what}", remedy)
    if not each.allows(versions[each.name]):
        return Finding(each.name, "warning", f"{versions[each.name]}, and dflow asks for {each.bounds}", remedy)
    return Finding(each.name, "ok", f"{versions[each.name]}: {what}")


def _requirement(text: str, extra: str) -> Requirement:
    found = REQUIREMENT.match(text)
    assert found is not None, text
    return Requirement(found[1], found[2].strip(), extra or found[3] or "")


def _is_missing(versions: LibraryVersions, each: Requirement) -> bool:
    return versions[each.name] == NOT_INSTALLED


def _release(version: str) -> tuple[int, ...]:
    """2.13.0+cpu -> (2, 13, 0); what follows the numbers is passed over."""
    found = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _holds(version: Sequence[int], sign: str, bound: Sequence[int]) -> bool:
    """Compared with as many zeros behind as the longer one has numbers."""
    length = max(len(version), len(bound))
    here, there = ([*each, *[0] * (length - len(each))] for each in (version, bound))
    return {
        ">=": here >= there,
        "<=": here <= there,
        "==": here == there,
        "!=": here != there,
        ">": here > there,
        "<": here < there,
    }[sign]
