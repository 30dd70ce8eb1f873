"""How a server's verdict on a request is told from outside: refused with nothing behind it run, or understood."""

from __future__ import annotations

from conformance_kit.target import REFUSALS, Target
from conformance_kit.wire import CLOSE_S, Answer

# What a head alone may earn. Where no request is known that a server takes (--body), it may answer so before it has
# seen what is wrong with a body.
_BY_HEAD = frozenset({401, 403, 404, 405, 413, 415})


def refused(target: Target, data: bytes, *, statuses: frozenset[int] | set[int], one_by_one: bool = False) -> Answer:
    """`data`, with a good request behind it, is answered once, with one of `statuses`, and the connection closes: what
    stands behind a request that can't be understood may be the rest of it."""
    with target.connect() as connection:
        connection.send(data + target.request(), one_by_one=one_by_one)
        answer = connection.answer(target.method)
        assert answer.end != "none", "the connection was closed without an answer"
        allowed = statuses if target.settings.body is not None else statuses | _BY_HEAD
        assert answer.status in allowed, f"expected {sorted(statuses)}, not {answer}"
        if answer.end == "reset" and not target.settings.ours:
            return answer  # refused and closed, if not gently: a lingering close has a case of its own
        assert answer.end == "whole", f"the answer is not whole: {answer}"
        end = connection.ends()
        assert end != "more", "the bytes behind it were answered as another request"
        assert end == "closed", "the connection was left open"
    return answer


def understood(
    target: Target, data: bytes, *, method: str | None = None, one_by_one: bool = False, like_baseline: bool = False
) -> Answer:
    """`data` is answered as a request that was understood, and the connection goes on behind it (where the server left
    it open): it ended where it should. `like_baseline`: with the status of a plain request."""
    with target.connect() as connection:
        connection.send(data, one_by_one=one_by_one)
        answer = connection.answer(method or target.method)
        assert answer.end == "whole", f"no whole answer: {answer}"
        assert answer.status not in REFUSALS, f"refused: {answer}"
        if like_baseline:
            assert answer.status == target.baseline.status, f"a plain request gets {target.baseline.status}: {answer}"
        if connection.persistent:
            connection.send(target.request())
            again = connection.answer(target.method)
            assert again.status == target.baseline.status, f"the next request on the connection got {again}"
    return answer


def not_small(target: Target, data: bytes) -> None:
    """`data` announces more than anybody sends, and holds little: it is refused, or waited for, but not answered as if
    it were whole."""
    with target.connect() as connection:
        connection.send(data)
        first = connection.receive(CLOSE_S) or b""
        assert not first.startswith((b"HTTP/1.1 2", b"HTTP/1.1 3", b"HTTP/1.0 2")), f"answered: {first[:100]!r}"
