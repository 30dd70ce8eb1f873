"""The servers of `python -m bench engine --http`: how each is started, on which weights, and what it is asked.

May import the standard library; what makes a checkpoint or reads its words imports transformers or tokenizers there.
Weights in another form are made once in a run, from the same file: by llama-quantize, or as a checkpoint in bfloat16
for servers that read no GGUF file (or read one only to dequantise it).
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.contenders import NEW_TOKENS, PROMPT_TOKENS, quantised
from bench.machine import REPOSITORY
from bench.processes import started

KINDS = ("sluice", "llama.cpp", "vllm", "transformers")
STREAMS_MAX = 32
READY_S_MAX = 300.0
CHECKPOINT_S_MAX = 300.0
CONTEXT_TOKENS_MAX = 1024  # of one sequence
WORDS_MIN = 1000  # fewer make prompts that are alike

# What an interpreter with xllamacpp runs: llama.cpp's own server, which that library has inside.
_XLLAMACPP = """
import signal, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.n_parallel, params.n_ctx = int(sys.argv[3]), int(sys.argv[4])
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[5])
server = xllamacpp.Server(params)
signal.pause()
"""

_CHECKPOINT = """
import sys
import torch, transformers
folder, file, out = sys.argv[1:]
where = {"gguf_file": file}
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **where)
model.hf_quantizer = None  # or it won't be saved, although its weights are plain by now
del model.config.quantization_config
model.save_pretrained(out)
transformers.AutoTokenizer.from_pretrained(folder, **where).save_pretrained(out)
"""


@dataclass(frozen=True)
class Contender:
    """A server that runs, and how it is asked."""

    name: str
    pid: int
    port: int
    body: Callable[[list[int]], dict[str, Any]]
    last: bytes  # what an answer that is complete has at its end, besides the reason


def contenders(options: argparse.Namespace) -> list[str]:
    """All whose programs the command line names, by the width of their weights."""
    has_llama = bool(options.llama_cpp or options.xllamacpp)
    return [
        "sluice:bfloat16",
        *["llama.cpp:BF16"] * bool(options.llama_cpp),
        *["vllm:bfloat16"] * bool(options.vllm),
        *["transformers:bfloat16"] * bool(options.transformers),
        "sluice:int8",
        *["llama.cpp:Q8_0"] * bool(options.llama_cpp),
        "sluice:gguf",
        *["llama.cpp:as-is"] * has_llama,
    ]


@contextmanager
def serving(contender: str, model: str, options: argparse.Namespace, port: int, scratch: Path) -> Iterator[Contender]:
    """KIND:DTYPE of `model`, or KIND:PATH, from its being ready until the block ends. `scratch`: for weights that are
    made."""
    kind, _, dtype = contender.partition(":")
    own = os.sep in dtype
    if own:
        weights = dtype
    elif kind == "llama.cpp":
        weights = quantised(Path(options.llama_cpp), model, dtype, scratch)
    elif kind in ("vllm", "transformers"):
        weights = _checkpoint(model, scratch)
    else:
        weights = model
    command, env = _COMMANDS[kind](options, weights, "" if own else dtype, port)
    with started(contender, command, REPOSITORY, {**os.environ, **env}) as process:
        until = time.monotonic() + READY_S_MAX
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{contender} did not start:\n  {' '.join(command)}")
            time.sleep(0.5)
        if kind == "transformers":
            yield Contender(contender, process.pid, port, lambda ids: _worded(ids, weights), b"")
        else:
            yield Contender(contender, process.pid, port, _plain, b"[DONE]")


Started = tuple[list[str], dict[str, str]]  # a command, and what its environment has more


def _sluice(options: argparse.Namespace, weights: str, dtype: str, port: int) -> Started:
    command = [sys.executable, "-m", "server", "--model", weights, "--port", str(port)]
    return command + (["--dtype", dtype] if dtype else []), {}


def _llama_cpp(options: argparse.Namespace, weights: str, dtype: str, port: int) -> Started:
    threads, context = os.cpu_count() or 1, STREAMS_MAX * (PROMPT_TOKENS + NEW_TOKENS + 16)
    if options.xllamacpp:
        return [options.xllamacpp, "-c", _XLLAMACPP, weights, *map(str, (port, STREAMS_MAX, context, threads))], {}
    command = [str(Path(options.llama_cpp) / "llama-server"), "-m", weights, "--port", str(port)]
    return [*command, *f"-np {STREAMS_MAX} -c {context} -t {threads} -tb {threads}".split()], {}


def _vllm(options: argparse.Namespace, weights: str, dtype: str, port: int) -> Started:
    command = [options.vllm, "serve", weights, "--port", str(port), "--dtype", dtype or "bfloat16"]
    command += ["--max-model-len", str(CONTEXT_TOKENS_MAX), "--max-num-seqs", str(STREAMS_MAX)]
    env = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return [*command, "--uvicorn-log-level", "error"], env


def _transformers(options: argparse.Namespace, weights: str, dtype: str, port: int) -> Started:
    command = [options.transformers, "serve", weights, "--port", str(port), "--device", "cpu"]
    return [*command, "--dtype", dtype or "bfloat16", "--continuous-batching"], {"HF_HUB_OFFLINE": "1"}


_COMMANDS = {"sluice": _sluice, "llama.cpp": _llama_cpp, "vllm": _vllm, "transformers": _transformers}


def _plain(ids: list[int]) -> dict[str, Any]:
    return {"prompt": ids, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}


def _worded(ids: list[int], checkpoint: str) -> dict[str, Any]:
    """For a server that takes no ids and no `ignore_eos`: as many words, each of one token, and no end token."""
    draw = random.Random(str(ids))
    prompt = "".join(draw.choices(_words(checkpoint), k=len(ids)))
    fields = {"model": checkpoint, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True}
    return {**fields, "generation_config": "{}"}


@cache
def _words(checkpoint: str) -> list[str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(checkpoint) / "tokenizer.json"))
    ids = tokenizer.get_vocab()
    spaced = [
        " " + token[1:] for token in sorted(ids) if token[0] == "Ġ" and token[1:].isascii() and token[1:].isalpha()
    ]
    words = [word for word in spaced if len(tokenizer.encode(word, add_special_tokens=False).ids) == 1]
    if len(words) < WORDS_MIN:
        raise SystemExit(f"{checkpoint}: {len(words)} words of one token are too few for prompts in text")
    return words


def _checkpoint(model: str, scratch: Path) -> str:
    """The model as a folder of safetensors in bfloat16: itself, if it is a folder."""
    path, made = Path(model), scratch / "checkpoint"
    if path.is_dir():
        return model
    if not made.exists():
        command = [sys.executable, "-c", _CHECKPOINT, str(path.parent), path.name, str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECKPOINT_S_MAX)
        if done.returncode:
            raise SystemExit(f"no checkpoint could be made of {model}:\n{done.stderr[-4000:]}")
    return str(made)


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
