#!/bin/sh
# Everything that is measured on one GPU, in under 8 minutes: benchmarks/gpu.py says what. PYTHON: the interpreter.
cd "$(dirname "$0")/.." || exit 1
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
