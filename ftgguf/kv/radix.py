"""Which prefix of a prompt is already in the cells: one radix tree over all requests.

A node covers the token positions [start, end) behind its parent and holds references to the pages of those positions.
Nodes split at any token. The page around a mid-page boundary belongs to several nodes, each holding a page of its own
or the same one: *a node's page is valid, along its path, from the page's first position up to the node's end*. So the
deepest node of a path that touches a page has the copy to read. Whole pages are shared by reference; the cells of a
partial page are copied into a page of the new sequence (`Match.adoptable` says when not even that is needed).

Only what was evaluated is inserted, so a match is exact: equal tokens at equal positions behind equal prefixes. What
was evaluated with other adapters has other K and V for the same tokens: it is kept apart, in a *space* of its own with
its own root, while pages and the order of eviction are common.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np

from ftgguf.kv.pages import PagePool, pages_for
from ftgguf.kv.snapshots import SnapshotBudget
from ftgguf.nouns import I32, PAGE, Snapshot

_NO_TOKENS = np.zeros(0, dtype=np.int32)


def common_prefix(a: I32, b: I32) -> int:
    """Length of the longest common prefix of two int32 vectors (100k tokens: about 20 us)."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    different = a[:n] != b[:n]
    first = int(different.argmax())
    return first if different[first] else n


@dataclass(slots=True, eq=False)
class Node:
    """One run of tokens. `pages[i]` holds the positions of page index `start // PAGE + i`."""

    parent: Node | None
    tokens: I32
    start: int
    pages: list[int]
    last_use: int = 0
    locks: int = 0
    """Sequences that use this node or a node below it."""
    children: dict[int, Node] = field(default_factory=dict)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    """By length of the prefix they stand for: start < length <= end."""
    alive: bool = True

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest usable prefix of a prompt: `pages` cover [0, length), the last one perhaps in part."""

    length: int
    node: Node
    pages: list[int]
    adoptable: bool
    """The last page is partial, ends where its node ends, and nobody else uses it: a sequence may go on writing
    behind `length` instead of copying."""
    snapshot: Snapshot | None = None

    def whole_pages(self) -> Match:
        """The match without its partial page."""
        n = self.length // PAGE
        return Match(n * PAGE, self.node, self.pages[:n], False)


class RadixTree:
    """The tree over one page pool. `snapshots`: give a budget for recurrent models, None for all others."""

    def __init__(self, pool: PagePool, snapshots: SnapshotBudget | None = None) -> None:
        self.pool = pool
        self.snapshots = snapshots
        self.root = Node(None, _NO_TOKENS, 0, [])
        self.roots: dict[Hashable, Node] = {(): self.root}
        """Space -> root. The empty one, of the model alone, is always there."""
        self.n_nodes = 0
        self.evicted_pages = 0
        self.on_evict: Callable[[Hashable, I32, int, list[int]], None] | None = None
        """Called with (space, tokens of the path, index of the first page, pages) before whole pages are freed."""
        self.version = 0
        """Changes whenever a node may have become evictable."""
        self._clock = 0
        self._heap: list[tuple[int, int, Node]] = []
        self._pushes = 0

    # ------------------------------------------------------------------------------------------- matching

    def match(self, tokens: I32, limit: int | None = None, space: Hashable = ()) -> Match:
        """The longest prefix of `tokens` (at most `limit` of them) that is held in `space`; nothing is changed."""
        root = self.roots.get(space)
        if root is None:
            return Match(0, self.root, [], False)
        path, length = self._walk(tokens if limit is None else tokens[:limit], root)
        snapshot = None
        if self.snapshots is not None:
            path, length, snapshot = self._last_snapshot(path, length)
        pages = _pages(path, length)
        node = path[-1] if path else root
        adoptable = length % PAGE != 0 and length == node.end and self.pool.refs(pages[-1]) == 1
        return Match(length, node, pages, adoptable, snapshot)

    def held_pages(self, tokens: I32, space: Hashable = ()) -> list[int]:
        """The pages of the longest prefix of `tokens` that is held, whether or not a snapshot makes it usable."""
        root = self.roots.get(space)
        return [] if root is None else _pages(*self._walk(tokens, root))

    def _walk(self, tokens: I32, root: Node) -> tuple[list[Node], int]:
        """The nodes that cover the longest common prefix, top down, and its length."""
        path: list[Node] = []
        node, length, n = root, 0, len(tokens)
        while length < n:
            child = node.children.get(int(tokens[length]))
            if child is None:
                break
            same = common_prefix(child.tokens, tokens[length:])
            path.append(child)
            length += same
            if same < len(child.tokens):
                break
            node = child
        return path, length

    def _last_snapshot(self, path: list[Node], length: int) -> tuple[list[Node], int, Snapshot | None]:
        """The part of a match that ends at a snapshot (nothing when there is none)."""
        while path:
            usable = [at for at in path[-1].snapshots if at <= length]
            if usable:
                return path, max(usable), path[-1].snapshots[max(usable)]
            path = path[:-1]
        return [], 0, None

    # ------------------------------------------------------------------------------------------- growing

    def insert(self, tokens: I32, pages: list[int], space: Hashable = ()) -> Node:
        """Keep the tokens that were evaluated in `space`, whose cells are in `pages` (one for each page index).

        What the tree already holds stays as it is; the rest becomes one new node, which takes references to its pages.
        Returns the node that ends where `tokens` end.
        """
        root = self._root_of(space)
        path, length = self._walk(tokens, root)
        node = path[-1] if path else root
        if length < node.end:
            node = self._split(node, length)
        if length == len(tokens):
            return node
        child = Node(node, tokens[length:].copy(), length, pages[length // PAGE : pages_for(len(tokens))])
        self.pool.retain(child.pages)
        node.children[int(tokens[length])] = child
        self.n_nodes += 1
        self._clock += 1
        child.last_use = self._clock
        self._offer(child)
        return child

    def _root_of(self, space: Hashable) -> Node:
        """The root of `space`; a new one takes the place of those that hold nothing any more."""
        root = self.roots.get(space)
        if root is None:
            for other, node in list(self.roots.items()):
                if node is not self.root and not node.children and not node.locks:
                    del self.roots[other]
            root = self.roots[space] = Node(None, _NO_TOKENS, 0, [])
        return root

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` at position `at`; returns the new upper part. `node` stays the lower part, with its locks."""
        parent = node.parent
        assert parent is not None
        assert node.start < at < node.end
        first = node.start // PAGE
        upper = Node(parent, node.tokens[: at - node.start], node.start, node.pages[: pages_for(at) - first])
        upper.last_use, upper.locks = node.last_use, node.locks
        if at % PAGE:
            self.pool.retain(upper.pages[-1:])
        parent.children[int(upper.tokens[0])] = upper
        node.pages = node.pages[at // PAGE - first :]
        node.tokens = node.tokens[at - node.start :]
        node.start = at
        node.parent = upper
        upper.children[int(node.tokens[0])] = node
        if self.snapshots is not None:
            for length, snapshot in list(node.snapshots.items()):
                if length <= at:
                    self.snapshots.rehome(snapshot, upper.snapshots)
        self.n_nodes += 1
        return upper

    def add_snapshot(self, tokens: I32, snapshot: Snapshot, space: Hashable = ()) -> bool:
        """Hang `snapshot` (the state after all of `tokens`) on its node; False when the tokens are not held."""
        if self.snapshots is None:
            raise ValueError("this tree keeps no snapshots")
        path, length = self._walk(tokens, self._root_of(space))
        if length < len(tokens) or not path or snapshot.length != length:
            return False
        return self.snapshots.add(snapshot, path[-1].snapshots)

    # ------------------------------------------------------------------------------------------- locks

    def lock_prefix(self, node: Node, length: int) -> Node:
        """Lock the first `length` tokens of the path to `node`, and no more; returns what to unlock."""
        while node.parent is not None and node.start >= length:
            node = node.parent
        if length < node.end:
            node = self._split(node, length)
        self.lock(node)
        return node

    def lock(self, node: Node) -> None:
        """A sequence uses `node` and all above it: they are not evicted, and count as just used."""
        self._clock += 1
        step: Node | None = node
        while step is not None:
            step.locks += 1
            step.last_use = self._clock
            step = step.parent

    def unlock(self, node: Node) -> None:
        """The inverse of `lock`."""
        step: Node | None = node
        while step is not None:
            if step.locks <= 0:
                raise ValueError("a node was unlocked more often than it was locked")
            step.locks -= 1
            if step.locks == 0:
                self._offer(step)
            step = step.parent

    def _offer(self, node: Node) -> None:
        """Put `node` up for eviction if it is an unlocked leaf; entries that have become stale are skipped later."""
        if node.parent is None or node.children or node.locks:
            return
        self.version += 1
        self._pushes += 1
        heapq.heappush(self._heap, (node.last_use, self._pushes, node))
        if len(self._heap) > 4 * self.n_nodes + 64:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    @staticmethod
    def _is_current(entry: tuple[int, int, Node]) -> bool:
        last_use, _, node = entry
        return node.alive and not node.children and not node.locks and node.last_use == last_use

    # ------------------------------------------------------------------------------------------- shrinking

    def evict(self, n_pages: int) -> int:
        """Free up to `n_pages` pages, from the tails of the least recently used leaves; returns how many were freed."""
        freed = 0
        while freed < n_pages and self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                freed += self._trim(entry[2], n_pages - freed)
        self.evicted_pages += freed
        return freed

    def _trim(self, leaf: Node, n_pages: int) -> int:
        """Cut pages off the end of `leaf` until `n_pages` were freed or nothing is left of it."""
        if self.on_evict is not None:
            self._announce(leaf, n_pages)
        freed = 0
        while leaf.pages and freed < n_pages:
            freed += self.pool.release([leaf.pages.pop()])
        end = (leaf.start // PAGE + len(leaf.pages)) * PAGE
        if not leaf.pages or end <= leaf.start:
            self._remove(leaf)
            return freed
        if end < leaf.end:
            leaf.tokens = leaf.tokens[: end - leaf.start]
            self._drop_snapshots(leaf, end)
        self._offer(leaf)
        return freed

    def _announce(self, leaf: Node, n_pages: int) -> None:
        """Tell `on_evict` of the whole pages that `_trim` is about to free."""
        assert self.on_evict is not None
        base = leaf.start // PAGE
        keep, freed = len(leaf.pages), 0
        while keep and freed < n_pages:
            keep -= 1
            freed += self.pool.refs(leaf.pages[keep]) == 1
        whole = leaf.end // PAGE - base
        pages = leaf.pages[keep:whole]
        if not pages:
            return
        path, node = [], leaf
        while node.parent is not None:
            path.append(node.tokens)
            node = node.parent
        space = next(key for key, root in self.roots.items() if root is node)
        self.on_evict(space, np.concatenate(path[::-1]), base + keep, pages)

    def _remove(self, leaf: Node) -> int:
        """Take an unlocked leaf out of the tree; returns how many pages became free."""
        parent = leaf.parent
        assert parent is not None
        freed = self.pool.release(leaf.pages)
        self._drop_snapshots(leaf, leaf.start)
        leaf.pages = []
        leaf.alive = False
        del parent.children[int(leaf.tokens[0])]
        self.n_nodes -= 1
        self._offer(parent)
        return freed

    def _drop_snapshots(self, node: Node, end: int) -> None:
        if self.snapshots is not None:
            for snapshot in [kept for length, kept in node.snapshots.items() if length > end]:
                self.snapshots.drop(snapshot)

    def forget(self, tokens: I32, space: Hashable = ()) -> None:
        """Drop what is held of `tokens` and of nothing else: from the end up to the first branch or locked node."""
        path, _ = self._walk(tokens, self._root_of(space))
        for node in reversed(path):
            if node.children or node.locks:
                return
            self._remove(node)

    def evictable_pages(self) -> int:
        """Pages that `evict` could free in all: those held by unlocked nodes only. Walks the tree."""
        loose = [page for node in self.nodes() if not node.locks for page in node.pages]
        held = np.bincount(np.asarray(loose, dtype=np.int64), minlength=self.pool.n_pages)
        return int(np.count_nonzero((held > 0) & (held == self.pool.ref_counts())))

    def nodes(self) -> Iterator[Node]:
        """All nodes below the roots, parents first."""
        stack = [node for root in self.roots.values() for node in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _pages(path: list[Node], length: int) -> list[int]:
    """One page for each page index of [0, length): the deepest node of the path that touches it has the valid one."""
    pages: list[int] = []
    for node in path:
        first = node.start // PAGE
        del pages[first:]
        pages.extend(node.pages[: pages_for(min(length, node.end)) - first])
    return pages
