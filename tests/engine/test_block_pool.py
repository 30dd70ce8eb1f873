"""The pool's bookkeeping: references, names, and which block is evicted."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_pool import BlockPool, chain


def test_a_new_pool_is_all_available() -> None:
    pool = BlockPool(3, 16)
    assert (pool.available, pool.cached, pool.used) == (3, 0, 0)


def test_blocks_are_handed_out_once_each_and_then_there_are_none() -> None:
    pool = BlockPool(3, 16)
    assert sorted(pool.take() for _ in range(3)) == [0, 1, 2]
    with pytest.raises(IndexError, match="no block"):
        pool.take()


def test_a_block_without_a_name_is_free_again() -> None:
    pool = BlockPool(1, 16)
    pool.release(pool.take())
    assert (pool.available, pool.cached) == (1, 0)
    assert pool.take() == 0


def test_releasing_more_often_than_taking_is_an_error() -> None:
    pool = BlockPool(1, 16)
    pool.release(pool.take())
    with pytest.raises(ValueError, match="more often"):
        pool.release(0)


def test_a_named_block_is_shared_while_used_and_while_cached() -> None:
    pool = BlockPool(2, 16)
    block = pool.take()
    pool.publish(block, b"a")
    assert pool.share(b"a") == block
    pool.release(block)
    pool.release(block)
    assert (pool.used, pool.cached, pool.available) == (0, 1, 2)
    assert pool.share(b"a") == block
    assert (pool.used, pool.cached, pool.available) == (1, 0, 1)


def test_an_unknown_name_is_not_shared() -> None:
    assert BlockPool(1, 16).share(b"a") is None


def test_the_least_recently_used_block_is_evicted_and_only_when_no_free_one_is_left() -> None:
    pool = BlockPool(3, 16)
    first, second, third = pool.take(), pool.take(), pool.take()
    pool.publish(first, b"first")
    pool.publish(second, b"second")
    for block in (second, first, third):
        pool.release(block)
    assert pool.share(b"second") == second  # used anew, so it is now the later one
    pool.release(second)
    assert pool.take() == third
    assert pool.take() == first
    assert pool.share(b"first") is None
    assert pool.share(b"second") == second


def test_the_first_block_keeps_its_name_and_a_block_its_first_name() -> None:
    pool = BlockPool(2, 16)
    first, second = pool.take(), pool.take()
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    pool.publish(first, b"b")
    assert pool.share(b"a") == first
    assert pool.share(b"b") is None
    pool.release(second)
    assert pool.cached == 0


def test_equal_names_mean_equal_whole_prefixes() -> None:
    names = {
        chain(chain(b"", [1, 2]), [3, 4]),
        chain(chain(b"", [2, 1]), [3, 4]),
        chain(chain(b"", [1, 2]), [4, 3]),
        chain(chain(b"salt", [1, 2]), [3, 4]),
        chain(b"", [3, 4]),
    }
    assert len(names) == 5
    assert chain(b"x", [1, 2]) == chain(b"x", [1, 2])


class PoolMachine(RuleBasedStateMachine):
    """Against a model that is nothing but counts and names."""

    @initialize(blocks=st.integers(1, 6))
    def begin(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, 16)
        self.references: dict[int, int] = {}
        self.names: dict[int, bytes] = {}
        self.recency: list[int] = []  # cached blocks, least recently used first

    @property
    def free(self) -> int:
        return self.pool.blocks - len(self.references) - len(self.recency)

    @rule()
    def take(self) -> None:
        if self.free + len(self.recency) == 0:
            with pytest.raises(IndexError):
                self.pool.take()
            return
        evicted = self.recency[0] if not self.free else None
        block = self.pool.take()
        assert block not in self.references
        if evicted is not None:
            assert block == evicted
            self.recency.pop(0)
            del self.names[block]
        assert block not in self.recency
        self.references[block] = 1

    @precondition(lambda self: self.references)
    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def publish(self, data: st.DataObject, name: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(self.references)))
        self.pool.publish(block, name)
        if block not in self.names and name not in self.names.values():
            self.names[block] = name

    @rule(name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def share(self, name: bytes) -> None:
        owner = next((block for block, known in self.names.items() if known == name), None)
        assert self.pool.share(name) == owner
        if owner is not None:
            if owner in self.recency:
                self.recency.remove(owner)
            self.references[owner] = self.references.get(owner, 0) + 1

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.references)))
        self.pool.release(block)
        self.references[block] -= 1
        if not self.references[block]:
            del self.references[block]
            if block in self.names:
                self.recency.append(block)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.used == len(self.references)
            assert self.pool.cached == len(self.recency)
            assert self.pool.available == self.free + len(self.recency)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
