"""What a request's text must be: the synthetic engine's words counted without any server, and the scripts' texts."""

from __future__ import annotations

from dataclasses import dataclass

from engine.sequence import Sequence, Slice
from engine.synthetic import CHAT_TEMPLATE, WORD_BASE, WORDS, SyntheticRunner
from engine.tokenizer import Tokenizer
from engine.wire import Sampling
from server.chat import ChatTemplate, encode_chat
from server.outcome import ERROR, LENGTH, STOP, worst
from tests.faults import plan
from tests.faults.plan import Ask

BLOCK_SIZE = 16
_SCRIPTED = {
    plan.FAILS: (plan.FAILS_TEXT, ERROR),
    plan.PAUSES: (plan.PAUSES_TEXT, STOP),
    plan.EMOJI: (plan.EMOJI_TEXT, LENGTH),
    plan.DIES: (plan.DIES_TEXT, STOP),
    plan.RAISES: (plan.RAISES_TEXT, ERROR),
}


@dataclass(frozen=True)
class Expected:
    """For each choice its whole text and reason. `known` False: the server drew the seed, so each text may begin with
    any word, and `texts` say only how long they are."""

    texts: tuple[str, ...]
    reasons: tuple[str, ...]
    known: bool

    @property
    def outcome(self) -> str:
        """Of the whole request."""
        return worst(list(self.reasons))

    def holds(self, choice: int, text: str, *, whole: bool) -> bool:
        """Whether `text` can be a beginning of the choice's text (`whole`: all of it)."""
        expected = self.text(choice, text)
        return text == expected if whole else expected.startswith(text)

    def text(self, choice: int, beginning: str) -> str:
        """The whole text of a choice that begins like this."""
        if self.known:
            return self.texts[choice]
        start = int(beginning[1:5]) if len(beginning) >= 5 else 0
        return _counted(start, len(self.texts[choice]) // 5)


class Oracle:
    """Of a server with a pool of so many blocks."""

    def __init__(self, kv_blocks: int) -> None:
        self._runner = SyntheticRunner()
        self._tokenizer = Tokenizer(self._runner.tokenizer)
        spec = self._runner.tokenizer
        self._template = ChatTemplate(CHAT_TEMPLATE, spec.bos_token, spec.eos_token)
        self._context = min(self._runner.context_tokens_max, kv_blocks * BLOCK_SIZE)

    def expected(self, ask: Ask) -> Expected:
        """What its choices say."""
        prompt = self._encode(ask)
        limit = min(ask.max_tokens, self._context - len(prompt))
        choices = [self._choice(ask, prompt, index, limit) for index in range(ask.n)]
        return Expected(
            texts=tuple(text for text, _ in choices),
            reasons=tuple(reason for _, reason in choices),
            known=ask.seed is not None or not ask.temperature,
        )

    def _encode(self, ask: Ask) -> list[int]:
        if ask.api == "completions":
            return self._tokenizer.encode(ask.prompt)
        return encode_chat(self._tokenizer, self._template, [{"role": "user", "content": ask.prompt}])

    def _choice(self, ask: Ask, prompt: list[int], index: int, limit: int) -> tuple[str, str]:
        for match, (text, reason) in _SCRIPTED.items():
            if match in ask.prompt:
                return _cut(match, text, reason, limit)
        sampling = Sampling(limit, temperature=ask.temperature, seed=ask.seed or 0, choice_index=index)
        sequence = Sequence(1, list(prompt), len(prompt), sampling, credit=1)
        (sampled,) = self._runner.execute([Slice(sequence, 0, len(prompt), sample=True)])
        assert sampled is not None
        text = _counted(sampled.token - WORD_BASE, limit)
        at = -1 if ask.stop is None else text.find(ask.stop)
        return (text, LENGTH) if at < 0 else (text[:at], STOP)


def _counted(start: int, count: int) -> str:
    return "".join(f" {(start + n) % WORDS:04d}" for n in range(count))


def _cut(match: str, text: str, reason: str, limit: int) -> tuple[str, str]:
    """A script's text within `limit` tokens; what is no whole character is shown as the server shows it."""
    pieces = [item for item in plan.SCRIPTS[match]["tokens"] if isinstance(item, str) or "hex" in item]
    if limit > len(pieces) or (limit == len(pieces) and reason == LENGTH):
        return text, reason
    data = b"".join(p.encode() if isinstance(p, str) else bytes.fromhex(p["hex"]) for p in pieces[:limit])
    return data.decode("utf-8", "replace"), LENGTH
