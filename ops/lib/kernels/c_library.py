"""Libraries from C source, compiled when a process first asks for them, and the sweep over a tile of logits as one.

A library is made with the system's C compiler in a directory of the process's own (its code fits this processor only)
and needs about a second at most. Without a compiler there are no libraries, and torch does their work.

One sweep finds each row's maximum, replaces the logits by their exponentials and sums these, while the row is in the
first-level cache; torch needs four passes for it.

Legend: R rows of a tile, C its columns.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-fno-math-errno", "-shared", "-fPIC")
SECONDS = 60

# The reference of a row is what its exponentials are taken against. It is raised only when the maximum passes it by
# more than SLACK, so that sums made before seldom need a new scale. NaN and infinite logits come out as NaN.
# exp(x) = 2^n exp(r), |r| <= ln(2) / 2: adding 1.5 * 2^23 rounds n to the low bits of a float, ln(2) is taken off in
# two parts, and exp(r) is its Taylor polynomial of degree 7 (what is left out is below 1e-8 relative).
SOURCE = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));

static inline vec pick(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

static inline vec load(const float *from) { vec x; memcpy(&x, from, sizeof x); return x; }

static inline vec exponential(vec x)
{
    const vec zero = {0};
    x = pick(x < zero - 87.0f, zero - 87.0f, x);
    vec shifted = x * 1.44269504f + 12582912.0f;
    vec n = shifted - 12582912.0f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.98412698e-4f + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r * r + (r + 1.0f);
    ivec power = ((ivec)shifted << 23) + (127 << 23);
    return p * (vec)power;
}

/* Notes the logit of the label at x[at] and whether it is the first best so far; takes it out if it has to hide. */
static void look(float *x, int64_t columns, int64_t at, int hide, float best, float *logit, uint8_t *ahead)
{
    float own = x[at];
    int64_t beaten = !(own > best);
    for (int64_t c = 0; c < at; c++)
        beaten += x[c] >= own;
    for (int64_t c = at + 1; c < columns; c++)
        beaten += x[c] > own;
    *logit = own;
    *ahead = beaten == 0;
    if (hide)
        x[at] = -INFINITY;
}

int sweep(float *logits, int64_t rows, int64_t columns, int64_t start, float slack, float *reference, float *best,
          double *total, float *scale, const int64_t *labels, int hide, float *logit, uint8_t *ahead)
{
    const vec zero = {0};
    int raised = 0;
    int64_t whole = columns - columns % LANES, rest = columns - whole;
    for (int64_t row = 0; row < rows; row++) {
        float *x = logits + row * columns;
        if (labels && labels[row] >= start && labels[row] < start + columns)
            look(x, columns, labels[row] - start, hide, best[row], logit + row, ahead + row);
        vec last = zero - INFINITY, most = last, sums = zero;
        memcpy(&last, x + whole, rest * sizeof(float));
        most = pick(last > most, last, most);
        for (int64_t c = 0; c < whole; c += LANES) {
            vec now = load(x + c);
            most = pick(now > most, now, most);
        }
        float top = most[0];
        for (int lane = 1; lane < LANES; lane++)
            top = most[lane] > top ? most[lane] : top;
        best[row] = top > best[row] ? top : best[row];
        scale[row] = 1;
        if (top > reference[row] + slack) {
            scale[row] = expf(reference[row] - top);
            reference[row] = top;
            raised = 1;
        }
        float base = reference[row];
        for (int64_t c = 0; c < whole; c += LANES) {
            vec now = exponential(load(x + c) - base);
            sums += now;
            memcpy(x + c, &now, sizeof now);
        }
        last = exponential(last - base);
        memcpy(x + whole, &last, rest * sizeof(float));
        double sum = 0;
        for (int lane = 0; lane < LANES; lane++)
            sum += (double)sums[lane] + (lane < rest ? (double)last[lane] : 0.0);
        total[row] = total[row] * scale[row] + sum;
    }
    return raised;
}
"""


@functools.cache
def compiled_sweep() -> tuple[str, Callable[..., int] | None]:
    """The compiler's name and the C function `sweep`, or the reason why there is none and None; once per process.

    sweep(logits_RC, R, C, start, slack, reference_R, best_R, total_R, scale_R, labels_R, hide, logit_R, ahead_R)
    takes data pointers of contiguous CPU tensors (float32; total_R float64, labels_R int64 or None, ahead_R bool)
    and does in place what `ops.lib.drafts.losses.tiled_softmax.torch_sweep` does. It returns 0 where every scale is 1.
    """
    name, library = compiled_library("sweep", SOURCE)
    if library is None:
        return name, None
    function = library.sweep
    pointer, number, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    sizes = (number, number, number, ctypes.c_float)
    function.argtypes = [pointer, *sizes, pointer, pointer, pointer, pointer, pointer, integer, pointer, pointer]
    function.restype = integer
    return name, function


def compiled_library(name: str, source: str, *flags: str) -> tuple[str, ctypes.CDLL | None]:
    """The compiler's name and the library made of a C source, or the reason why there is none and None.

    name is that of the source's file; flags are the compiler's, beside FLAGS. Compiles at every call.
    """
    command = _compiler()
    if not command:
        return "no C compiler", None
    try:
        return Path(command[0]).name, _load(command, name, source, flags)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{Path(command[0]).name} failed: {type(error).__name__}", None


def _compiler() -> list[str]:
    """The command of $CC, or else of the first C compiler on the path; empty where there is none."""
    wanted = shlex.split(os.environ.get("CC", ""))
    for command in [wanted] if wanted else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    return []


def _load(command: list[str], name: str, source: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """The compiled source. The file is gone once it is loaded.

    Raises OSError or subprocess.SubprocessError where the compiler or the loader fails.
    """
    with tempfile.TemporaryDirectory(prefix="dflow-kernels-") as folder:
        text, library = Path(folder, f"{name}.c"), Path(folder, f"{name}.so")
        text.write_text(source)
        build = [*command, *FLAGS, *flags, "-march=native", "-o", str(library), str(text), "-lm"]
        subprocess.run(build, check=True, capture_output=True, timeout=SECONDS)
        return ctypes.CDLL(str(library))
