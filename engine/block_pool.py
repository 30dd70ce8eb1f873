"""The paged KV pool's bookkeeping: which block belongs to whom, and which ones still hold a known prefix.

A block is *used* (its reference count is above zero), *cached* (nobody uses it, but its content is known by its
hash, so it can be taken up again or evicted) or *free*. Cached blocks count as available: the least recently
used one is evicted when no free one is left. Nothing here knows what a block holds.

The prefix cache is the design of vLLM's automatic prefix caching: each full block is named by the hash of its
tokens chained to the hash of the block before it, so equal names mean equal whole prefixes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import blake2b


class BlockPool:
    """`blocks` blocks of `block_size` tokens each. Every method is O(1)."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._references = array("i", bytes(4 * blocks))
        self._free: list[int] = []
        self._untouched = 0  # blocks from here on were never handed out
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def available(self) -> int:
        """Blocks that `take` can hand out."""
        return len(self._free) + self.blocks - self._untouched + len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks that nobody uses and whose content is known."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Blocks with at least one reference."""
        return self.blocks - self.available

    def take(self) -> int:
        """A block with one reference and no known content. Raises IndexError when none is available."""
        if self._free:
            block = self._free.pop()
        elif self._untouched < self.blocks:
            block = self._untouched
            self._untouched += 1
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
        else:
            raise IndexError("no block is available")
        self._references[block] = 1
        return block

    def share(self, name: bytes) -> int | None:
        """One more reference to the block of this name, or None when the cache doesn't hold it."""
        block = self._block_of.get(name)
        if block is None:
            return None
        if not self._references[block]:
            del self._cached[block]
        self._references[block] += 1
        return block

    def publish(self, block: int, name: bytes) -> None:
        """The used `block` is now wholly computed, and holds the prefix of this name. The first one keeps the name."""
        if name not in self._block_of and block not in self._hash_of:
            self._block_of[name] = block
            self._hash_of[block] = name

    def release(self, block: int) -> None:
        """One reference less. A block that nobody uses becomes cached if it has a name, else free."""
        left = self._references[block] - 1
        if left < 0:
            raise ValueError(f"block {block} was released more often than it was taken")
        self._references[block] = left
        if left:
            return
        if block in self._hash_of:
            self._cached[block] = None
        else:
            self._free.append(block)


def chain(before: bytes, tokens: list[int]) -> bytes:
    """The name of a full block: a 128-bit hash of its tokens and of the name before it."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()
