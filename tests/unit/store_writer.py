"""A process that forks writers to a disk tier, one a line of its input, and kills each when the next line comes.

Forking from a process that has everything imported, so that a test can kill a writer every few milliseconds.
"""

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from store_support import CHUNK_PAGES, image, keys_of, make_disk

SEQUENCES = 6
TAGS = ("1", "2", "3")


def tokens_of(seed: int) -> list[int]:
    choose = random.Random(seed % SEQUENCES)
    return [choose.choice([0, 0, 0, 1, seed % SEQUENCES]) for _ in range(choose.randint(3, 22))]


def write_slowly(file: int, parts: Sequence[memoryview], offset: int) -> int:
    """In place of ``os.pwritev``: page by page, so that most of the time there is half a file."""
    time.sleep(0.001)
    return _pwritev(file, [parts[0][:4096]], offset)


_pwritev = os.pwritev


def write_for_ever(path: Path, budget_bytes: int, seed: int) -> None:
    disk = make_disk(path, budget_bytes=budget_bytes)
    if seed % 2:
        os.pwritev = write_slowly
    for number in itertools.count(seed * 7):
        tag = TAGS[number % len(TAGS)]
        tokens = tokens_of(number)
        keys = keys_of(tokens, tag=tag)
        for first in range(0, len(tokens), CHUNK_PAGES):
            for end in range(first + 1, min(first + CHUNK_PAGES, len(tokens)) + 1):  # replaces the shorter one
                disk.write(image(keys, first, end, tag=tag))
                if number == seed * 7 and end == 1:
                    os.write(1, b"writes\n")


def main() -> None:
    path, budget_bytes = Path(sys.argv[1]), int(sys.argv[2])
    for seed in range(1_000_000):
        if not sys.stdin.readline():
            return
        child = os.fork()
        if not child:
            write_for_ever(path, budget_bytes, seed)
        sys.stdin.readline()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.write(1, b"dead\n")


if __name__ == "__main__":
    main()
