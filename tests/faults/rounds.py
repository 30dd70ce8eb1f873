"""One round: a server, a plan played on it, and what must hold when everything is over."""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
import time
import traceback
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.faults import judge
from tests.faults.plan import SCRIPTS, WAITS, Ask, Plan, make
from tests.faults.player import Player, request
from tests.faults.stage import SECRET, Stage, pause
from tests.faults.watched import WatchedServer
from tests.support.probes import GENERATED, STATES, USED, alive, outcomes, started
from tests.support.serving import Server, until

# Far more than any round takes; only a hang meets it.
ROUND_S_MAX = 90.0
IDLE_S_MAX = 30.0
LOG_CHARS = 2000  # of the log's end, beside a failure
# What a round may leave in the allocator: its streams' logs and buffers are free, but not given back to the system.
RESIDENT_GROWTH_BYTES_MAX = 24 * 1024 * 1024
WARM_UP = Ask("chat", "warm up", max_tokens=3)


class RoundFailed(AssertionError):
    """What did not hold, with the command that plays the round again."""


@dataclass(frozen=True)
class Before:
    """The server at rest, before anything happened."""

    files: int
    resident_bytes: int


def play(seed: int) -> Counter[str]:
    """Play the round of a seed; what was done in it. Raises RoundFailed."""
    plan = make(seed)
    try:
        return _play(plan)
    except Exception as error:
        what = str(error) or traceback.format_exc()
        raise RoundFailed(
            f"{what}\n\nround {seed}: {plan.setting}\nplay it again: python -m tests.faults --seed {seed} --rounds 1"
        ) from error


def _play(plan: Plan) -> Counter[str]:
    with tempfile.TemporaryDirectory(prefix="sluice-faults-") as folder:
        watched = WatchedServer(Path(folder) / "objects")
        flags = [*plan.setting.flags(), *_keys(plan, Path(folder))]
        scripts = [SCRIPTS[name] for name in (*plan.setting.scripts, WAITS)]
        program = ("tests.faults.watched", str(Path(folder) / "objects"))
        server = Server(*flags, scripts=scripts, program=program, faults_expected=True)
        with ExitStack() as stack:
            stack.enter_context(server)
            stage = Stage(server, plan)
            stack.callback(stage.clear)
            before = _at_rest(stage, watched)
            _act(stage)
            stage.clear()
            if plan.setting.drain_s is None:
                metrics = _wait_idle(stage, watched, before)
                _check_alive(stage)
                stage.tally.update(_counted(metrics))
                engines = server.engine_pids
                server.stop()
            else:
                assert server.wait() == 0, f"exit code {server.process.returncode}"
                engines = []
            judge.check_streams(stage, server.log)
            judge.check_traces(server.log)
            until(lambda: not any(map(alive, engines)), "the engine is gone")
        return stage.tally


def _keys(plan: Plan, folder: Path) -> list[str]:
    if plan.setting.key_streams is None:
        return []
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    path = folder / "keys.toml"
    path.write_text(f'[keys.faults]\nsha256 = "{digest}"\nmax_streams = {plan.setting.key_streams}\n')
    return ["--api-keys", str(path)]


def _at_rest(stage: Stage, watched: WatchedServer) -> Before:
    """After a first stream, which loads what is loaded late."""
    _ask_once(stage)
    stage.server.metrics()
    _wait_objects(stage, watched)
    return Before(stage.server.open_files, stage.server.resident_bytes)


def _ask_once(stage: Stage) -> None:
    """A stream is answered as it should be; a busy machine may let a short deadline pass before, and is asked anew."""
    until(lambda: _answered(stage), "a stream is answered")


def _answered(stage: Stage) -> bool:
    method, target, body = request(WARM_UP, stream=True)
    asked_at = time.monotonic()
    answer = stage.server.ask(method, target, body, stage.headers)
    assert (answer.status, answer.end) == (200, "whole"), (answer.status, bytes(answer.body))
    ledger = stage.ledger(answer.header("x-stream-id") or "", WARM_UP, asked_at)
    last = answer.chunks()[-1]
    if "error" in last:
        ledger.told(last["error"]["code"])  # the judge knows whether it may
        return False
    ledger.told("length", WARM_UP.max_tokens)
    assert answer.text() == stage.oracle.expected(WARM_UP).texts[0], answer.text()
    return True


def _act(stage: Stage) -> None:
    setting = stage.plan.setting
    threads = [stage.play(str(story), Player(stage, story).play) for story in stage.plan.stories]
    if setting.kills_s:
        threads.append(stage.play("kills", _kill_engines, stage))
    if setting.drain_s is not None:
        threads.append(stage.play("drain", _drain, stage, setting.drain_s))
    end = time.monotonic() + ROUND_S_MAX
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        stage.failures.append("a player hangs")
    assert not stage.failures, f"the log:\n{stage.server.log[-LOG_CHARS:]}\n" + "\n".join(stage.failures[:3])


def _kill_engines(stage: Stage) -> None:
    began = time.monotonic()
    for at_s in stage.plan.setting.kills_s:
        pause(began + at_s - time.monotonic())
        for pid in stage.server.engine_pids[:1]:  # of two the other goes on
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                stage.engine_kills += 1
                stage.count("engine kills")


def _drain(stage: Stage, at_s: float) -> None:
    pause(at_s)
    stage.drained = True
    stage.count("drains")
    stage.server.terminate()


def _wait_idle(stage: Stage, watched: WatchedServer, before: Before) -> dict[str, float]:
    """Until every stream has its outcome and nothing is left of any: the metrics then."""
    server = stage.server
    seen: dict[str, float] = {}

    def idle() -> bool:
        seen.update(server.metrics())
        live = [seen[series] for series in STATES]
        engine = [seen[series] for series in (USED, "sluice_queue_tokens", "sluice_running_tokens")]
        connections = sum(value for series, value in seen.items() if series.startswith("sluice_connections{"))
        return not any(live) and not any(engine) and connections == 1 and started(seen) == sum(outcomes(seen).values())

    def shown() -> str:
        held = {series: value for series, value in seen.items() if value and "bucket" not in series}
        return f"idle: {held}\nthe log:\n{server.log[-LOG_CHARS:]}"

    until(idle, shown, IDLE_S_MAX)
    _wait_objects(stage, watched)
    until(lambda: server.open_files == before.files, f"as many files are open as in the beginning: {before.files}")
    grown = server.resident_bytes - before.resident_bytes
    assert grown < RESIDENT_GROWTH_BYTES_MAX, f"the server has grown by {grown} bytes"
    return seen


def _wait_objects(stage: Stage, watched: WatchedServer) -> None:
    """Until no object is left of any stream or connection."""
    left: dict[str, int] = {}

    def gone() -> bool:
        watched.ask(stage.server.process.pid)
        objects = until(watched.answer, "the server looks at its objects")
        left.clear()
        left.update({kind: count for kind, count in objects.items() if count})
        return not left

    until(gone, lambda: f"none of these objects is left: {left}", IDLE_S_MAX)


def _check_alive(stage: Stage) -> None:
    """The engine works, and the key has all its streams to give."""
    server, setting = stage.server, stage.plan.setting
    until(lambda: server.ask("GET", "/ready").status == 200, "the engine is ready")
    _ask_once(stage)
    if setting.key_streams is None or setting.streams_max <= setting.key_streams:
        return
    if setting.queue_timeout_s < 10 or setting.request_timeout_s is not None:
        return  # slots that deadlines free can't be counted
    ask = Ask("chat", WAITS, max_tokens=10)
    method, target, body = request(ask, stream=True)
    asked_at = time.monotonic()
    with ExitStack() as stack:
        names = []
        for number in range(setting.key_streams + 1):
            client = stack.enter_context(server.connect())
            client.request(method, target, body, stage.headers)
            answer = client.begin(method)
            assert answer.status == (200 if number < setting.key_streams else 429), (number, answer.status)
            names.append(answer.header("x-stream-id"))
        for name in filter(None, names):
            stage.ledger(name, ask, asked_at).cancelled = True
            assert server.ask("DELETE", f"/v1/streams/{name}", None, stage.headers).status in (200, 410)


def _counted(metrics: dict[str, float]) -> Counter[str]:
    """What the server counted."""
    counts: Counter[str] = Counter()
    for outcome, count in outcomes(metrics).items():
        counts[f"outcome {outcome}"] = int(count)
    counts["tokens"] = int(metrics[GENERATED])
    counts["preemptions"] = int(metrics["sluice_preemptions_total"])
    counts["restarts"] = int(metrics["sluice_engine_restarts_total"])
    counts["resumes"] = int(metrics['sluice_resumes_total{result="resumed"}'])
    return counts
