"""The boundary policy: which namespace a request reads and writes, and what happens when the weights change.

* A request's namespace is chosen when it is looked up and holds no KV, and is fixed while it holds some.
* Strict ("pure only"): at a change every KV-holding request is capped at what it has committed; ``[0, cap)``
  is published under the old tag, the rest stays private and is freed at finish.
* With a lag: the longest match among the tags of the window wins, the newest on a tie, and a crossing request
  needs no cap, because a namespace is named after the *oldest* version in it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from psrl_sglang.engine.metrics import VersionMetrics
from psrl_sglang.engine.request import RequestVersions, attach_versions, versions_of
from psrl_sglang.namespace import VersionLedger, compose_salt

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from psrl_sglang.engine.tree import VersionedTree

_SLOT_TAG = "psrl_tag"


class VersionControl:
    """The version policy of one tree. Every method runs on the scheduler thread, in the same order on every
    rank, and decides from replicated state only."""

    def __init__(self, tree: VersionedTree, ledger: VersionLedger, metrics: VersionMetrics) -> None:
        self._tree = tree
        self._ledger = ledger
        self.metrics = metrics
        # Independent of the scheduler queue that holds a request; never iterated for anything ordered.
        self._live: weakref.WeakSet[Req] = weakref.WeakSet()

    @property
    def ledger(self) -> VersionLedger:
        return self._ledger

    def crossing(self) -> int:
        """Requests that hold KV of a tag that is no longer current."""
        current = str(self._ledger.current)
        states = (versions_of(req) for req in self._live if req.kv.holds_kv and not req.finished())
        return sum(1 for state in states if state is not None and state.tag != current)

    def assign(self, key: RadixKey, req: Req) -> None:
        """Before a look-up on behalf of a request: settle its namespace and point the look-up key at it."""
        state = versions_of(req) or attach_versions(req, req.cache_salt)
        self._live.add(req)
        slot = self._tree.session.find_active_slot(req)
        # A turn that waits borrows its session's KV at its first look-up and has computed nothing with it yet.
        borrows = slot is not None and slot.kv is req.kv and not state.admitted
        if borrows or not req.kv.holds_kv:
            slot_tag = getattr(slot, _SLOT_TAG, None)
            if slot is not None and req.session is not None and not self._may_use(slot_tag):
                self._tree.session.release_session(req.session.session_id)
                if borrows:
                    req.detach_kv()
                self.metrics.sessions_dropped += 1
                slot_tag = None
            self._retag(req, state, slot_tag or self._choose(key, state))
        key.cache_salt = req.cache_salt

    def on_admitted(self, req: Req) -> bool:
        """The request has its row of KV: count what it reuses, once per admission. Returns whether it did."""
        state = versions_of(req)
        slot = self._tree.session.borrowed_slot(req)
        if slot is not None and not hasattr(slot, _SLOT_TAG):
            setattr(slot, _SLOT_TAG, state.tag if state is not None and not state.crossed else None)
        if state is None or state.admitted:
            return False
        state.admitted = True
        reused = req.prefix_len
        self.metrics.observe_admission(reused, len(req.full_untruncated_fill_ids) - reused, state.lag)
        return True

    def publish_limit(self, req: Req, up_to: int) -> int:
        """How much of ``[0, up_to)`` may enter the tree under the request's tag."""
        state = versions_of(req)
        if state is None or state.cap is None or up_to <= state.cap:
            return up_to
        self.metrics.private_tokens += up_to - state.cap
        return state.cap

    def settle_crossing(self) -> int:
        """The ledger has moved: settle every request that holds KV. Returns how many cross the boundary."""
        # KV of half-written weights must never be published, whatever lag is accepted.
        must_cap = self._ledger.is_strict or self._ledger.is_suspended
        crossing = 0
        for req in list(self._live):
            if not req.kv.holds_kv or req.finished():
                continue
            state = versions_of(req)
            if state is None:
                continue
            crossing += 1
            state.crossed = True
            if must_cap:
                # kv_committed_len advances when a forward is launched, so all of it is of the old weights.
                committed = req.kv.kv_committed_len
                state.cap = committed if state.cap is None else min(state.cap, committed)
                slot = self._tree.session.borrowed_slot(req)
                if slot is not None:
                    setattr(slot, _SLOT_TAG, None)  # old and new KV in one row: never again
        return crossing

    def _may_use(self, tag: str | None) -> bool:
        return tag is not None and self._ledger.lag_of(tag) is not None

    def _choose(self, key: RadixKey, state: RequestVersions) -> str:
        window = self._ledger.window()
        if len(window) == 1:
            return window[0]
        if state.tag in window and self._tree.has_external_tier:
            # A read-ahead for this request runs under the tag chosen at arrival.
            return state.tag
        return max(
            window,
            key=lambda tag: (
                self._probe(key, compose_salt(tag, state.user_salt)),
                self._ledger.order_of(tag),
            ),
        )

    def _probe(self, key: RadixKey, salt: str) -> int:
        """Tokens of ``key`` resident under ``salt``. Loads, locks and counts nothing."""
        probe = RadixKey(key.token_ids, key.extra_key, key.is_bigram, key.limit, salt)
        if not self._tree.has_host_tier:
            resident = self._tree.tree_core.match_full_device_prefix(probe)[0]
            return resident if self._tree.tiers is None else self._tree.tiers.probe(probe, resident)
        result = self._tree.tree_core.match_prefix(MatchPrefixParams(key=probe))
        # A walk may split a node; its actions belong to the tree, not to the request.
        self._tree._apply_cache_actions(list(result.cache_actions))
        return result.device_prefix_len + result.host_hit_length

    def _retag(self, req: Req, state: RequestVersions, tag: str) -> None:
        state.cap, state.crossed, state.admitted = None, False, False
        state.lag = self._ledger.lag_of(tag) or 0
        if tag == state.tag:
            return
        if state.tag is not None:
            # What was read ahead for the old tag must not be handed to this request.
            self._tree.release_aborted_request(req.cache_request_handle)
            self.metrics.retagged += 1
        state.tag = tag
        req.cache_salt = compose_salt(tag, state.user_salt)

    def describe_request(self, req: Any) -> dict[str, Any] | None:
        """What a reply says of the KV behind it: the oldest version used, and how far it is behind now."""
        state = versions_of(req)
        if state is None or state.tag is None:
            return None
        tag = self._ledger.tag_for(state.tag)
        return {
            "installed_version": self._ledger.current_name,
            "oldest_version": tag.label if tag is not None else state.tag,
            "version_lag": state.lag,
            "crossed_versions": state.crossed,
        }
