"""Small `TokenizerSpec`s and trained tokenizers that several test files share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.wire import TokenizerSpec

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 steps, isn't it?",
    "Die Würde des Menschen ist unantastbar; äöüß ÄÖÜ.",
    "Быстрая коричневая лиса прыгает через ленивую собаку.",
    "敏捷的棕色狐狸跳过懒狗。 素早い茶色の狐。",
    "👩‍👩‍👧‍👦 family, 🇩🇪 flag, 👍🏽 thumb, e\u0301 combining",
    "def f(x):\n\treturn x  +  1\n\n\n    # four spaces",
    "<think> system user assistant im_start im_end | < > begin end of text",
]

TEXTS = [
    "",
    " ",
    "Hello",
    " leading and trailing ",
    "  two\t\ttabs \n\n\n newlines\r\n",
    "12345 0.5 ½ ٣٤",
    "It's we'll I'D 'tis",
    "Grüße, 世界! Привет мир. مرحبا नमस्ते",
    "👩‍👩‍👧‍👦🇩🇪👍🏽 e\u0301 \u200d \ufeff",
    "nul \0 and \x1b control \x7f \u2028 \U0010ffff \ufdd0",
    "a" * 200 + " " * 200 + "\n" * 50,
]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def bytes_spec(special: Sequence[str] = (), *, chat_template: str = "") -> TokenizerSpec:
    """Each byte is an id; the special tokens follow from 256 on."""
    return TokenizerSpec(
        json="",
        token_bytes=[bytes([byte]) for byte in range(256)] + [text.encode() for text in special],
        special_ids=list(range(256, 256 + len(special))),
        chat_template=chat_template,
    )


def table_spec(
    table: Sequence[bytes], special_ids: Sequence[int] = (), *, strip_leading_space: bool = False
) -> TokenizerSpec:
    """Any bytes for each id; only good for decoding."""
    return TokenizerSpec(
        json="", token_bytes=list(table), special_ids=list(special_ids), strip_leading_space=strip_leading_space
    )


def train_byte_level(
    special: Sequence[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), *, normalizer: bool = False
) -> tokenizers.Tokenizer:
    """A byte-level BPE of GPT-2's kind with the digits apart, as SmolLM2 has it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def train_sentencepiece() -> tokenizers.Tokenizer:
    """A BPE over ▁-marked text with byte fallback, as Llama 2's tokenizer.json has it, which also puts <s> first."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # The trainer marks the byte tokens as special, which in a real file they are not.
    config = json.loads(tokenizer.to_str())
    config["added_tokens"] = [token for token in config["added_tokens"] if token["content"] not in byte_tokens]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(config))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def save_directory(path: Path, tokenizer: tokenizers.Tokenizer, **config: object) -> Path:
    """A checkpoint's tokenizer files; `config` goes into tokenizer_config.json."""
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
