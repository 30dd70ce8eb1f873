"""Holds answers to their grammars: compiles grammars beside the steps, and says which ids may come next.

May import numpy, llguidance and the engine's types; no torch, so that the synthetic engine works the same way. What is
known of a sequence is a function of its grammar and its generated ids: whoever has those makes the same `Constraint`
again, so preemption, parking and another engine change nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Many
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from engine.grammar import GRAMMAR_CHARS_MAX, limits
from engine.tokenizer import Tokenizer
from engine.wire import TokenizerSpec

# Compiled grammars kept for the next request with the same one, the latest used last. Each takes from some kilobytes
# to some megabytes.
CACHED_MAX = 32
# Schemas are compiled one after another: the steps need the other cores more.
COMPILERS = 1
# Threads that compute the masks of a step together.
MASK_THREADS = 2

Bits = np.ndarray[tuple[int, int], np.dtype[np.bool_]]


class Constraint:
    """One sequence's place in its grammar. `ended`: nothing more may come; with a `fault`, a sentence, because the ids
    aren't the grammar's, or there is none."""

    __slots__ = ("_grammars", "ended", "fault", "matcher")

    def __init__(self, grammars: Grammars, compiled: LLMatcher, generated: Many[int]) -> None:
        """`generated`: ids that were made already."""
        self._grammars = grammars
        self.matcher = compiled.deep_copy()
        self.fault = ""
        self.ended = False
        if compiled.is_error():
            self.fault, self.ended = f"the grammar can't be compiled: {compiled.get_error()[:300]}", True
        for token in generated:
            self.follow(token)

    def follow(self, token: int) -> bool:
        """Take in the id that was chosen, and see whether the answer has `ended`."""
        if not self.ended:
            if not self.matcher.consume_token(token):
                self.fault = "the answer left its grammar"
            self.ended = bool(self.fault) or self.matcher.is_stopped()
        return self.ended

    def allowed(self, constraints: list[Constraint]) -> Bits:
        """For each of one engine's constraints: which ids may come next."""
        return self._grammars.allowed(constraints)


class Grammars:
    """Compiles for one tokenizer. Reading the vocabulary takes up to a second for each 75,000 ids, with the interpreter
    locked: it is done before the first step."""

    def __init__(self, tokenizer: TokenizerSpec, vocab_size: int, eos_ids: list[int]) -> None:
        """`vocab_size`: of the logits; ids beyond the tokenizer's are never allowed."""
        self._vocabulary = _Vocabulary(tokenizer, eos_ids)
        self._tokenizer = LLTokenizer(TokenizerWrapper(self._vocabulary), eos_token=self._vocabulary.ends)
        self._vocab_size = vocab_size
        self._compiler = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._executor = LLExecutor(MASK_THREADS)

    def compile(self, grammar: str) -> Future[LLMatcher]:
        """The compiled grammar, soon; its matcher knows if it is none."""
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = self._compiler.submit(self._compile, grammar)
            if len(self._compiled) > CACHED_MAX:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(grammar)
        return future

    def _compile(self, grammar: str) -> LLMatcher:
        if len(grammar) > GRAMMAR_CHARS_MAX:
            grammar = ""  # which is none
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits())

    def constraint(self, compiled: LLMatcher, generated: Many[int]) -> Constraint:
        """For one sequence that has `generated` these ids."""
        return Constraint(self, compiled, generated)

    def allowed(self, constraints: list[Constraint]) -> Bits:
        """Which ids may come next: [len(constraints), vocab_size]. A row without any: the grammar grew too complex."""
        words = -(-self._vocabulary.size // 32)
        masks = np.zeros((len(constraints), words), np.uint32)
        matchers = [(each.matcher, row) for row, each in enumerate(constraints)]
        self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, words * 4, len(constraints))
        for row, (matcher, _) in enumerate(matchers):
            if matcher.is_error():
                masks[row] = 0
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
        bits[:, len(self._vocabulary.tokens) :] = False
        if bits.shape[1] < self._vocab_size:
            bits = np.pad(bits, ((0, 0), (0, self._vocab_size - bits.shape[1])))
        return bits[:, : self._vocab_size]


class _Vocabulary:
    """As llguidance asks for it. A model without an end token gets one that no id of its own is."""

    bos_token_id = None

    def __init__(self, spec: TokenizerSpec, eos_ids: list[int]) -> None:
        self._tokenizer = Tokenizer(spec)
        self.tokens = list(spec.token_bytes)
        self.ends = eos_ids or [len(self.tokens)]
        self.eos_token_id = self.ends[0]
        self.special_token_ids = list(spec.special_ids)
        self.size = max(len(self.tokens), *(id_ + 1 for id_ in self.ends))
        self.tokens += [b""] * (self.size - len(self.tokens))

    def __call__(self, text: bytes) -> list[int]:
        """Ids of a text that the grammar leaves no choice about: those that the model is used to."""
        return self._tokenizer.encode_plain(text.decode("utf-8", "replace"))
