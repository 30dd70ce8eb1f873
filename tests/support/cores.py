"""A core over a small pool, and what each server was sent."""

from __future__ import annotations

from collections.abc import Sequence as Many

from engine.block_pool import BlockPool
from engine.core import Core, Peer
from engine.scheduler import Scheduler
from engine.wire import Admitted, End, Sampling, Step, Submit, ToEngine
from tests.support.clock import Clock
from tests.support.engines import EOS, ChainRunner

BLOCK = 4


class Rig:
    """A core over a small pool, and what each server was sent."""

    def __init__(
        self,
        make: type[ChainRunner] = ChainRunner,
        *,
        blocks: int = 16,
        step_tokens_max: int = 64,
        running_max: int = 8,
        context: int = 4096,
    ) -> None:
        """`make`: its runner."""
        self.pool = BlockPool(blocks, BLOCK)
        self.scheduler = Scheduler(self.pool, step_tokens_max=step_tokens_max, running_max=running_max)
        self.runner = make(blocks, BLOCK, eos_ids=(EOS,), context=context)
        self.clock = Clock()
        self.reports: list[str] = []
        self.core = Core(
            self.runner, self.pool, self.scheduler, version="test", clock=self.clock, report=self.reports.append
        )
        self.steps: list[Step] = []
        self.peer = self.core.join(self.steps.append)

    def send(self, *messages: ToEngine, peer: Peer | None = None) -> None:
        """From a server; the first one, unless `peer` is another."""
        for message in messages:
            self.core.receive(peer or self.peer, message)

    def run(self, steps: int = 100) -> None:
        """Until there is nothing to do."""
        for _ in range(steps):
            if not self.core.has_work:
                return
            self.core.step()
        raise AssertionError(f"still at work after {steps} steps")

    def tokens(self, id_: int) -> list[int]:
        """What the first server was sent of one sequence."""
        return [token for step in self.steps for i, token in zip(step.ids, step.tokens, strict=True) if i == id_]

    @property
    def ends(self) -> list[End]:
        """All that the first server was told, in their order."""
        return [end for step in self.steps for end in step.ends]

    @property
    def admitted(self) -> list[Admitted]:
        """All that the first server was told, in their order."""
        return [admitted for step in self.steps for admitted in step.admitted]

    def assert_idle(self) -> None:
        """Nothing is left, and every block is to be had."""
        assert not self.peer.sequences and not self.core.is_preparing
        assert not (self.scheduler.running or self.scheduler.waiting or self.scheduler.parked)
        assert (self.pool.used, self.pool.available) == (0, self.pool.blocks)


def submit(
    id_: int = 1,
    prompt: list[int] | None = None,
    *,
    credit: int = 1000,
    generated: Many[int] = (),
    max_tokens: int = 5,
    **sampling: object,
) -> Submit:
    """A sequence as the server asks for one."""
    numbers = Sampling(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return Submit(id_, [1, 2, 3] if prompt is None else prompt, numbers, credit, list(generated))
