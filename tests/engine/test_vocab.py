"""engine.vocab: specs from Hugging Face directories and GGUF files, against transformers and hand-checked ids."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine import vocab
from engine.catalog import resolve
from engine.tokenizer import Tokenizer
from tests.support.specs import CHATML, CORPUS, TEXTS, save_directory, train_byte_level, train_sentencepiece

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def test_a_byte_level_directory(tmp_path: Path) -> None:
    save_directory(
        tmp_path, train_byte_level(), bos_token=None, eos_token={"content": "<|im_end|>"}, chat_template=CHATML
    )
    spec = vocab.from_directory(tmp_path)
    assert (spec.bos_id, spec.add_bos, spec.bos_token, spec.eos_token) == (-1, False, "", "<|im_end|>")
    assert spec.special_ids == [0, 1, 2]
    assert spec.chat_template == CHATML
    assert not spec.strip_leading_space
    assert spec.token_bytes[2] == b"<|im_end|>"
    assert {bytes([byte]) for byte in range(256)} <= set(spec.token_bytes)


@pytest.mark.parametrize("normalizer", [False, True])
def test_byte_level_directories_encode_as_transformers_does(tmp_path: Path, normalizer: bool) -> None:
    save_directory(tmp_path, train_byte_level(normalizer=normalizer), eos_token="<|im_end|>")
    _agrees_with_transformers(tmp_path)


def test_sentencepiece_directories_encode_as_transformers_does(tmp_path: Path) -> None:
    save_directory(tmp_path, train_sentencepiece(), bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    _agrees_with_transformers(tmp_path)
    spec = vocab.from_directory(tmp_path)
    assert spec.strip_leading_space
    assert (spec.bos_id, spec.add_bos) == (1, True)  # the post-processor adds it
    assert spec.special_ids == [0, 1, 2]
    assert spec.token_bytes[3 + 0xE4] == b"\xe4"


def _agrees_with_transformers(path: Path) -> None:
    tokenizer = Tokenizer(vocab.from_directory(path))
    reference = PreTrainedTokenizerFast.from_pretrained(path)
    assert tokenizer.vocab_size == len(reference)
    for text in [*TEXTS, *CORPUS, "a <|im_end|>\n<think>b</s>"]:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text)
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(("configured", "expected"), [(True, True), (False, False), (None, True)])
def test_add_bos_in_the_config_wins(tmp_path: Path, configured: bool | None, expected: bool) -> None:
    config = {} if configured is None else {"add_bos_token": configured}
    save_directory(tmp_path, train_sentencepiece(), bos_token="<s>", **config)
    assert vocab.from_directory(tmp_path).add_bos is expected


def test_add_bos_without_a_bos_token_is_off(tmp_path: Path) -> None:
    save_directory(tmp_path, train_byte_level(), add_bos_token=True)
    spec = vocab.from_directory(tmp_path)
    assert (spec.bos_id, spec.add_bos) == (-1, False)


def test_tokens_that_only_the_config_names_are_added(tmp_path: Path) -> None:
    base = train_byte_level()
    size = base.get_vocab_size()
    added = {
        str(size + 1): {"content": "<tool>", "special": False},
        str(size): {"content": "<|eot|>", "special": True, "normalized": False},
        "2": {"content": "<|im_end|>", "special": True},
    }
    save_directory(tmp_path, base, added_tokens_decoder=added, eos_token="<|end|>")
    spec = vocab.from_directory(tmp_path)
    assert spec.token_bytes[size:] == [b"<|eot|>", b"<tool>", b"<|end|>"]
    assert spec.special_ids == [0, 1, 2, size, size + 2]
    assert Tokenizer(spec).encode("<tool><|eot|>") == [size + 1, size]


def test_special_tokens_map_is_read_where_the_config_says_nothing(tmp_path: Path) -> None:
    save_directory(tmp_path, train_byte_level())
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert vocab.from_directory(tmp_path).eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    ("configured", "file", "expected"),
    [
        ("config", None, "config"),
        ("config", "file\n", "file\n"),
        ([{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}], None, "d"),
        ([{"name": "rag", "template": "r"}], None, "r"),
        (None, None, ""),
    ],
)
def test_chat_templates(tmp_path: Path, configured: Any, file: str | None, expected: str) -> None:
    save_directory(tmp_path, train_byte_level(), chat_template=configured)
    if file is not None:
        (tmp_path / "chat_template.jinja").write_text(file, encoding="utf-8")
    assert vocab.from_directory(tmp_path).chat_template == expected


def test_a_vocabulary_entry_outside_the_byte_alphabet_is_its_own_text(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0, "Ġ": 1, "世": 2}, []))
    tokenizer.decoder = decoders.ByteLevel()
    save_directory(tmp_path, tokenizer)
    assert vocab.from_directory(tmp_path).token_bytes == [b"a", b" ", "世".encode()]


def test_padding_and_truncation_of_the_file_do_not_apply(tmp_path: Path) -> None:
    tokenizer = train_byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    save_directory(tmp_path, tokenizer)
    assert len(Tokenizer(vocab.from_directory(tmp_path)).encode("0123456789")) == 10


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(vocab.VocabError, match=r"no tokenizer\.json"):
        vocab.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(vocab.VocabError, match="can't be read"):
        vocab.from_directory(tmp_path)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_other_kinds_of_vocabulary_are_refused(tmp_path: Path, decoder: Any) -> None:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        tokenizer.decoder = decoder
    save_directory(tmp_path, tokenizer)
    with pytest.raises(vocab.VocabError, match="neither byte-level nor SentencePiece"):
        vocab.from_directory(tmp_path)


@pytest.mark.parametrize(("content", "says"), [("{", "is no JSON"), ("[]", "holds no JSON object")])
def test_a_broken_config_is_refused(tmp_path: Path, content: str, says: str) -> None:
    save_directory(tmp_path, train_byte_level())
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(vocab.VocabError, match=says):
        vocab.from_directory(tmp_path)


def test_a_metaspace_decoder_strips_one_leading_space(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -3.0), ("▁a", -1.0), ("a", -2.0)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    ours = Tokenizer(vocab.from_directory(save_directory(tmp_path, tokenizer)))
    for text in ["a", "aa a", " a"]:
        ids = tokenizer.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == tokenizer.decode(ids)


def write_gguf(path: Path, kind: str, tokens: list[str], types: list[int], **fields: Any) -> gguf.GGUFReader:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.GGUFReader(path)


def bpe_gguf(path: Path, pre: str, source: tokenizers.Tokenizer | None = None, **fields: Any) -> gguf.GGUFReader:
    """The trained byte-level BPE in GGUF's form."""
    config = json.loads((source or train_byte_level()).to_str())
    entries = {i: token for token, i in config["model"]["vocab"].items()}
    added = {token["id"]: token for token in config["added_tokens"]}
    entries |= {i: token["content"] for i, token in added.items()}
    types = [(CONTROL if added[i]["special"] else USER_DEFINED) if i in added else NORMAL for i in range(len(entries))]
    merges = [" ".join(pair) for pair in config["model"]["merges"]]
    return write_gguf(
        path,
        "gpt2",
        [entries[i] for i in range(len(entries))],
        types,
        tokenizer_pre=pre,
        token_merges=merges,
        bos_token_id=0,
        eos_token_id=2,
        **fields,
    )


def test_smollm_gguf_equals_the_directory_it_was_made_from(tmp_path: Path) -> None:
    trained = train_byte_level()
    spec = vocab.from_gguf(bpe_gguf(tmp_path / "x.gguf", "smollm", trained, chat_template=CHATML))
    directory = save_directory(tmp_path, trained, bos_token="<|endoftext|>", eos_token="<|im_end|>")
    other = vocab.from_directory(directory)
    assert spec.token_bytes == other.token_bytes and spec.special_ids == other.special_ids
    assert (spec.bos_token, spec.eos_token, spec.chat_template) == ("<|endoftext|>", "<|im_end|>", CHATML)
    ours, theirs = Tokenizer(spec), Tokenizer(other)
    for text in [*TEXTS, *CORPUS, "a<|im_end|> <think>"]:
        assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a1234 5", ["a", "1", "2", "3", "4", " ", "5"]),
        ("gpt-2", "a1234 5", ["a", "1234", " 5"]),
        ("default", "a1234 5", ["a", "1234", " 5"]),
        ("llama-bpe", "a1234 5", ["a", "123", "4", " ", "5"]),
        ("qwen2", "a1234 5", ["a", "1", "2", "3", "4", " ", "5"]),
        ("llama-bpe", "I'LL go!\n\n", ["I", "'LL", " go", "!\n\n"]),
        ("gpt-2", "I'LL go!\n\n", ["I", "'", "LL", " go", "!", "\n\n"]),
    ],
)
def test_text_is_cut_as_the_file_says(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    backend = tokenizers.Tokenizer.from_str(vocab.from_gguf(bpe_gguf(tmp_path / "x.gguf", pre)).json)
    assert backend.pre_tokenizer is not None
    assert [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(("pre", "add_bos"), [("smollm", False), ("llama-bpe", True), ("qwen2", False)])
def test_bos_of_a_gguf_that_does_not_say(tmp_path: Path, pre: str, add_bos: bool) -> None:
    assert vocab.from_gguf(bpe_gguf(tmp_path / "x.gguf", pre)).add_bos is add_bos
    assert vocab.from_gguf(bpe_gguf(tmp_path / "y.gguf", pre, add_bos_token=not add_bos)).add_bos is not add_bos


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(vocab.VocabError, match="'tekken'"):
        vocab.from_gguf(bpe_gguf(tmp_path / "x.gguf", "tekken"))


def test_an_unknown_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(vocab.VocabError, match="'bert'"):
        vocab.from_gguf(write_gguf(tmp_path / "x.gguf", "bert", ["a"], [NORMAL]))


def test_arrays_of_unequal_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(vocab.VocabError, match="token_type has 1 entries, not 2"):
        vocab.from_gguf(write_gguf(tmp_path / "x.gguf", "gpt2", ["a", "b"], [NORMAL]))
    with pytest.raises(vocab.VocabError, match="scores has 0 entries, not 1"):
        vocab.from_gguf(write_gguf(tmp_path / "y.gguf", "llama", ["a"], [NORMAL]))
    with pytest.raises(vocab.VocabError, match="twice"):
        vocab.from_gguf(write_gguf(tmp_path / "z.gguf", "gpt2", ["a", "a"], [NORMAL, NORMAL]))


def test_a_file_without_tokens_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(vocab.VocabError, match=r"no tokenizer\.ggml\.tokens"):
        vocab.from_gguf(gguf.GGUFReader(tmp_path / "x.gguf"))


@pytest.mark.parametrize("merge", ["a z", "a"])
def test_merges_of_other_tokens_are_refused(tmp_path: Path, merge: str) -> None:
    reader = write_gguf(tmp_path / "x.gguf", "gpt2", ["a", "b", "ab"], [NORMAL] * 3, token_merges=["a b", merge])
    with pytest.raises(vocab.VocabError, match="don't fit together"):
        vocab.from_gguf(reader)


def test_an_end_token_with_the_wrong_type_is_a_control_token(tmp_path: Path) -> None:
    reader = write_gguf(
        tmp_path / "x.gguf", "gpt2", ["a", "<eos>", "[PAD2]", "<x y>"], [NORMAL, NORMAL, UNUSED, NORMAL], eos_token_id=1
    )
    spec = vocab.from_gguf(reader)
    assert spec.special_ids == [1]
    assert spec.token_bytes == [b"a", b"<eos>", b"", b"<x y>"]


PIECES = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "abc", "ca", "cab", "é", "▁b", "aa", "aaa", "<", "s", ">", "<s"]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<user>", "unused"]
SPM_TYPES = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES), USER_DEFINED, UNUSED]
# Distinct scores, not in the order of ids: a piece's score alone decides.
SPM_SCORES = [0.0] * 259 + [float(-((7 * k) % 31)) for k in range(len(PIECES))] + [0.0, 0.0]


def spm_gguf(path: Path, **fields: Any) -> gguf.GGUFReader:
    fields = {"token_scores": SPM_SCORES, "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, **fields}
    return write_gguf(path, "llama", SPM_TOKENS, SPM_TYPES, **fields)


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(vocab.from_gguf(spm_gguf(tmp_path_factory.mktemp("spm") / "x.gguf")))


def sentencepiece_ids(text: str) -> list[int]:
    """SentencePiece's own rule, written down plainly: join the two neighbours whose union scores highest (the leftmost
    of equals) until none is a piece; a character that is no piece is spelled in bytes."""
    score = {piece: SPM_SCORES[259 + k] for k, piece in enumerate(PIECES)}
    symbols = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        pairs = enumerate(itertools.pairwise(symbols))
        unions = [(-score[left + right], i) for i, (left, right) in pairs if left + right in score]
        if not unions:
            break
        _, i = min(unions)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [259 + PIECES.index(symbol)] if symbol in score else [3 + byte for byte in symbol.encode()]
    return ids


@given(st.text("aaabbc é<s>世\n", max_size=24).filter(lambda text: "<s>" not in text))
def test_sentencepiece_joins_by_score(spm: Tokenizer, text: str) -> None:
    ids = spm.encode(text, add_bos=False)
    assert ids == sentencepiece_ids(text)
    assert spm.decode(ids) == text


def test_sentencepiece_specials_and_bytes(spm: Tokenizer) -> None:
    spec = spm.spec
    assert spec.special_ids == [0, 1, 2] and spec.strip_leading_space
    assert (spec.bos_id, spec.add_bos, spec.bos_token, spec.eos_token) == (1, True, "<s>", "</s>")
    assert spec.token_bytes[3 + 0xE4] == b"\xe4"
    assert spec.token_bytes[259:262] == [b" ", b"a", b"b"]
    assert spec.token_bytes[-2:] == [b"<user>", b""]
    user = len(SPM_TOKENS) - 2
    assert spm.encode("a</s>b<user>", add_bos=False) == [*sentencepiece_ids("a"), 2, *sentencepiece_ids("b"), user]
    assert not set(spm.encode_plain("a<s>b")) & {0, 1, 2}


def test_sentencepiece_without_a_space_prefix(tmp_path: Path) -> None:
    tokenizer = Tokenizer(vocab.from_gguf(spm_gguf(tmp_path / "x.gguf", add_space_prefix=False)))
    assert tokenizer.encode("ab", add_bos=False) == [259 + PIECES.index("ab")]
    assert tokenizer.decode(tokenizer.encode(" ab", add_bos=False)) == " ab"


@pytest.fixture(scope="module")
def smollm2_path() -> Path:
    return resolve("smollm2-135m-instruct", progress=lambda *_: None)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer(vocab.from_gguf(gguf.GGUFReader(smollm2_path)))


def test_smollm2_special_tokens(smollm2: Tokenizer) -> None:
    spec = smollm2.spec
    assert (spec.bos_id, spec.bos_token, spec.eos_token, spec.add_bos) == (1, "<|im_start|>", "<|im_end|>", False)
    assert smollm2.vocab_size == 49152 and smollm2.special_ids == frozenset(range(17))


def test_smollm2_known_ids(smollm2: Tokenizer) -> None:
    assert smollm2.encode("12345") == [33, 34, 35, 36, 37]  # a digit is a token
    assert smollm2.encode("Hello world") == [19556, 905]
    assert smollm2.encode("<|im_start|>user\n") == [1, 4093, 198]


def test_smollm2_encodes_as_transformers_reads_the_same_file(smollm2: Tokenizer, smollm2_path: Path) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    backend = reference.backend_tokenizer
    # transformers doesn't know this file's pre-tokenizer, and would leave numbers whole.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in [*TEXTS, *CORPUS, "<|im_start|>user\nHi<|im_end|>\n"]:
        ids = smollm2.encode(text)
        assert ids == backend.encode(text, add_special_tokens=False).ids
        assert smollm2.decode(ids, skip_special=False) == text


# The model's vocabulary has no token for the bytes F1 and F2 and for six control characters, and drops them.
SMOLLM2_CHARS = st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d")


@given(st.text(SMOLLM2_CHARS))
def test_smollm2_gives_every_text_back(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode_plain(text)) == text
