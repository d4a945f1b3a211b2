#!/bin/sh
# Install the routers for tests/engine/test_routers.py into DIR, beside the environment of $PYTHON (default: python3).
set -eu
[ $# -eq 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
"${PYTHON:-python3}" -m pip install --no-deps --upgrade --target "$1" --requirement "$here/requirements.txt"
