"""What a move costs over what its bytes cost: each transport, end to end, against the bare way it uses.

    python benchmarks/transports.py [cma|tcp|nixl|idle ...]

End to end is one move between two processes by way of their move workers: lease, handshake, reservation, bytes,
checksums at both ends, publication. The bare ways are, for CMA, a copy of the same bytes in one thread; for TCP,
sendall and recv_into of them over loopback; for NIXL, one agent writing them to another. Each is the best of several
turns, which alternate, since other work on the machine hits one or the other. Idle is what a worker without work
takes of a core.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "transfer"))

from peer import PeerOptions  # noqa: E402
from peer_process import PeerProcess, tokens_of  # noqa: E402

from psrl_sglang.store.arena import Arena  # noqa: E402
from psrl_sglang.transfer.client import MoveClient  # noqa: E402

MIB = 1 << 20
SIZE_BYTES = 256 * MIB
TURNS = 7
IDLE_S = 10.0
TARGETS = {"cma": 0.60, "tcp": 0.80, "nixl": 0.85}
