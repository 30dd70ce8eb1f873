"""Who computes what in the next step.

One rule for prefill, decode and resumption: a sequence is `computed` of `len(tokens)`, and each step gives it some
of the step's token budget. A sequence that lacks one token decodes; one that lacks more gets a chunk.

A sequence is waiting, running or parked. Parked: it has made as many tokens as its credit allows. It keeps its
blocks until somebody needs them, also while it waits to run again; only at credit 0 (no reader) it gives them back
at once. Parking, preempting and finishing give blocks back in the same way: full ones stay in the prefix cache, so
that going on is a cache hit and the recomputation of what was evicted.

Only full blocks are shared, and a sequence writes only behind them, so no block is ever copied on write: n choices of a
prompt compute it once, and then each for itself at most its last block.
"""

from __future__ import annotations

import math

from engine.block_pool import BlockPool
from engine.chunks import Chunks
from engine.priority import by_rank
from engine.sequence import PARKED, RUNNING, WAITING, Sequence, Slice
from engine.waiting import Waiting
from engine.wire import Gauges


class Scheduler:
    """`step_tokens_max`: token budget of a step; `running_max`: sequences in the batch. Both bound a step's time, and
    so does `beside_s` where there are decodes (see `Chunks`)."""

    def __init__(self, pool: BlockPool, *, step_tokens_max: int, running_max: int, beside_s: float = math.inf) -> None:
        if step_tokens_max <= running_max:
            raise ValueError("a step's token budget must exceed the number of running sequences, or prompts starve")
        self.pool = pool
        self.chunks = Chunks(step_tokens_max, beside_s)
        self.running_max = running_max
        self.waiting = Waiting()
        self.running: dict[Sequence, None] = {}  # in the order of admission
        self.parked: dict[Sequence, None] = {}
        self._idle: dict[Sequence, None] = {}  # have blocks and don't run, in the order in which they parked
        self.admitted: list[Sequence] = []  # for the first time, since somebody last cleared this list
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        if sequence.generated >= sequence.credit:
            sequence.state = PARKED
            self.parked[sequence] = None
        else:
            self.waiting.join(sequence)

    def credit(self, sequence: Sequence, total: int) -> None:
        """Set the total of generated tokens that `sequence` may reach, and park it or let it go on."""
        sequence.credit = total
        if sequence.generated < total:
            if sequence.state == PARKED:
                del self.parked[sequence]
                sequence.state = WAITING
                self.waiting.join(sequence)
            return
        if sequence.state != PARKED:
            self._leave(sequence)
            sequence.state = PARKED
            self.parked[sequence] = None
            if sequence.blocks:
                self._idle[sequence] = None
        if total == 0:
            self._give_back(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence in any state."""
        self._leave(sequence)
        self.waiting.ended(sequence)
        self._give_back(sequence)

    def schedule(self) -> list[Slice]:
        """The next step: decodes first, so that no prompt delays them beyond its chunk, then chunks of prompts."""
        self._admit()
        slices: list[Slice] = []
        behind: list[Sequence] = []
        order = by_rank(self.running)
        block_size = self.pool.block_size
        for sequence in order:  # whose end is preempted by those before it, and so never by one that was looked at
            if len(sequence.tokens) + sequence.flying - sequence.computed > 1:
                behind.append(sequence)
            elif sequence.flying and sequence.next_index >= min(sequence.credit, sequence.sampling.max_tokens):
                continue  # the last id that it may have is on its way
            elif sequence.computed < len(sequence.blocks) * block_size or self._grow(sequence, order):
                slices.append(Slice(sequence, sequence.computed, 1, True))
        if behind:
            slices += self.chunks.cut(self._leading(behind), len(slices))
        return slices

    def computed(self, part: Slice) -> None:
        """`part` was computed: count it, and let others share the blocks that it completed."""
        sequence = part.sequence
        sequence.computed = part.start + part.count
        if sequence.computed >= (sequence.published + 1) * self.pool.block_size:
            self._publish(sequence)

    def launched(self, part: Slice) -> None:
        """`part` will be computed before whatever is launched from now on: as good as computed, but the id that it
        draws is not known yet."""
        self.computed(part)
        part.sequence.flying += part.sample

    def landed(self, part: Slice) -> None:
        """What `part` draws is known now, and so will be the names of blocks with ids that came before."""
        part.sequence.flying -= part.sample
        self._publish(part.sequence)

    def _publish(self, sequence: Sequence) -> None:
        """Let others share the blocks that are full, as far as their ids are known."""
        full = min(sequence.computed, len(sequence.tokens)) // self.pool.block_size
        if full > sequence.published:
            sequence.name_blocks(full, self.pool.block_size)
            for i in range(sequence.published, full):
                self.pool.publish(sequence.blocks[i], sequence.hashes[i])
            sequence.published = full

    def gauges(self, steps: int, discarded: int = 0) -> Gauges:
        """The state as numbers."""
        pool = self.pool
        return Gauges(
            waiting=len(self.waiting),
            running=len(self.running),
            parked=len(self.parked),
            waiting_tokens=sum(len(s.tokens) - s.computed for s in self.waiting),
            running_tokens=self._blocks_at_work * pool.block_size,
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            blocks_free=pool.available - pool.cached,
            preemptions=self.preemptions,
            steps=steps,
            discarded=discarded,
        )

    @property
    def _blocks_at_work(self) -> int:
        """Of sequences that run, or wait to go on: what parked ones hold is there for whoever needs it."""
        if not self._idle:
            return self.pool.used
        at_work = [*self.running, *(s for s in self._idle if s.state == WAITING)]
        return min(self.pool.used, sum(len(s.blocks) for s in at_work))  # they may share some

    def _admit(self) -> None:
        """Move sequences into the batch, in their turn, while there is a place and all their present tokens fit."""
        while self.waiting and len(self.running) < self.running_max:
            sequence = self.waiting.first
            if sequence.flying or not self._hold_blocks(sequence):
                return
            self.waiting.admit(sequence)
            self._idle.pop(sequence, None)
            sequence.state = RUNNING
            self.running[sequence] = None

    def _hold_blocks(self, sequence: Sequence) -> bool:
        """Take every block that the present tokens need, cached ones first. False, and nothing taken, if too few."""
        pool, blocks = self.pool, sequence.blocks
        needed = -(-len(sequence.tokens) // pool.block_size)
        self._take_up(sequence)
        if needed - len(blocks) > pool.available and not self._reclaim_idle(needed - len(blocks), sequence):
            self._give_back(sequence)
            return False
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_len)
            self.admitted.append(sequence)
        while len(blocks) < needed:
            blocks.append(pool.take())
        return True

    def _take_up(self, sequence: Sequence) -> None:
        """Go on behind the blocks that the cache knows by now, with them in place of own ones."""
        pool, size, blocks = self.pool, self.pool.block_size, sequence.blocks
        last = sequence.reusable // size
        sequence.name_blocks(last, size)
        for at in range(sequence.published, last):
            block = pool.share(sequence.hashes[at])
            if block is None:
                return
            if at < len(blocks):
                pool.release(blocks[at])
                blocks[at] = block
            else:
                blocks.append(block)
            sequence.published = at + 1
            sequence.computed = sequence.published * size

    def _leading(self, behind: list[Sequence]) -> list[Sequence]:
        """Those of `behind` that compute now. Of several that come to the same full block, the choices of one prompt
        say, the one that is furthest in it computes it for all, and the others wait for this step. Nobody waits for one
        that got no further by its last slice (the runner said "not yet"): it leads only itself."""
        leaders: dict[object, Sequence] = {}
        for sequence in behind:
            self._take_up(sequence)
            at = sequence.published
            alone = at >= sequence.reusable // self.pool.block_size or sequence.tried == sequence.computed
            key = sequence if alone else sequence.hashes[at]
            if sequence.computed > leaders.setdefault(key, sequence).computed:
                leaders[key] = sequence
        return list(leaders.values())

    def _grow(self, sequence: Sequence, order: list[Sequence]) -> bool:
        """A block more, for a decode's token. Preempts the last in `order` if need be; False if that was this one."""
        pool = self.pool
        while not pool.available and not self._reclaim_idle(1, sequence):
            victim = order.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks.append(pool.take())
        return True

    def _reclaim_idle(self, wanted: int, keep: Sequence) -> bool:
        """Take blocks back from those that hold some and don't run, the latest parked first, but those that wait for
        the batch again last. True once `wanted` are available."""
        victims = list(reversed(self._idle))
        victims.sort(key=lambda sequence: sequence.state == WAITING)
        for victim in victims:
            if victim is not keep:
                self._give_back(victim)
                self.preemptions += 1
                if self.pool.available >= wanted:
                    return True
        return False

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._give_back(sequence)
        sequence.state = WAITING
        sequence.losses += 1
        self.waiting.join_first(sequence)
        self.preemptions += 1

    def _leave(self, sequence: Sequence) -> None:
        if sequence.state == RUNNING:
            del self.running[sequence]
        elif sequence.state == PARKED:
            del self.parked[sequence]
        else:
            self.waiting.leave(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """Release all blocks, the last first: a prefix's tail is evicted before its head."""
        for block in reversed(sequence.blocks):
            self.pool.release(block)
        sequence.blocks.clear()
        self._idle.pop(sequence, None)
        sequence.computed = sequence.published = 0
        sequence.tried = -1
