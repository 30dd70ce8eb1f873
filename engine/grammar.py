"""Grammars that an answer must follow: what may be one, for both processes.

A grammar is a text in llguidance's form of Lark, JSON schemas included (`start: %json {…}`). The server makes and
checks it before a stream begins; the engine compiles it (engine.constraints). Imports llguidance only, whose calls here
let go of the interpreter lock.
"""

from __future__ import annotations

from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits

# A schema of 128 tools, each with some kilobytes. One that is longer would take more than a tenth of a second to check.
GRAMMAR_CHARS_MAX = 256 * 1024
# Grammars that were checked lately: agents send the same one with each request. At worst 16 MiB of text.
_CHECKED_MAX = 64


def limits() -> LLParserLimits:
    """What one grammar may cost: some tens of milliseconds to compile, and in a step at most the 15 ms that the
    defaults allow (the mean is a thousandth of that). Each state of the lexer takes 1 to 2 KiB of memory. An optional
    property is four items of a row."""
    return LLParserLimits(
        max_items_in_row=10_000, max_lexer_states=16_384, max_grammar_size=100_000, verbose_errors=False
    )


def grammar_fault(grammar: str) -> str:
    """Why this can't be a grammar, as a sentence; "" when it can."""
    if len(grammar) > GRAMMAR_CHARS_MAX:
        return f"it has {len(grammar)} characters as a grammar; at most {GRAMMAR_CHARS_MAX} are allowed"
    return _checked(grammar)


@lru_cache(_CHECKED_MAX)
def _checked(grammar: str) -> str:
    return _sentence(LLMatcher.validate_grammar(grammar, limits=limits()))


def _sentence(message: str) -> str:
    """The first lines of llguidance's message, without the place in a text that no client wrote."""
    told, _, _ = message.partition("\n   1 | ")
    told = told.removeprefix("at 1(8): ").removeprefix("failed to compile JSON schema: ")
    return " ".join(told.split())[:300]
