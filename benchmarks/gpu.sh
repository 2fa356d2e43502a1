#!/bin/sh
# Everything that one GPU should show: benchmarks/gpu.py says what. PYTHON: the interpreter. WHEELS: a folder of wheels, by
# default that of `make gpu-wheels`; they are installed for this command only, into a folder whose name lets stages take it
# for the interpreter's own.
began=$(date +%s)
root=$(cd "$(dirname "$0")/.." && pwd) || exit 1
python=${PYTHON:-python3}
wheels=${WHEELS-$root/wheels}
if [ -d "$wheels" ]; then
  own=$(mktemp -d) || exit 1
  trap 'rm -rf "$own"' EXIT
  packages="$own/site-packages"
  "$python" -m pip install --disable-pip-version-check --quiet --no-index --no-deps --no-compile \
    --target "$packages" "$wheels"/*.whl || echo "wheels: not installed, what needs them is skipped" >&2
fi
PYTHONPATH="$root${packages:+:$packages}${PYTHONPATH:+:$PYTHONPATH}" "$python" -m benchmarks.gpu --began "$began" "$@"
