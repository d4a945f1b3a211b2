"""The offline engine with our tiers behind its tree: real pools, linker and store, and a forward that checks every
byte of KV it reads, layer by layer."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from offline_tree import OfflineEngine, Written
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.utils import get_storage_hash_str

from psrl_sglang.engine.linker import PsrlLinker

PAGE = 4
CHUNK = 16
LAYERS = 4
DIM = 8
_PAGE_BYTES = 2 * LAYERS * PAGE * DIM * 4
_MODEL = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: {"model": "offline"}))


class WrongBytes(AssertionError):
    """The forward read KV that is not there yet, or is of something else."""


class TieredEngine(OfflineEngine):
    """``chunks``: how many chunks DRAM has room for. Close it, for its threads' sake."""

    def __init__(
        self,
        *,
        chunks: int = 256,
        lmcache: dict[str, Any] | None = None,
        sglang: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        offload = {"enable": True, "chunk_size": CHUNK, "offload_size_gb": _gib(chunks), **(lmcache or {})}
        psrl = {"lmcache": offload, "sglang": {"load_policy": "always", **(sglang or {})}}
        super().__init__(page_size=PAGE, layers=LAYERS, head_dim=DIM, psrl=psrl, **options)
        tree = self.tree
        type(tree).psrl_settings = replace(tree.psrl_settings, model_config=_MODEL)
        params = SimpleNamespace(
            page_size=PAGE,
            token_to_kv_pool_allocator=self.allocator,
            mtp_draft_device_pools=(),
            sidecar_draft_device_pools=(),
        )
        self.linker = PsrlLinker(None, params, components={ComponentType.FULL}, extra_config={})
        tree.init_cache_linker(self.linker)
        self.pool.register_layer_transfer_counter(self.linker.layer_done_counter)
        self.dram = self.linker.store.dram
        self.failed: list[Req] = []  # of the last batch
        self._in_forward = False
        self.scramble()

    def close(self) -> None:
        self.linker.close()

    # a scheduler's steps -------------------------------------------------------------------------------------

    def arrive(self, req: Req) -> None:
        """What the scheduler asks at arrival where there is a gate."""
        req.init_next_round_input(self.tree)
        self.tree.prefetch_from_storage(req.cache_request_handle, req.last_host_node, [])

    def is_open(self, req: Req) -> bool:
        return self.tree.check_prefetch_progress(req.cache_request_handle)

    def abort_waiting(self, req: Req) -> None:
        self.waiting.remove(req)
        self.tree.release_aborted_request(req.cache_request_handle)

    def admit(self, req: Req, *, chunk: int | None = None) -> bool:
        return bool(self.prefill([req], chunk=chunk))

    def prefill(self, reqs: Sequence[Req], *, chunk: int | None = None) -> list[Req]:
        """One batch: look up, load, compute. Returns those that fitted; ``failed`` says whose load failed."""
        self.tree.check_hicache_events()
        admitted = [req for req in reqs if self.queue_load(req, chunk)]
        with self.forward(admitted):
            pass
        return admitted

    def queue_load(self, req: Req, chunk: int | None = None) -> bool:
        """Look a waiting request up, and queue the load of what DRAM has. False if nothing fits."""
        req.init_next_round_input(self.tree)
        self._plan(req, chunk)
        lock = self.tree.lock(req.last_node)
        fits = self._has_room(req.extend_len) and len(self.rows.free_slots) > len(self._admitted())
        if not fits:
            self.tree.unlock(lock)
            return False
        req.host_loaded_length = 0
        if req.needs_host_load_back():
            params = InitLoadBackParams(req.best_match_node, req.host_hit_length, req=req)
            req.host_loaded_length, req.last_node = self.tree.init_load_back(params)
            assert req.host_loaded_length in (0, req.host_hit_length)
            req.prefix_len += req.host_loaded_length
        self._plan(req, chunk)
        req.lock = lock
        self.waiting.remove(req)
        self.running.append(req)
        return True

    @contextmanager
    def forward(self, reqs: Sequence[Req]) -> Iterator[None]:
        """The forward of a batch, with its loads under way while the block runs."""
        index = self.tree.ready_to_load_host_cache()
        self._in_forward = True
        before = self._bytes()
        for req in reqs:
            self._extend(req)
        yield
        wrong = self._run_layers(reqs, index, before)
        self._in_forward = False
        self.failed = self.tree.finish_external_linker_loads(list(reqs))
        self.pool.layer_transfer_counter.set_consumer(-1)
        if wrong and not self.failed:  # a load that failed left anything, and its requests have no answer
            raise WrongBytes(wrong[0])
        for req in self.failed:
            self.drop_failed(req)

    def drop_failed(self, req: Req) -> None:
        """What result processing does with a request whose load failed."""
        req.finished_reason = req.discard_output_reason
        release_kv_cache(req, self.tree, checkpoint=True)
        self.running.remove(req)

    def abort(self, req: Req) -> None:
        """A running request's client is gone: SGLang publishes what there is."""
        req.finished_reason = FINISH_ABORT("gone")
        req.finished_len = len(req.output_ids)
        release_kv_cache(req, self.tree, checkpoint=True)
        self.running.remove(req)

    def settle(self) -> None:
        assert self.linker.settle_offloads(20.0)
        self.tree.check_hicache_events()

    def drop_device(self) -> None:
        """Nothing stays on the device but what runs, and what was there is overwritten."""
        self.settle()
        self.evict(self.allocator.size)
        self.scramble()

    def scramble(self) -> None:
        free = (self.allocator.get_all_free_pages()[:, None] * PAGE + torch.arange(PAGE)).flatten()
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer[free] = torch.rand(len(free), 1, DIM)

    def hashes(self, tokens: Sequence[int], tag: str | None = None) -> list[str]:
        """SGLang's, of the whole pages of a prefix."""
        key = self.key(tokens, tag).page_aligned(PAGE)
        return list(get_storage_hash_str(key, page_size=PAGE)) if len(key) else []

    def in_dram(self, tokens: Sequence[int], tag: str | None = None) -> int:
        """Tokens of a prefix that DRAM has."""
        keys = self.linker.keys("kv", self.hashes(tokens, tag), tag or self.tag)
        return sum(piece.pages for piece in self.dram.match(keys)) * PAGE

    def check_quiet(self) -> None:
        """With nothing running, nothing is held, locked, marked or on its way."""
        assert not self.running
        self.settle()
        self.check_books()
        assert self.dram.busy_chunks() == 0
        assert self.linker.layer_done_counter.futures == {}
        tiers, gate = self.tree.tiers, self.tree.tiers.gate
        held = {
            "offloads": tiers.pending_offloads,
            "loads": tiers.inflight_load_rids,
            "loaded slots": tiers.private_load_indices,
            "hits": tiers.hit_markers,
            "look-ups": self.linker._looked_up,
            "queued loads": self.linker._pending,
            "gate": [] if gate is None else [*gate._waiting, *gate._landed],
        }
        assert not any(held.values()), held
        assert self.tree.evictable_size() + self.allocator.available_size() == self.allocator.size

    # the model -----------------------------------------------------------------------------------------------

    def content(self, written: Sequence[Written]) -> np.ndarray:
        """What the forward writes: [K or V, layers, tokens, DIM], another row for everything that matters."""
        # Not the whole prefix of each: what a prefix is differs from the one before by its last token.
        seed = zlib.crc32(repr(written[0].salt).encode())
        for token in written[0].prefix[:-1]:
            seed = zlib.crc32(token.to_bytes(4, "little"), seed)
        rows = []
        for one in written:
            seed = zlib.crc32(one.prefix[-1].to_bytes(4, "little"), seed)
            rows.append(seed ^ zlib.crc32(repr(one.weights).encode()))
        numbers = np.array(rows, dtype=np.uint32)[None, None, :, None]
        places = np.arange(2 * LAYERS * DIM, dtype=np.uint32).reshape(2, LAYERS, 1, DIM) + 1
        return (numbers * np.uint32(2654435761) + places * np.uint32(40503)) & np.uint32(0x3FFFFFFF)

    def _write(self, req: Req, start: int) -> None:
        super()._write(req, start)
        if not self._in_forward:
            slots = self._row(req)[start:]
            for layer in range(LAYERS):
                self._put(slots, layer, self._made(slots))

    def _made(self, slots: list[int]) -> np.ndarray | None:
        return self.content([self.written[slot] for slot in slots]) if slots else None

    def _put(self, slots: list[int], layer: int, made: np.ndarray | None) -> None:
        if made is not None:
            for part, buffers in enumerate((self.pool.k_buffer, self.pool.v_buffer)):
                rows = made[part, layer].view(np.float32).copy()
                buffers[layer].view(-1, DIM)[slots] = torch.from_numpy(rows)

    def _run_layers(self, reqs: Sequence[Req], index: int, before: np.ndarray) -> list[str]:
        """Compute a batch; returns what was wrong with what it read."""
        wrong: list[str] = []
        self.pool.layer_transfer_counter.set_consumer(index)
        prefixes = [self._row(req)[: req.prefix_len] for req in reqs]
        fresh = [self._row(req)[req.prefix_len :] for req in reqs]
        loaded = []
        for req, row in zip(reqs, prefixes, strict=True):
            tokens = (*req.origin_input_ids, *req.output_ids)
            for position in range(req.prefix_len - req.host_loaded_length, req.prefix_len):
                # What is loaded must be what this request would have computed now.
                written = Written(tokens[: position + 1], self.user_salt(req), self.trainer.weights)
                self.written[row[position]] = written
                loaded.append(row[position])
            self.check_lookup(row, tokens, self.user_salt(req))
        expected = [self._made(row) for row in prefixes]
        made = [self._made(row) for row in fresh]
        others = np.setdiff1d(np.arange(before.shape[2]), [slot for row in (loaded, *fresh) for slot in row])
        for layer in range(LAYERS):
            both = self.pool.get_key_buffer(layer), self.pool.get_value_buffer(layer)
            for row, wanted in zip(prefixes, expected, strict=True):
                if wanted is not None:
                    found = np.stack([buffer.view(-1, DIM)[row].numpy().view(np.uint32) for buffer in both])
                    bad = np.flatnonzero((found != wanted[:, layer]).any(axis=(0, 2))).tolist()
                    wrong += [f"layer {layer}: positions {bad} of {len(row)} are wrong"] if bad else []
            for row, new in zip(fresh, made, strict=True):
                self._put(row, layer, new)
        if not (self._bytes()[:, :, others] == before[:, :, others]).all():
            raise WrongBytes("a load wrote where nothing was to be loaded")
        return wrong

    def _bytes(self) -> np.ndarray:
        buffers = [*self.pool.k_buffer, *self.pool.v_buffer]
        stacked = torch.stack([buffer.view(-1, DIM) for buffer in buffers]).numpy().view(np.uint32)
        return stacked.reshape(2, LAYERS, -1, DIM)

    def _admitted(self) -> list[Req]:
        return [req for req in self.running if not req.kv.holds_kv]


def _gib(chunks: int) -> float:
    return (chunks + 0.5) * (CHUNK // PAGE) * _PAGE_BYTES / 2**30


def tokens(seed: float, length: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(800) for _ in range(length)]


def delays(engine: TieredEngine, longest_s: float, seed: int = 0) -> None:
    """Random delays before every layer of a load and every offload."""
    source = random.Random(seed)
    engine.linker.before_layer = lambda layer: time.sleep(source.uniform(0, longest_s))
    engine.linker.before_offload = lambda: time.sleep(source.uniform(0, longest_s))


def failing(layer: int | None = None) -> Callable[..., None]:
    """For ``before_layer``: fails at one layer; for ``before_offload``: always."""

    def fail(at: int | None = None) -> None:
        if at == layer:
            raise OSError("injected")

    return fail
