"""Libraries from C files, compiled on first use in a process: the sweep over a tile of logits (sweep.c), and what is
computed of rows of the draft's logits beside the target's (comparison.c); both behind lanes.c.

A library is compiled by the system's C compiler in a private temporary directory (its code is for this processor only),
which takes about a second at most. Without a compiler there are no libraries, and torch is used instead.

Legend: R rows of a tile, C its columns; U rows of the target's logits, V vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import get_data

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-fno-math-errno", "-shared", "-fPIC")
SECONDS = 60


@functools.cache
def compiled_sweep() -> tuple[str, Callable[..., int] | None]:
    """The compiler's name and the C function `sweep`; without one, the reason and None. Cached.

    sweep(logits_RC, R, C, start, slack, reference_R, best_R, total_R, scale_R, labels_R, hide, logit_R, ahead_R) takes
    data pointers of contiguous CPU tensors (float32; total_R float64, labels_R int64 or None, ahead_R bool). It is the
    in-place form of `ops.lib.drafts.losses.tiled_softmax.torch_sweep`, and returns 0 if every scale is 1.
    """
    name, library = _sweeps()
    if library is None:
        return name, None
    function = library.sweep
    pointer, number, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    sizes = (number, number, number, ctypes.c_float)
    function.argtypes = [pointer, *sizes, pointer, pointer, pointer, pointer, pointer, integer, pointer, pointer]
    function.restype = integer
    return name, function


@functools.cache
def compiled_keep_best() -> Callable[..., None] | None:
    """The C function `keep_best` of the compiled library; None without a compiler.

    keep_best(logits_RC, R, C, start, count, values_RB, tokens_RB) takes data pointers of contiguous CPU tensors
    (float32; tokens int64). It does what `ops.lib.drafts.losses.candidates.BestTokens.add` does.
    """
    _name, library = _sweeps()
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.keep_best.argtypes = [pointer, number, number, number, number, pointer, pointer]
    library.keep_best.restype = None
    function: Callable[..., None] = library.keep_best
    return function


@functools.cache
def compiled_comparison() -> ctypes.CDLL | None:
    """The library of comparison.c, or None without a compiler.

    Its functions take data pointers of contiguous CPU tensors: logits [R, V] and [U, V], float32; labels and `of` [R],
    int64; correct, bool; others, gap and sums, float64; all else float32. They return nothing.
    """
    sources = get_data("ops.lib.kernels", "lanes.c"), get_data("ops.lib.kernels", "comparison.c")
    # x * f - y * g of equal numbers must be 0
    _name, library = compiled_library(sources, "-ffp-contract=off")
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.normalise.argtypes = [pointer, number, number, *[pointer] * 5]
    library.mean_gap.argtypes = [pointer, pointer, pointer, number, number, pointer]
    library.distances.argtypes = [pointer, pointer, pointer, number, number, *[pointer] * 3]
    library.slope.argtypes = [pointer, pointer, pointer, number, number, *[pointer] * 9]
    for function in (library.normalise, library.mean_gap, library.distances, library.slope):
        function.restype = None
    return library


@functools.cache
def _sweeps() -> tuple[str, ctypes.CDLL | None]:
    return compiled_library((get_data("ops.lib.kernels", "lanes.c"), get_data("ops.lib.kernels", "sweep.c")))


def compiled_library(sources: Sequence[bytes | None], *flags: str) -> tuple[str, ctypes.CDLL | None]:
    """Compile C sources, joined, into a library. Returns the compiler's name and the library, or the reason and None.

    sources: results of `pkgutil.get_data` for files beside the code, whose contents are thereby part of keys. flags:
    compiler flags besides FLAGS. Compiles at every call.
    """
    present = [source for source in sources if source is not None]
    assert len(present) == len(sources)  # every loader of modules in files has get_data
    command = _compiler()
    if not command:
        return "no C compiler", None
    try:
        return Path(command[0]).name, _load(command, b"\n".join(present), flags)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{Path(command[0]).name} failed: {type(error).__name__}", None


def _compiler() -> list[str]:
    """The compiler command in $CC, or else the first C compiler on the path; empty without one."""
    wanted = shlex.split(os.environ.get("CC", ""))
    for command in [wanted] if wanted else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    return []


def _load(command: list[str], source: bytes, flags: tuple[str, ...]) -> ctypes.CDLL:
    """Compile a C source and load the library; the file is removed after loading.

    Raises OSError or subprocess.SubprocessError if the compiler or the loader fails.
    """
    with tempfile.TemporaryDirectory(prefix="dflow-kernels-") as folder:
        library = Path(folder, "kernels.so")
        build = [*command, *FLAGS, *flags, "-march=native", "-o", str(library), "-x", "c", "-", "-lm"]
        subprocess.run(build, input=source, check=True, capture_output=True, timeout=SECONDS)
        return ctypes.CDLL(str(library))
