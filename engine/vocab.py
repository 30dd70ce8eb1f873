"""A model's vocabulary, read from its files into the `TokenizerSpec` that the server rebuilds it from.

Runs in the engine's process; may import tokenizers and gguf. Two kinds of vocabulary are known: byte-level BPE
(GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece with byte fallback (Llama 1 and 2, Mistral). Anything else is
refused with VocabError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from engine.wire import TokenizerSpec

_SPACE_MARK = "▁"  # SentencePiece writes a space so
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# llama.cpp's token types (llama.h, enum llama_token_type).
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6


class VocabError(Exception):
    """The files hold no vocabulary, or one of a kind that is not known here."""


def from_directory(path: Path) -> TokenizerSpec:
    """Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja of a Hugging Face
    checkpoint. Raises VocabError."""
    source = path / "tokenizer.json"
    if not source.is_file():
        raise VocabError(f"{path} has no tokenizer.json; convert the checkpoint's tokenizer to that form first")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(source))
    except Exception as error:  # the package raises bare Exception
        raise VocabError(f"{source} can't be read: {error}") from None
    config = {**_read_json(path / "special_tokens_map.json"), **_read_json(path / "tokenizer_config.json")}
    bos, eos = _token_text(config.get("bos_token")), _token_text(config.get("eos_token"))
    _add_configured(tokenizer, config)
    add_bos = config.get("add_bos_token")
    if add_bos is None:  # then the post-processor decides
        first = tokenizer.encode("", add_special_tokens=True).ids[:1]
        add_bos = bool(bos) and first == [tokenizer.token_to_id(bos)]
    return _spec(
        tokenizer,
        bos_token=bos,
        eos_token=eos,
        add_bos=bool(add_bos),
        chat_template=_directory_template(path, config),
    )


def from_gguf(reader: gguf.GGUFReader) -> TokenizerSpec:
    """Builds the tokenizer that the `tokenizer.*` metadata of a GGUF file describe. Raises VocabError."""
    vocabulary = _GgufVocabulary(reader)
    kind = vocabulary.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, add_bos = vocabulary.byte_level()
    elif kind == "llama":
        tokenizer, add_bos = vocabulary.sentencepiece()
    else:
        raise VocabError(f"tokenizer.ggml.model is {kind!r}; known are 'gpt2' (byte-level BPE) and 'llama'")
    vocabulary.add_tokens(tokenizer)
    return _spec(
        tokenizer,
        bos_token=vocabulary.token("bos"),
        eos_token=vocabulary.token("eos"),
        add_bos=bool(vocabulary.get("tokenizer.ggml.add_bos_token", add_bos)),
        chat_template=str(vocabulary.get("tokenizer.chat_template", "")),
        no_text=vocabulary.of_type(_UNUSED),
    )


def _spec(
    tokenizer: tokenizers.Tokenizer,
    *,
    bos_token: str,
    eos_token: str,
    add_bos: bool,
    chat_template: str,
    no_text: Sequence[int] = (),
) -> TokenizerSpec:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = json.loads(tokenizer.to_str())
    bos_id = tokenizer.token_to_id(bos_token) if bos_token else None
    return TokenizerSpec(
        json=tokenizer.to_str(),
        token_bytes=_token_bytes(tokenizer, config, frozenset(no_text)),
        special_ids=sorted(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special),
        bos_id=-1 if bos_id is None else bos_id,
        add_bos=add_bos and bos_id is not None,
        strip_leading_space=_strips_leading_space(config),
        chat_template=chat_template,
        bos_token=bos_token,
        eos_token=eos_token,
    )


def _token_bytes(tokenizer: tokenizers.Tokenizer, config: dict[str, Any], no_text: frozenset[int]) -> list[bytes]:
    """The bytes of each id, b"" where the numbering has a hole."""
    steps = {step["type"] for step in _decoder_steps(config)}
    if "ByteLevel" in steps:
        to_bytes = _byte_level_bytes
    elif steps & {"ByteFallback", "Metaspace", "Replace"}:
        to_bytes = _sentencepiece_bytes
    else:
        raise VocabError(f"the tokenizer's decoder is neither byte-level nor SentencePiece: {sorted(steps) or None}")
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, i in vocab.items():
        table[i] = b"" if i in no_text else to_bytes(token)
    for i, added in tokenizer.get_added_tokens_decoder().items():
        literal = added.special or to_bytes is _byte_level_bytes
        table[i] = added.content.encode() if literal else to_bytes(added.content)
    return table


def _decoder_steps(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    decoder = config.get("decoder")
    if decoder is not None:
        yield from decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _strips_leading_space(config: dict[str, Any]) -> bool:
    for step in _decoder_steps(config):
        if step["type"] == "Strip" and step["content"] == " " and step["start"] > 0:
            return True
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
    return False


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, and the 68 others, in order, for U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + k): b for k, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_CHAR_OF = {byte: char for char, byte in _BYTE_OF.items()}


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:  # not spelled in the alphabet: its own text
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE_MARK, " ").encode()


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise VocabError(f"{path} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise VocabError(f"{path} holds no JSON object")
    return value


def _token_text(value: Any) -> str:
    """A special token as a config names it: a string, an object with `content`, or null."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _add_configured(tokenizer: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Adds what only tokenizer_config.json names: its added_tokens_decoder, in the order of ids, then bos and eos."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    added: dict[str, Any] = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(added.items(), key=lambda item: int(item[0])):
        if entry["content"] not in known:
            flags = {key: entry[key] for key in ("lstrip", "rstrip", "single_word", "normalized") if key in entry}
            special = bool(entry.get("special", False))
            token = AddedToken(entry["content"], special=special, **flags)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
            known.add(entry["content"])
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        text = _token_text(config.get(name))
        if text and text not in known:
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
            known.add(text)


def _directory_template(path: Path, config: dict[str, Any]) -> str:
    """chat_template.jinja before the config's chat_template; of named templates the default, else the first."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default", next(iter(named.values()), ""))
    return template if isinstance(template, str) else ""


# How text is cut before the merges apply, by `tokenizer.ggml.pre` (llama-vocab.cpp has the same table).
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_SPLIT = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    match pre:
        case "gpt-2" | "default":
            return words
        case "smollm":
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
        case "llama-bpe":
            return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated"), spelled])
        case "qwen2":
            return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated"), spelled])
    raise VocabError(f"tokenizer.ggml.pre is {pre!r}; known are gpt-2, default, smollm, llama-bpe and qwen2")


def _bpe(vocab: dict[str, int], merges: Any, **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab, merges, **options))
    except Exception as error:  # the package raises bare Exception, and TypeError for a merge that is no pair
        raise VocabError(f"the tokens and merges don't fit together: {error}") from None


class _GgufVocabulary:
    """The `tokenizer.ggml.*` arrays of one file."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._reader = reader
        self._tokens: list[str] = self.get("tokenizer.ggml.tokens", [])
        if not self._tokens:
            raise VocabError("the file's metadata has no tokenizer.ggml.tokens")
        self._types: list[int] = self.get("tokenizer.ggml.token_type", [1] * len(self._tokens))
        if len(self._types) != len(self._tokens):
            raise VocabError(f"tokenizer.ggml.token_type has {len(self._types)} entries, not {len(self._tokens)}")

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def token(self, name: str) -> str:
        """The token that `tokenizer.ggml.{name}_token_id` points at; "" if none."""
        i = self.get(f"tokenizer.ggml.{name}_token_id", -1)
        return self._tokens[i] if 0 <= i < len(self._tokens) else ""

    def of_type(self, kind: int) -> list[int]:
        return [i for i, type_ in enumerate(self._types) if type_ == kind]

    def byte_level(self) -> tuple[tokenizers.Tokenizer, bool]:
        """The tokenizer, and whether a file that doesn't say so wants BOS."""
        pre = self.get("tokenizer.ggml.pre", "default")
        merges = [tuple(merge.split(" ", 1)) for merge in self.get("tokenizer.ggml.merges", [])]
        tokenizer = _bpe(self._spellings(), merges, ignore_merges=pre == "llama-bpe")
        tokenizer.pre_tokenizer = _pre_tokenizer(pre)
        tokenizer.decoder = decoders.ByteLevel()
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        return tokenizer, pre == "llama-bpe"

    def sentencepiece(self) -> tuple[tokenizers.Tokenizer, bool]:
        """The same for SentencePiece: its scores order the merges, and a space is put before text."""
        vocab = {token: i for i, token in enumerate(self._tokens)}
        unknown = self.token("unknown") or next((self._tokens[i] for i in self.of_type(_UNKNOWN)), None)
        tokenizer = _bpe(vocab, self._merges_by_score(), unk_token=unknown, fuse_unk=True, byte_fallback=True)
        spaces = normalizers.Replace(" ", _SPACE_MARK)
        steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self.get("tokenizer.ggml.add_space_prefix", True):
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), spaces])
            steps.append(decoders.Strip(" ", 1, 0))
        else:
            tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(steps)
        return tokenizer, True

    def add_tokens(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Marks control tokens as special and user-defined ones as whole. End and begin tokens are control tokens
        whatever their type says: some converters forget it."""
        ends = {self.get(f"tokenizer.ggml.{name}_token_id", -1) for name in ("bos", "eos", "eot")}
        special = {i for i, type_ in enumerate(self._types) if type_ in (_CONTROL, _UNKNOWN)} | ends
        for i, token in enumerate(self._tokens):
            if i in special:
                tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
            elif self._types[i] == _USER_DEFINED:
                tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
        if tokenizer.get_vocab_size() != len(self._tokens):
            raise VocabError("tokenizer.ggml.tokens holds a token twice")

    def _spellings(self) -> dict[str, int]:
        """Vocabulary in the byte alphabet. Control and user-defined tokens keep their literal text, by which they are
        added; others that use further characters are plain UTF-8 and get spelled."""
        literal = (_CONTROL, _USER_DEFINED, _UNKNOWN)
        return {
            token
            if self._types[i] in literal or all(char in _BYTE_OF for char in token)
            else "".join(_CHAR_OF[byte] for byte in token.encode()): i
            for i, token in enumerate(self._tokens)
        }

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """SentencePiece joins the two neighbours whose union scores highest, so each way to cut a piece in two known
        pieces is a merge, and the best score comes first. Only normal pieces take part."""
        scores: list[float] = self.get("tokenizer.ggml.scores", [])
        if len(scores) != len(self._tokens):
            raise VocabError(f"tokenizer.ggml.scores has {len(scores)} entries, not {len(self._tokens)}")
        whole = (_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE)
        score_of = {t: scores[i] for i, t in enumerate(self._tokens) if self._types[i] not in whole}
        ranked = sorted(score_of, key=lambda token: -score_of[token])
        return [
            (token[:cut], token[cut:])
            for token in ranked
            for cut in range(1, len(token))
            if token[:cut] in score_of and token[cut:] in score_of
        ]
