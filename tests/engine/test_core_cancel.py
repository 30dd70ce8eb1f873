"""Cancel is safe in every phase, and servers that share a core have nothing to do with each other."""

from __future__ import annotations

from engine.wire import Cancel, Credit, End, Step
from tests.support.cores import Rig, submit
from tests.support.engines import expected


def test_cancel_while_queued_never_computes_anything() -> None:
    rig = Rig(running_max=1)
    rig.send(submit(1), submit(2), submit(3))
    rig.core.step()
    rig.send(Cancel([2]))
    rig.run()
    assert {entry[0] for step in rig.runner.executed for entry in step} == {1, 3}
    assert {end.id for end in rig.ends} == {1, 3}
    rig.assert_idle()


def test_cancel_before_the_first_step() -> None:
    rig = Rig()
    rig.send(submit(1), Cancel([1]))
    rig.run()
    assert (rig.runner.executed, rig.ends, rig.admitted) == ([], [], [])
    rig.assert_idle()


def test_cancel_between_chunks() -> None:
    rig = Rig(step_tokens_max=9)
    rig.send(submit(1, list(range(40))))
    rig.core.step()
    rig.send(Cancel([1]))
    rig.run()
    assert (rig.tokens(1), rig.ends) == ([], [])
    rig.assert_idle()


def test_cancel_while_running_is_out_of_the_next_step() -> None:
    rig = Rig()
    rig.send(submit(1, max_tokens=50), submit(2, max_tokens=4))
    rig.core.step()
    rig.send(Cancel([1]))
    rig.core.step()
    assert [entry[0] for entry in rig.runner.executed[-1]] == [2]
    rig.run()
    assert [end.id for end in rig.ends] == [2]
    rig.assert_idle()


def test_cancel_while_parked() -> None:
    rig = Rig()
    rig.send(submit(1, credit=2, max_tokens=50))
    rig.run()
    assert rig.scheduler.parked
    rig.send(Cancel([1]))
    rig.run()
    assert rig.tokens(1) == expected([1, 2, 3], 2)
    rig.assert_idle()


def test_cancel_and_credit_that_cross_the_end_change_nothing() -> None:
    rig = Rig()
    rig.send(submit(1, max_tokens=1))
    rig.core.step()
    rig.send(Cancel([1]), Credit([(1, 50), (99, 1)]), Cancel([99]))
    rig.run()
    assert rig.ends == [End(1, "length")]
    rig.assert_idle()


def test_a_server_that_leaves_takes_its_sequences_with_it_and_no_others() -> None:
    rig = Rig()
    others: list[Step] = []
    other = rig.core.join(others.append)
    rig.send(submit(1, max_tokens=50), submit(2, credit=0))
    rig.send(submit(1), peer=other)
    rig.core.step()
    rig.core.leave(rig.peer)
    scheduler = rig.scheduler
    left = [*scheduler.running, *scheduler.waiting, *scheduler.parked]
    assert [sequence.owner for sequence in left] == [other]
    rig.run()
    assert [token for step in others for token in step.tokens] == expected([1, 2, 3], 5)
    assert (rig.pool.used, rig.pool.available) == (0, rig.pool.blocks)


def test_each_server_is_told_of_its_own_sequences_only() -> None:
    rig = Rig()
    others: list[Step] = []
    other = rig.core.join(others.append)
    rig.send(submit(1, max_tokens=2))
    rig.send(submit(1, [9], max_tokens=2), peer=other)
    rig.run()
    assert rig.tokens(1) == expected([1, 2, 3], 2)
    assert [token for step in others for token in step.tokens] == expected([9], 2)
    assert [end for step in others for end in step.ends] == [End(1, "length")]
