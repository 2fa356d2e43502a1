#!/bin/sh
# Everything that is measured on one GPU, in under 8 minutes: benchmarks/gpu.py says what. PYTHON: the interpreter.
root=$(cd "$(dirname "$0")/.." && pwd) || exit 1
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
