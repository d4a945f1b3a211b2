"""What each version occupies in the tree, and its eviction, on either tree core.

The Python core's nodes carry their key, so it is read directly, host tier included. The Rust core shows no
nodes; there the ends of insertions are remembered per tag and walked towards the root.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import DriveHostEvictionResult

from psrl_sglang.namespace import split_salt

if TYPE_CHECKING:
    from psrl_sglang.engine.tree import VersionedTree


@dataclass(slots=True)
class TagUsage:
    """Tokens of one tag: on the device, of these evictable now, and in HiCache's host tier."""

    device_tokens: int = 0
    evictable_tokens: int = 0
    host_tokens: int = 0


class TagIndex(Protocol):
    """Scheduler thread only; identical on every rank."""

    def note(self, tag: str, node_id: Any) -> None:
        """An insertion or a look-up under ``tag`` ended on this node."""
        ...

    def clear(self) -> None:
        """The tree was reset: every node id is void."""
        ...

    def tag_of(self, node_id: Any) -> str | None:
        """The tag of a node; None where the core does not show it."""
        ...

    def usage(self) -> dict[str, TagUsage]: ...

    def evict(self, tag: str) -> tuple[int, int]:
        """Evict all of a tag that is not locked. Returns (device tokens, host tokens) freed."""
        ...


def make_tag_index(tree: VersionedTree) -> TagIndex:
    if isinstance(tree.tree_core, UnifiedTreeCore):
        return PythonTagIndex(tree, tree.tree_core)
    return LeafTagIndex(tree)


def _tag_of(node: Any) -> str | None:
    return split_salt(node.key.cache_salt)[0]


class PythonTagIndex:
    """Reads the Python core's node arena; keeps no state of its own."""

    def __init__(self, tree: VersionedTree, core: UnifiedTreeCore) -> None:
        self._tree = tree
        self._core = core

    def note(self, tag: str, node_id: Any) -> None:
        pass

    def clear(self) -> None:
        pass

    def tag_of(self, node_id: Any) -> str | None:
        node = self._core._node_arena.get(node_id)
        return None if node is None or node.key is None else _tag_of(node)

    def usage(self) -> dict[str, TagUsage]:
        usage: dict[str, TagUsage] = defaultdict(TagUsage)
        for node in self._core._node_arena.values():
            if node is self._core.root_node:
                continue
            entry = usage[_tag_of(node) or ""]
            data = node.component_data[BASE_COMPONENT_TYPE]
            if data.value is not None:
                entry.device_tokens += len(data.value)
                if data.lock_ref == 0:
                    entry.evictable_tokens += len(data.value)
            if data.host_value is not None:
                entry.host_tokens += len(data.host_value)
        return dict(usage)

    def evict(self, tag: str) -> tuple[int, int]:
        tracker = dict.fromkeys(self._tree.tree_components, 0)
        work = [node for node in self._core.evictable_device_leaves if _tag_of(node) == tag]
        while work:
            node = work.pop()
            if node not in self._core.evictable_device_leaves:
                continue
            parent = node.parent
            result = self._core.evict_device_leaf(node.id, False)
            self._tree._apply_eviction_result(result)
            self._tree._accumulate_tracker(tracker, result.tracker)
            if parent is not None and _tag_of(parent) == tag:
                work.append(parent)
        return tracker[BASE_COMPONENT_TYPE], self._evict_host(tag)

    def _evict_host(self, tag: str) -> int:
        freed = 0
        work = [node for node in self._core.evictable_host_leaves if _tag_of(node) == tag]
        while work:
            node = work.pop()
            if node not in self._core.evictable_host_leaves:
                continue
            parent = node.parent
            result = DriveHostEvictionResult()
            self._core._evict_host_leaf(
                node, result.tracker, result.device_frees, result.host_frees, result.cache_actions
            )
            freed += result.tracker[BASE_COMPONENT_TYPE]
            self._tree._apply_eviction_result(result)
            if parent is not None and parent.key is not None and _tag_of(parent) == tag:
                work.append(parent)
        return freed


class LeafTagIndex:
    """For cores without node access: the nodes of each tag, inner ones included, because an inner node is a
    leaf once its children are evicted. A node comes to be on the path of an insertion or as the end of a
    look-up that split it, and both are noted. Ids of evicted nodes are pruned whenever the registry is walked,
    and the walk is forced when it has doubled since the last one."""

    def __init__(self, tree: VersionedTree) -> None:
        self._tree = tree
        self._ends: dict[str, set[Any]] = defaultdict(set)
        self._noted = 0
        self._prune_at = 4096

    def note(self, tag: str, node_id: Any) -> None:
        core = self._tree.tree_core
        if core.is_root(node_id) or node_id in self._ends[tag]:
            return
        new = {info.node_id for info in self._path(node_id) if not core.is_root(info.node_id)} - self._ends[tag]
        self._ends[tag] |= new
        self._noted += len(new)
        if self._noted >= self._prune_at:
            self.usage()
            self._prune_at = 2 * max(2048, self._noted)

    def clear(self) -> None:
        self._ends.clear()
        self._noted = 0

    def tag_of(self, node_id: Any) -> str | None:
        return None

    def usage(self) -> dict[str, TagUsage]:
        usage: dict[str, TagUsage] = {}
        for tag in list(self._ends):
            entry, seen, alive = TagUsage(), set(), set()
            for end, path in self._paths(tag):
                alive.add(end)
                for info in path:
                    if info.node_id in seen or info.full_value_len is None:
                        continue
                    seen.add(info.node_id)
                    entry.device_tokens += info.full_value_len
                    if self._is_unlocked(info.node_id):
                        entry.evictable_tokens += info.full_value_len
            self._keep(tag, alive)
            if entry.device_tokens:
                usage[tag] = entry
        return usage

    def evict(self, tag: str) -> tuple[int, int]:
        tracker = dict.fromkeys(self._tree.tree_components, 0)
        kept: set[Any] = set()
        work = list(self._ends.get(tag, ()))
        while work:
            end = work.pop()
            path = self._path(end)
            if not path or path[-1].full_value_len is None:
                continue  # evicted, or host only
            # evict_device_leaf panics the Rust core, for good, on a locked node and on an inner one; an inner
            # one is reached again through its last child.
            evictable = not path[-1].num_children and self._is_unlocked(end)
            if not evictable or self._tree._evict_device_leaf(end, tracker) is not None:
                kept.add(end)
                continue
            kept.discard(end)
            if not self._tree.tree_core.is_root(path[-1].parent_id):
                work.append(path[-1].parent_id)
        self._keep(tag, kept)
        return tracker[BASE_COMPONENT_TYPE], 0

    def _keep(self, tag: str, ends: set[Any]) -> None:
        if ends:
            self._ends[tag] = ends
        else:
            self._ends.pop(tag, None)
        self._noted = sum(len(remaining) for remaining in self._ends.values())

    def _paths(self, tag: str) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        for end in tuple(self._ends[tag]):
            path = self._path(end)
            if path:
                yield end, path

    def _path(self, node_id: Any) -> tuple[Any, ...]:
        try:
            return self._tree.tree_core.collect_path_info([node_id])[0]
        except KeyError:
            return ()

    def _is_unlocked(self, node_id: Any) -> bool:
        # A locked node locks its ancestors, so taking a lock moves tokens only if the node itself was free.
        core = self._tree.tree_core
        taken = core.inc_lock_ref(node_id)
        core.dec_lock_ref(node_id, taken.to_dec_params())
        return (taken.delta or 0) > 0
