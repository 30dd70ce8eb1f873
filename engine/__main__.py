"""`python -m engine`: one engine process, serving `python -m server` over a socket.

The server starts it with --fd, an inherited connected socket: when that closes, the engine ends, whatever it is doing.
With --listen servers attach to it by --engine-url. With both it listens for as long as its parent lives.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import math
import os
import select
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING

from engine.block_pool import BlockPool
from engine.core import Core, Runner
from engine.memory import give_back
from engine.scheduler import Scheduler
from engine.shell import Shell, bind, read_token, unbind
from engine.synthetic import ScriptError, SyntheticRunner
from engine.version import VERSION

if TYPE_CHECKING:
    from engine.model_runner import ModelRunner

# A model step of so many tokens takes about a quarter of a second on two slow cores.
CPU_STEP_TOKENS = 256
# What a step may take that prompts share with streams: ten tokens a second are more than one reads. Less would make
# prompts wait longer for what no reader sees.
BESIDE_DECODES_S = 0.1
CPU_RUNNING_MAX = 64
# Not measured, for no GPU has run it yet. 2048 tokens of an 8B model are 33 TFLOP, some 60 ms of a card that does 500
# in a second; 256 sequences of a step share its weights, and more sizes of batch cost more graphs at the start.
CUDA_STEP_TOKENS = 2048
CUDA_RUNNING_MAX = 256
SYNTHETIC_STEP_TOKENS = 65_536
SYNTHETIC_RUNNING_MAX = 16_384
SYNTHETIC_BLOCKS = 262_144
# The KV pool takes so much of the memory that is free at the start, and no more than the second figure: beyond
# it a CPU can't compute the tokens that would fill it in any useful time.
POOL_MEMORY_SHARE = 0.25
POOL_DEVICE_MEMORY_SHARE = 0.85  # of a GPU, which nobody shares; the rest is for a step's own tensors
POOL_BYTES_MAX = 4 * 1024**3
# torch's OpenMP threads spin for milliseconds when they have nothing to do, on cores that the server and other engines
# need; a step wakes them twice. So many rounds are some 50 microseconds. What the environment says goes before it.
OPENMP_SPINS = "2000"


# More would take gigabytes for the pool's own tables alone.
BLOCKS_MAX = 2**24
BLOCK_TOKENS_MAX = 4096
PR_SET_PDEATHSIG = 1  # of Linux's <sys/prctl.h>


class UsageError(Exception):
    """The command line asks for what can't be."""


class LoadError(Exception):
    """The model can't be had, read or held."""


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 when the server is gone or a signal came, 2 for bad usage, 1 for a model that can't be served."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.listen is None and options.fd is None:
        parser.error("--listen says where servers attach")
    parent = None
    if options.fd is not None:
        parent = socket.socket(fileno=options.fd)
        _end_with(parent)
        for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the server drains first
            signal.signal(number, signal.SIG_IGN)
    try:
        secret = read_token(options.token_file) if options.token_file else b""
        if options.listen and options.listen.startswith("tcp://") and not secret:
            raise UsageError("an engine that listens on TCP needs --token-file")
        runner, blocks = _load(options)
        core = _assemble(options, runner, blocks)
        if options.engine != "synthetic":
            core.prepare_grammars()
        shell = Shell(core, secret=secret)
        if options.listen:
            shell.listen(bind(options.listen))
        if parent is not None:
            shell.attach(parent, parent=True)  # its hello says that others may come, too
    except (UsageError, LoadError, ScriptError, ValueError, OSError) as error:
        print(f"engine: {error}", file=sys.stderr)
        return 1 if isinstance(error, LoadError) else 2
    give_back()
    gc.freeze()
    _run(shell, options.listen, alone=parent is None)
    return 0


def _run(shell: Shell, address: str | None, *, alone: bool) -> None:
    """Until the parent is gone or, without one, a signal came."""
    if address is None:
        shell.run()
        return
    try:
        if alone:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            print(f"sluice engine ready on {address}", flush=True)
        shell.run()
    except KeyboardInterrupt:
        pass
    finally:
        unbind(address)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine", description=__doc__, allow_abbrev=False)
    parser.add_argument("--listen", metavar="ADDRESS", help="unix:/path or tcp://host:port")
    parser.add_argument("--fd", type=int, help="an inherited connected socket (used by the server)")
    parser.add_argument(
        "--token-file", metavar="FILE", help="the secret that a server must send first; needed over TCP"
    )
    parser.add_argument("--engine", choices=("local", "synthetic"), default="local")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a known name, a directory, or a .gguf file")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16", "int8", "gguf"))
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"), help="fp8: on a GPU, in bytes")
    parser.add_argument("--synthetic-step-ms", type=float, default=0.0)
    parser.add_argument("--synthetic-script", metavar="FILE")
    parser.add_argument("--kv-blocks", type=int, help="blocks of the KV pool (default: by the free memory)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a block")
    parser.add_argument("--max-batch-tokens", type=int, help="token budget of a step")
    parser.add_argument("--max-running", type=int, help="sequences of a step")
    return parser


def _load(options: argparse.Namespace) -> tuple[Runner, int]:
    """The token source, and how many blocks its pool has."""
    for name in ("kv_blocks", "block_size", "max_batch_tokens", "max_running"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1")
    for name, most in (("kv_blocks", BLOCKS_MAX), ("block_size", BLOCK_TOKENS_MAX)):
        if (getattr(options, name) or 0) > most:
            raise UsageError(f"--{name.replace('_', '-')} must be at most {most}")
    if options.engine == "synthetic":
        runner = SyntheticRunner(step_ms=options.synthetic_step_ms, script=options.synthetic_script)
        return runner, options.kv_blocks or SYNTHETIC_BLOCKS
    return _load_model(options)


def _load_model(options: argparse.Namespace) -> tuple[ModelRunner, int]:
    os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)  # read when torch is imported
    from engine.model_runner import ModelError, ModelRunner  # torch takes seconds to import: only where it is used

    try:
        with Progress() as progress:
            model = ModelRunner.load(
                options.model,
                device=options.device,
                dtype=options.dtype,
                cache_dtype=options.kv_cache_dtype,
                progress=progress,
            )
            room = _pool_bytes(model.memory_free_bytes()) // model.block_bytes(options.block_size)
            blocks = options.kv_blocks or max(1, room)
            model.allocate(blocks, options.block_size)
            model.prepare(_limits(options)[0], progress)
        print(f"engine: {model.operators}", file=sys.stderr, flush=True)
    except ModelError as error:
        raise LoadError(str(error)) from None
    return model, blocks


def _pool_bytes(device_free_bytes: int | None) -> int:
    if device_free_bytes is not None:
        return int(device_free_bytes * POOL_DEVICE_MEMORY_SHARE)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(free * POOL_MEMORY_SHARE), POOL_BYTES_MAX)


def _limits(options: argparse.Namespace) -> tuple[int, int]:
    """Sequences and tokens of a step, at most."""
    running, budget = CPU_RUNNING_MAX, CPU_STEP_TOKENS
    if options.engine == "synthetic":
        running, budget = SYNTHETIC_RUNNING_MAX, SYNTHETIC_STEP_TOKENS
    elif options.device == "cuda":  # auto is the CPU
        running, budget = CUDA_RUNNING_MAX, CUDA_STEP_TOKENS
    running = options.max_running or running
    budget = options.max_batch_tokens or max(budget, running + 1)
    if not options.max_running:
        running = min(running, max(1, budget - 1))
    return running, budget


def _assemble(options: argparse.Namespace, runner: Runner, blocks: int) -> Core:
    running, budget = _limits(options)
    pool = BlockPool(blocks, options.block_size)
    beside_s = math.inf if options.engine == "synthetic" else BESIDE_DECODES_S
    scheduler = Scheduler(pool, step_tokens_max=budget, running_max=running, beside_s=beside_s)
    return Core(runner, pool, scheduler, version=VERSION)


def _end_with(parent: socket.socket) -> None:
    """End this process when `parent`'s other end closes: in the middle of loading or of a step, too."""

    def watch() -> None:
        poll = select.poll()
        poll.register(parent, 0)  # a hang-up is always reported
        poll.poll()
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
    with contextlib.suppress(AttributeError, OSError):  # Linux only; it ends a process that is stopped, too
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Progress:
    """A bar on a terminal for each kind of long work; silent elsewhere."""

    def __init__(self) -> None:
        self._bar: object = None
        self._label = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def __call__(self, label: str, done: int, total: int) -> None:
        """`done` of `total` (bytes or parts; 0: not known) of the work called `label`."""
        if not sys.stderr.isatty():
            return
        from tqdm import tqdm

        if label != self._label or self._bar is None:
            self._close()
            self._label = label
            scaled = total > 100_000
            self._bar = tqdm(total=total or None, desc=label, unit="B" if scaled else "", unit_scale=scaled)
        assert isinstance(self._bar, tqdm)
        self._bar.update(done - self._bar.n)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()  # type: ignore[attr-defined]
            self._bar = None


if __name__ == "__main__":
    sys.exit(main())
