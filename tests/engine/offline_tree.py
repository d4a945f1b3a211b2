"""A versioned tree without a server: SGLang's own tree, pools, allocation and release code in this process, and
a model that only remembers which weights it would have computed every KV slot with."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("SGLANG_PLATFORM", "psrl_cpu")  # read when SGLang is imported

import torch
from offline_trainer import Trainer, Weights
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req, retract_all
from sglang.srt.mem_cache.allocation import alloc_for_decode, alloc_for_extend
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, match_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.srt.session.session_controller import Session

from psrl_sglang.config import PsrlConfig
from psrl_sglang.engine import eviction, updates
from psrl_sglang.engine.identity import RunIdentity
from psrl_sglang.engine.metrics import VersionMetrics
from psrl_sglang.engine.request import versions_of
from psrl_sglang.engine.tree import versioned
from psrl_sglang.engine.worker import TreeSettings
from psrl_sglang.namespace import VersionLedger, compose_salt

CORES = ("python", "rust")
ROWS = 6
CONTEXT = 256

_rids = count()


class StaleKV(AssertionError):
    """A look-up handed out KV that the request must not use."""


@dataclass(frozen=True)
class Written:
    """What one KV slot holds: the whole prefix up to its token, and the weights that computed it."""

    prefix: tuple[int, ...]
    salt: str | None
    weights: Weights


class OfflineEngine:
    """One scheduler's worth of cache. ``running`` requests hold KV, ``waiting`` ones do not.

    Every method is one step of SGLang's scheduler; the oracle checks each look-up, and ``check_books`` whether
    every slot of the pool is in exactly one place.
    """

    def __init__(
        self,
        *,
        core: str = "python",
        page_size: int = 1,
        lag: int = 0,
        slots: int = 256,
        policy: str = "lru",
        psrl: dict[str, Any] | None = None,
        version: str = "1",
        layers: int = 1,
        head_dim: int = 1,
    ) -> None:
        torch.set_num_threads(1)
        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=page_size, device="cpu"))
        self.ledger = VersionLedger(version, instance="offline", max_version_lag=lag)
        config = PsrlConfig.model_validate(psrl or {})
        if policy == eviction.POLICY:
            eviction.register_policy(self.ledger, fifo=config.lmcache.cache_policy == "FIFO")
        step = eviction.RUST_PRIORITY_STEP if (core, policy) == ("rust", "priority") else 0
        identity = RunIdentity("", str(self.ledger.current), "checkpoint", "offline")
        settings = TreeSettings(config, None, identity, self.ledger, VersionMetrics(), step)
        self.rows = ReqToTokenPool(ROWS, CONTEXT, "cpu", enable_memory_saver=False)
        self.pool = pool = MHATokenToKVPool(
            size=slots,
            page_size=page_size,
            dtype=torch.float32,
            head_num=1,
            head_dim=head_dim,
            layer_num=layers,
            device="cpu",
            enable_memory_saver=False,
        )
        if page_size == 1:
            self.allocator = TokenToKVPoolAllocator(slots, torch.float32, "cpu", pool, False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(slots, page_size, torch.float32, "cpu", pool, False)
        self.tree = versioned(UnifiedRadixCache, settings)(
            params=CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                eviction_policy=policy,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=core,
            )
        )
        self.page_size = page_size
        self.running: list[Req] = []
        self.waiting: list[Req] = []
        self.written: dict[int, Written] = {}
        self.trainer = Trainer(self.tree, version, lag=lag)

    # requests ------------------------------------------------------------------------------------------------

    def request(self, tokens: Iterable[int], salt: str | None = None) -> Req:
        """A request that has arrived: it waits."""
        sampling = SamplingParams(max_new_tokens=CONTEXT)
        req = Req(f"r{next(_rids)}", None, array("q", tokens), sampling, cache_salt=salt)
        self.waiting.append(req)
        return req

    def turn(self, session: Session, tokens: Iterable[int]) -> Req:
        """The next request of a streaming session: its history and ``tokens``."""
        last = [node.req for node in session.req_nodes.values()]
        history = [*last[0].origin_input_ids, *last[0].output_ids] if last else []
        req = self.request([*history, *tokens])
        req.session, session._inflight = session, True
        return req

    def match_while_waiting(self, req: Req) -> None:
        """SGLang's policy looks every waiting request up, whether or not it is admitted then."""
        match_kv_cache(req, self.tree)

    def admit(self, req: Req, *, chunk: int | None = None) -> bool:
        """Look a waiting request up and prefill it, or its first ``chunk`` tokens. False if nothing fits."""
        req.init_next_round_input(self.tree)
        if req.kv.holds_kv:
            slots = self._row(req)[: req.prefix_len]
        else:
            slots = self.tree.prefix_device_indices(req).tolist()
        self.check_lookup(slots, req.full_untruncated_fill_ids, self.user_salt(req))
        self._plan(req, chunk)
        lock = self.tree.lock(req.last_node)
        if not self._has_room(req.extend_len) or not (req.kv.holds_kv or self.rows.free_slots):
            self.tree.unlock(lock)
            return False
        req.lock = lock
        self.waiting.remove(req)
        self.running.append(req)
        self._extend(req)
        return True

    def prefilled(self, req: Req) -> bool:
        """Whether the last chunk of the prompt was launched."""
        return req.extend_end == len(req.full_untruncated_fill_ids)

    def next_chunk(self, req: Req, *, chunk: int | None = None) -> bool:
        """Publish the chunk that was computed, and compute the next one."""
        checkpoint_kv_cache(req, self.tree)
        req.init_next_round_input()
        self._plan(req, chunk)
        if not self._has_room(req.extend_len):
            req.extend_end = req.prefix_len
            return False
        self._extend(req)
        return True

    def take_result(self, req: Req, token: int) -> None:
        """The token that the last launched forward produced; after a prefill the prompt is published."""
        first = req.kv.kv_committed_len == req.extend_end
        req.output_ids.append(token)
        if first and not req.finished():
            checkpoint_kv_cache(req, self.tree)

    def decode(self, req: Req) -> bool:
        """Launch a decode step: the KV of the last token of the sequence is written now."""
        if not self._has_room(1):
            return False
        length = torch.tensor([req.kv.kv_committed_len])
        batch = SimpleNamespace(
            reqs=[req],
            tree_cache=self.tree,
            req_to_token_pool=self.rows,
            device="cpu",
            maybe_evict_swa=lambda: None,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            seq_lens=length,
            seq_lens_cpu=length,
            req_pool_indices=torch.tensor([req.kv.req_pool_idx]),
            req_pool_indices_cpu=torch.tensor([req.kv.req_pool_idx]),
        )
        alloc_for_decode(batch, 1)
        self._write(req, int(length))
        return True

    def generate(self, req: Req, tokens: Iterable[int]) -> None:
        """Let a running request produce ``tokens``, one forward each; the KV of the last one is not written."""
        for token in tokens:
            if req.kv.kv_committed_len < req.seqlen:  # no forward is in flight
                assert self.decode(req)
            self.take_result(req, token)

    def finish(self, req: Req) -> None:
        req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
        req.finished_len = len(req.output_ids)
        release_kv_cache(req, self.tree, checkpoint=True)
        self.running.remove(req)

    def abort(self, req: Req) -> None:
        req.finished_reason = FINISH_ABORT("gone")
        release_kv_cache(req, self.tree, checkpoint=False)
        self.running.remove(req)

    def retract(self, reqs: Sequence[Req], *, pause: bool = True) -> None:
        """Take the KV of running requests back; at a pause what they computed is published first."""
        reqs = list(reqs)
        if pause:
            for req in reqs:
                updates.before_release(req=req, tree_cache=self.tree)
        retract_all(
            reqs=reqs,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree,
            hisparse_coordinator=None,
        )
        for req in reqs:
            self.running.remove(req)
            self.waiting.append(req)

    def run(self, tokens: Iterable[int], *, output: Sequence[int] = (0,), salt: str | None = None) -> int:
        """One request from arrival to its end. Returns how many of its tokens came from the cache."""
        req = self.request(tokens, salt)
        assert self.admit(req)
        reused = req.prefix_len
        self.generate(req, output)
        self.finish(req)
        return reused

    # the tree ------------------------------------------------------------------------------------------------

    def key(self, tokens: Iterable[int], tag: str | None = None, salt: str | None = None) -> RadixKey:
        return RadixKey(array("q", tokens), cache_salt=compose_salt(tag or self.tag, salt))

    def resident(self, tokens: Iterable[int], tag: str | None = None, salt: str | None = None) -> int:
        """Tokens on the device under a tag, without touching anything."""
        return self.tree.tree_core.match_full_device_prefix(self.key(tokens, tag, salt))[0]

    def probe(self, tokens: Sequence[int], tag: str | None = None, salt: str | None = None) -> int:
        """Look up without a request, as a pin or a move does; the oracle checks what comes back."""
        match = self.tree.match_prefix(MatchPrefixParams(key=self.key(tokens, tag, salt)))
        slots = self.tree.path_device_indices(match.last_device_node).tolist()
        assert len(slots) == match.device_prefix_len
        self.check_lookup(slots, tokens, salt)
        return len(slots)

    def touch(self, tokens: Sequence[int], tag: str | None = None) -> None:
        """Make what is cached of ``tokens`` the most recently used."""
        self.tree.match_prefix(MatchPrefixParams(key=self.key(tokens, tag)))

    def evict(self, tokens: int) -> None:
        self.tree.evict(EvictParams(num_tokens=tokens))

    @property
    def tag(self) -> str:
        return str(self.ledger.current)

    @staticmethod
    def tag_of(req: Req) -> str | None:
        return versions_of(req).tag

    @staticmethod
    def user_salt(req: Req) -> str | None:
        state = versions_of(req)
        return state.user_salt if state is not None else req.cache_salt

    # the oracle ----------------------------------------------------------------------------------------------

    def check_lookup(self, slots: Sequence[int], tokens: Sequence[int], salt: str | None) -> None:
        for position, slot in enumerate(slots):
            kv = self.written[slot]
            if kv.prefix != tuple(tokens[: position + 1]) or kv.salt != salt:
                raise StaleKV(f"slot {slot} at {position} holds {kv.prefix} ({kv.salt}), asked {list(tokens)}")
            if not self.trainer.may_serve(kv.weights):
                raise StaleKV(
                    f"slot {slot} at {position} was computed by {kv.weights}; now {self.trainer.weights}, "
                    f"lag {self.ledger.max_version_lag}, installed {self.trainer.installed}"
                )

    def check_books(self) -> None:
        page = self.page_size
        pages = {
            "free": self.allocator.get_all_free_pages().tolist(),
            "tree": (self.tree.tree_core.all_values_flatten()[::page] // page).tolist(),
            "held": [slot for kv in self._records() for slot in self._private_pages(kv)],
        }
        every = [number for numbers in pages.values() for number in numbers]
        assert sorted(every) == list(range(1, self.allocator.size // page + 1)), pages
        total = self.tree.evictable_size() + self.tree.protected_size()
        assert total == len(pages["tree"]) * page
        assert self.tree.check_integrity() == []
        held = {record.req_pool_idx for record in self._records()}
        assert sorted([*held, *self.rows.free_slots]) == list(range(1, ROWS + 1))
        if not held and not len(self.tree.pins):
            assert self.tree.protected_size() == 0
            self.tree.sanity_check()

    def _records(self) -> list[Any]:
        records = {id(req.kv): req.kv for req in self.running if req.kv.holds_kv}
        records |= {id(slot.kv): slot.kv for slot in self.tree.session.slots.values() if slot.kv.holds_kv}
        return list(records.values())

    def _private_pages(self, kv: Any) -> list[int]:
        row = self.rows.req_to_token[kv.req_pool_idx, kv.cache_protected_len : kv.kv_allocated_len]
        return (row[:: self.page_size] // self.page_size).tolist()

    # the model -----------------------------------------------------------------------------------------------

    def _plan(self, req: Req, chunk: int | None) -> None:
        end = len(req.full_untruncated_fill_ids)
        if chunk is not None:
            end = min(end, req.prefix_len + max(chunk // self.page_size, 1) * self.page_size)
        req.extend_end = end

    def _has_room(self, tokens: int) -> bool:
        room = self.allocator.available_size() + self.tree.evictable_size()
        return room >= tokens + 2 * self.page_size

    def _extend(self, req: Req) -> None:
        start, end = req.prefix_len, req.extend_end
        batch = SimpleNamespace(
            reqs=[req],
            tree_cache=self.tree,
            req_to_token_pool=self.rows,
            device="cpu",
            is_dllm=lambda: False,
            maybe_evict_swa=lambda: None,
            hisparse_coordinator=None,
            prefix_lens=[start],
            extend_lens=[end - start],
            extend_num_tokens=end - start,
            seq_lens=torch.tensor([end]),
            seq_lens_cpu=torch.tensor([end]),
        )
        alloc_for_extend(batch)
        self._write(req, start)

    def _row(self, req: Req) -> list[int]:
        return self.rows.req_to_token[req.kv.req_pool_idx, : req.kv.kv_committed_len].tolist()

    def _write(self, req: Req, start: int) -> None:
        tokens = (*req.origin_input_ids, *req.output_ids)
        row, salt = self._row(req), self.user_salt(req)
        for position in range(start, len(row)):
            self.written[row[position]] = Written(tokens[: position + 1], salt, self.trainer.weights)
