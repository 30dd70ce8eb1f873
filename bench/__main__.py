"""`python -m bench NAME …`: the benchmarks, each with options of its own."""

from __future__ import annotations

import importlib
import sys

from bench import signals

BENCHMARKS = {
    "engine": "ours beside transformers and llama.cpp on the same weights: decode, prefill, memory",
    "first_token": "what the server adds to the first token of an answer, while others stream",
    "gateway": "what authentication, limits and balancing cost a request",
    "kernels": "CUDA kernels and a decode step on a GPU, as fractions of what the card can do",
    "peers": "our server beside other servers: CPU time for each token, as ratios to a C writer",
    "quality": "what each type of weights costs in perplexity and greedy agreement",
    "request": "what a request costs the server beside its tokens, without sockets",
    "stalled": "what streams that nobody reads cost those that are read",
    "transports": "each way to stream on one engine: latency, bytes, requests, CPU, memory",
}


def main(argv: list[str]) -> int:
    """The exit code: 2 when there is no such benchmark; see `signals` for one that is ended early."""
    if argv[:1] in (["-h"], ["--help"]):
        print(_usage())
        return 0
    if not argv or argv[0] not in BENCHMARKS:
        print(_usage(), file=sys.stderr)
        return 2
    return signals.guarded(lambda: int(importlib.import_module(f"bench.{argv[0]}").main(argv[1:])))


def _usage() -> str:
    return "\n".join(["usage: python -m bench NAME …", *(f"  {name:10} {what}" for name, what in BENCHMARKS.items())])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
