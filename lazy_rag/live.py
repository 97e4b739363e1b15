"""Full pages of live text that stay in the pool for whoever continues the same prompt: a chat's earlier turns, further
samples of one prompt.

The KV of a live token depends on everything before it, so a page goes under a hash of all that (`LiveKeys`): the
namespace, every segment with its place, and every live token up to the page's end.

    private (its request's alone) ─ publish ─► shared by users ─ last one leaves ─► idle ─ page needed ─► free

A published page is never written again. Idle pages give way before any chunk does, the oldest first.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from lazy_rag.layout import PromptLayout, Segment
from lazy_rag.pool import PagePool


class LiveKeys:
    """The keys of a prompt's full live pages, in order; generated tokens continue them.

    They end before text that repeats a chunk (`repair`): what a deletion must remove is never kept here.
    """

    def __init__(self, layout: PromptLayout, page_size: int) -> None:
        self.keys: list[bytes] = []
        self._page_size = page_size
        self._tokens = 0
        self._open = True
        name = layout.namespace.encode()
        self._hash = blake2b(struct.pack(">q", len(name)) + name, digest_size=32, person=b"lazy-rag live")
        for item in layout.items:
            if isinstance(item, Segment):
                # a negative number, where a token would be: no token sequence can look like a segment
                chunk = str(item.chunk_id).encode()
                numbers = (-1, len(chunk), item.start, item.length, item.offset, item.delta)
                self._hash.update(struct.pack(">6q", *numbers) + chunk)
            elif item.repaired:
                self._open = False
                break
            else:
                self.extend(item.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """The next live tokens of the prompt, or generated ones."""
        if not self._open:
            return
        at = 0
        while at < len(token_ids):
            part = token_ids[at : at + self._page_size - self._tokens % self._page_size]
            self._hash.update(struct.pack(f">{len(part)}q", *part))
            self._tokens += len(part)
            at += len(part)
            if self._tokens % self._page_size == 0:
                self.keys.append(self._hash.digest())


@dataclass(eq=False)
class LivePage:
    """A full page of live tokens, immutable. `users`: requests that read it; `listed`: whether lookups find it.

    `born`: when the oldest KV behind it was computed, its own or that of a chunk or page it has read (cache's clock).
    """

    page: int
    key: bytes
    born: float
    users: int = 1
    listed: bool = True


class LivePages:
    """Published live pages by key, over one pool. All methods run on the engine thread."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._listed: dict[bytes, LivePage] = {}
        self._unlisted: set[LivePage] = set()  # forgotten, but still read
        self._idle: OrderedDict[LivePage, None] = OrderedDict()  # the longest idle first
        self._oldest = math.inf  # no listed page was born before
        self.epoch = 0  # how often everything was forgotten

    @property
    def idle(self) -> int:
        """Pages that nobody reads: they can be had at once."""
        return len(self._idle)

    def held(self) -> list[int]:
        """The pages kept here, for `check`."""
        return [live.page for live in (*self._listed.values(), *self._unlisted)]

    def take(self, keys: Iterable[bytes]) -> list[LivePage]:
        """Use the longest leading run of pages that are there, until `release`."""
        found: list[LivePage] = []
        for key in keys:
            live = self._listed.get(key)
            if live is None:
                break
            if live.users == 0:
                del self._idle[live]
            live.users += 1
            found.append(live)
        return found

    def publish(self, key: bytes, page: int, born: float) -> LivePage | None:
        """Share a completely written page, used by its request from now on; None when another serves that key."""
        if key in self._listed:
            return None
        live = self._listed[key] = LivePage(page, key, born)
        self._oldest = min(self._oldest, born)
        return live

    def release(self, pages: Sequence[LivePage]) -> None:
        """Stop using pages. Later ones go first when room is needed: without them the earlier are still of use."""
        for live in reversed(pages):
            assert live.users > 0, "released more often than taken"
            live.users -= 1
            if live.users:
                continue
            if live.listed:
                self._idle[live] = None
            else:
                self._unlisted.remove(live)
                self._pool.free((live.page,))

    def reclaim(self, count: int) -> None:
        """Free `count` idle pages, or as many as there are."""
        for _ in range(min(count, len(self._idle))):
            live, _ = self._idle.popitem(last=False)
            del self._listed[live.key]
            self._pool.free((live.page,))

    def forget(self) -> None:
        """Nothing published so far is found again; what is still read is freed with its last user."""
        self.epoch += 1
        self.forget_until(math.inf)

    def forget_until(self, time: float) -> None:
        """Pages born at that time or before are not found again; what is still read is freed with its last user."""
        if time < self._oldest:
            return
        for live in [live for live in self._listed.values() if live.born <= time]:
            del self._listed[live.key]
            if live.users:
                live.listed = False
                self._unlisted.add(live)
            else:
                del self._idle[live]
                self._pool.free((live.page,))
        self._oldest = min((live.born for live in self._listed.values()), default=math.inf)

    def check(self) -> list[str]:
        """Invariants."""
        problems = []
        if any((live.users == 0) != (live in self._idle) for live in self._listed.values()):
            problems.append("the idle live pages are not those without users")
        if any(live.users < 1 or live.listed for live in self._unlisted):
            problems.append("a forgotten live page is kept without a user")
        return problems
