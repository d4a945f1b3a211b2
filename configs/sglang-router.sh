#!/bin/sh
# sglang-router 0.3 in front of engines that run with the plugin:
#
#   sh configs/sglang-router.sh POLICY http://engine-1:30001 http://engine-2:30002
#
# HOST and PORT are its own address, PYTHON the interpreter that has it, HEALTH_S how often it looks at an engine.
# Its command line does not know consistent_hashing, which it has; so it is started from Python.
set -eu
[ $# -ge 2 ] || { echo "usage: $0 manual|consistent_hashing|round_robin ENGINE_URL..." >&2; exit 2; }
exec "${PYTHON:-python3}" - "$@" <<'PYTHON'
import os
import sys

from sglang_router.launch_router import launch_router
from sglang_router.router_args import RouterArgs

policy, *engines = sys.argv[1:]
if policy not in ("manual", "consistent_hashing", "round_robin"):
    sys.exit(f"no policy {policy}")
launch_router(
    RouterArgs(
        host=os.environ.get("HOST", "127.0.0.1"),
        port=int(os.environ.get("PORT", "30000")),
        worker_urls=engines,
        policy=policy,
        assignment_mode="min_load",
        health_check_interval_secs=int(os.environ.get("HEALTH_S", "5")),
    )
)
PYTHON
