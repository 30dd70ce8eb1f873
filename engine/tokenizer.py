"""Text to token ids and back, rebuilt from the `TokenizerSpec` that an engine sends.

Loaded by the server's process, so it imports `tokenizers` and msgspec but neither torch, numpy, gguf nor
transformers. It promises that `decode` is nothing but the joined bytes of the ids, and that no text which went
through `guard` can ever become a control token.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import tokenizers

from engine.wire import TokenizerSpec

# Six private-use characters of 6,400 each make 75 random bits: nobody can write a guard mark by luck, and they have
# neither case nor width nor meaning to a template.
_NONCE_CHARS = 6
_PRIVATE_USE = range(0xE000, 0xF900)


def spec_hash(spec: TokenizerSpec) -> str:
    """SHA-256 (hex) of the encoded spec: equal exactly when two engines tokenise alike."""
    return hashlib.sha256(msgspec.msgpack.encode(spec)).hexdigest()


@dataclass(frozen=True, slots=True)
class Pieces:
    """What each id adds to the text. Both lists are as long as the vocabulary."""

    raw: list[bytes]
    whole: list[str | None]  # the same as text where the bytes alone are valid UTF-8, else None
    memo: dict[int, Any] = field(default_factory=dict)  # what whoever shows whole pieces made of them, by id


class Tokenizer:
    """Encodes and decodes for one model. Every method may be called from any thread."""

    def __init__(self, spec: TokenizerSpec) -> None:
        self.spec = spec
        self.table: list[bytes] = spec.token_bytes
        self.special_ids: frozenset[int] = frozenset(spec.special_ids)
        self.vocab_size: int = len(spec.token_bytes)
        self.piece_bytes_max: int = max(map(len, self.table), default=1) or 1  # no token stands for more characters
        self._backend = tokenizers.Tokenizer.from_str(spec.json) if spec.json else None
        self._marks = _Marks({self.table[i].decode(): i for i in sorted(self.special_ids) if self.table[i]})
        self._guarded_backend: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()
        self._shown = Pieces(self.table, [_text_or_none(piece) for piece in self.table])
        self._skipped = _without(self._shown, self.special_ids)
        self._partly_shown = (self.special_ids, self._shown)  # the latest set; a model's tool markers are one

    def pieces(self, *, skip_special: bool = True, shown: frozenset[int] = frozenset()) -> Pieces:
        """The text of each id; that of special ids is empty when they are skipped, but for those in `shown`."""
        if not skip_special:
            return self._shown
        if not shown:
            return self._skipped
        if shown != self._partly_shown[0]:
            self._partly_shown = shown, _without(self._shown, self.special_ids - shown)
        return self._partly_shown[1]

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Ids of a raw prompt or a rendered template: special tokens written in it are parsed.

        `add_bos` None follows the model's own habit. Raises ValueError for a lone surrogate.
        """
        refuse_surrogates(text)
        ids = _encode(self._backend, text) if self._backend is not None else self._encode_bytes(text)
        if self.spec.bos_id >= 0 and (self.spec.add_bos if add_bos is None else add_bos):
            ids.insert(0, self.spec.bos_id)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text in which special markers are ordinary text; no BOS. Raises ValueError for a lone surrogate."""
        guarded = self.guard(text)
        return self.encode(text, add_bos=False) if guarded is text else self.encode_guarded(guarded)

    def guard(self, text: str) -> str:
        """`text` with each special marker in it masked, and broken where it ends within one, so that neither it nor
        what a template puts around it can make a control token. Returns the same object when there is nothing to
        mask. Only `encode_guarded` can read the result.
        """
        return self._marks.mask(text)

    def is_harmless(self, text: str) -> bool:
        """Whether no special marker begins in `text`, and so `guard` leaves each part of it alone. False when in
        doubt."""
        return self._marks.is_harmless(text)

    def encode_guarded(self, text: str) -> list[int]:
        """Ids of text with masked parts: those become ordinary text, exactly as if the vocabulary had no such special
        token, while bare markers are control tokens. No BOS. Raises ValueError for a lone surrogate.
        """
        refuse_surrogates(text)
        if self._backend is None:
            return self._encode_bytes(text)
        return _encode(self._guarded_backend or self.build_guard(), self._marks.swap(text))

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The whole text of `ids`. What is not UTF-8 becomes U+FFFD; ids beyond the vocabulary are no text."""
        raw = self.pieces(skip_special=skip_special).raw
        data = b"".join([raw[i] for i in ids if 0 <= i < len(raw)])
        if self.spec.strip_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one id; none for an id beyond the vocabulary, which models pad."""
        return self.table[token] if 0 <= token < self.vocab_size else b""

    def text_of(self, token: int) -> str:
        """The same as text, for people: what is not whole UTF-8 becomes U+FFFD."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def name_of(self, token: int) -> str:
        """What the vocabulary calls an id, as `transformers` has it (`Ġthe` for " the")."""
        name = self._backend.id_to_token(token) if self._backend is not None else None
        return self.text_of(token) if name is None else name

    def _encode_bytes(self, text: str) -> list[int]:
        """The vocabulary without a tokenizer.json: a byte is the id of its value, a bare marker is its special id."""
        ids: list[int] = []
        for plain, special in self._marks.split(text):
            ids += plain.encode()
            if special is not None:
                ids.append(special)
        return ids

    @property
    def guard_is_built(self) -> bool:
        """Whether `encode_guarded` takes no longer than `encode`."""
        return self._backend is None or self._guarded_backend is not None

    def build_guard(self) -> tokenizers.Tokenizer:
        """Make ready for `encode_guarded`, which takes tenths of a second: few requests hold a marker, so this second
        copy of the vocabulary is built for the first that does."""
        with self._lock:
            if self._guarded_backend is None:
                source = _rename_specials(self.spec.json, self._marks.control)
                self._guarded_backend = tokenizers.Tokenizer.from_str(source)
            return self._guarded_backend


class _Marks:
    """The literal texts of the special tokens, and their masked forms. `control` maps a text to its name in the
    guarded vocabulary, which no prompt can spell."""

    def __init__(self, special: dict[str, int]) -> None:
        nonce = "".join(chr(secrets.choice(_PRIVATE_USE)) for _ in range(_NONCE_CHARS))
        self._special = special
        self._texts = list(special)
        self._masked = {text: f"{nonce}{k};" for k, text in enumerate(special)}
        self._break = f"{nonce};"
        self.control = {text: f"{nonce}{k}!" for k, text in enumerate(special)}
        # The longest of those that start at the same place wins, as it does in the tokenizer itself.
        marker = "|".join(re.escape(text) for text in sorted(special, key=len, reverse=True)) or r"(?!)"
        self._marker = re.compile(marker)
        self._any = re.compile(f"{nonce}(?P<masked>[0-9]*);|(?P<bare>{marker})")
        self._prefixes = {text[:k] for text in special for k in range(1, len(text))}
        self._prefix_chars_max = max(map(len, self._prefixes), default=0)
        firsts = "".join(sorted({text[0] for text in special}))
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")

    def is_harmless(self, text: str) -> bool:
        return self._first.search(text) is None

    def mask(self, text: str) -> str:
        if self.is_harmless(text):  # as nearly all texts are
            return text
        masked = self._marker.sub(lambda match: self._masked[match[0]], text)
        body = masked.rstrip()  # a template may strip it
        for size in range(min(self._prefix_chars_max, len(body)), 0, -1):
            if body[-size:] in self._prefixes:
                return body + self._break + masked[len(body) :]
        return text if masked == text else masked

    def split(self, text: str) -> Iterable[tuple[str, int | None]]:
        """Pieces of plain text, unmasked, each with the bare special token after it."""
        pieces = self._any.split(text)  # plain text, then for each mark its number, its bare text and what follows
        plain = pieces[0]
        for number, bare, behind in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
            if bare is None:
                plain += self._unmasked(number) + behind
            else:
                yield plain, self._special[bare]
                plain = behind
        yield plain, None

    def swap(self, text: str) -> str:
        """Bare markers under their guarded names, masked ones as they were written."""
        return self._any.sub(lambda m: self.control[m["bare"]] if m["bare"] else self._unmasked(m["masked"]), text)

    def _unmasked(self, number: str) -> str:
        return self._texts[int(number)] if number else ""


def refuse_surrogates(text: str) -> None:
    """Raises ValueError naming the first lone surrogate, which no UTF-8 text can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise ValueError(f"the text holds a lone surrogate, U+{code:04X} at index {error.start}") from None


def _encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    # The batch call is the one that lets go of the interpreter lock, so a long prompt in a worker thread doesn't stop
    # the server's loop; "fast" leaves out the offsets.
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _text_or_none(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _without(pieces: Pieces, ids: frozenset[int]) -> Pieces:
    raw, whole = list(pieces.raw), list(pieces.whole)
    for i in ids:
        raw[i], whole[i] = b"", ""
    return Pieces(raw, whole)


def _rename_specials(source: str, names: dict[str, str]) -> str:
    """The same tokenizer.json with the special tokens under other names and ids unchanged."""
    config: dict[str, Any] = json.loads(source)
    for token in config["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = config["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): i for token, i in vocab.items()}
    else:  # Unigram: [piece, score] in the order of ids
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if "merges" in model:
        model["merges"] = [pair for pair in map(_pair, model["merges"]) if not _touches(pair, names)]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    config["post_processor"] = None  # never used here, and it names special tokens
    return json.dumps(config)


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _touches(pair: list[str], names: dict[str, str]) -> bool:
    left, right = pair
    return left in names or right in names or left + right in names
