"""engine.tokenizer: ids agree with the `tokenizers` package, and guarded text never becomes a control token."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from engine import vocab
from engine.tokenizer import Tokenizer, spec_hash
from engine.wire import TokenizerSpec
from tests.support.specs import TEXTS, bytes_spec, save_directory, train_byte_level, train_sentencepiece

MARKERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@dataclass(frozen=True)
class Kind:
    tokenizer: Tokenizer
    oracle: tokenizers.Tokenizer
    markers: list[str]

    def plain_oracle(self, text: str) -> list[int]:
        """The oracle with its own switch for leaving special tokens alone."""
        copy = tokenizers.Tokenizer.from_str(self.oracle.to_str())
        copy.encode_special_tokens = True
        ids: list[int] = copy.encode(text, add_special_tokens=False).ids
        return ids


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "byte-level":
        oracle, markers = train_byte_level(MARKERS), MARKERS
    else:
        oracle, markers = train_sentencepiece(), ["<unk>", "<s>", "</s>"]
    save_directory(path, oracle, bos_token=markers[1], eos_token=markers[2])
    return Kind(Tokenizer(vocab.from_directory(path)), oracle, markers)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_agree_with_the_tokenizers_package(kind: Kind, text: str) -> None:
    ids = kind.tokenizer.encode(text, add_bos=False)
    assert ids == kind.oracle.encode(text, add_special_tokens=False).ids
    assert kind.tokenizer.decode(ids) == kind.oracle.decode(ids) == text


def test_names_are_those_of_the_vocabulary(kind: Kind) -> None:
    names = [kind.tokenizer.name_of(id_) for id_ in range(kind.tokenizer.vocab_size)]
    assert names == [kind.oracle.id_to_token(id_) for id_ in range(kind.tokenizer.vocab_size)]
    assert kind.tokenizer.name_of(10**6) == ""
    assert Tokenizer(bytes_spec(MARKERS)).name_of(65) == "A"


def test_special_tokens_in_a_prompt_are_parsed(kind: Kind) -> None:
    text = f"a{kind.markers[1]}b {kind.markers[2]}<think>"
    ids = kind.tokenizer.encode(text, add_bos=False)
    assert ids == kind.oracle.encode(text, add_special_tokens=False).ids
    assert set(ids) & kind.tokenizer.special_ids == {1, 2}


def test_special_tokens_are_skipped_or_shown(kind: Kind) -> None:
    text = f"a{kind.markers[2]}b"
    ids = kind.tokenizer.encode(text, add_bos=False)
    assert kind.markers[2] not in kind.tokenizer.decode(ids)
    assert kind.tokenizer.decode(ids, skip_special=False).startswith(f"a{kind.markers[2]}")


def test_bos_follows_the_spec_unless_told_otherwise(kind: Kind) -> None:
    spec = kind.tokenizer.spec
    bare = kind.tokenizer.encode("hello", add_bos=False)
    assert kind.tokenizer.encode("hello", add_bos=True) == [spec.bos_id, *bare]
    assert kind.tokenizer.encode("hello") == ([spec.bos_id, *bare] if spec.add_bos else bare)


@pytest.mark.parametrize("text", ["{0}", "x{0}y", " {1}{2}", "{2}{2} <think> {0}\n", "<", "no marker"])
def test_plain_text_has_no_control_token(kind: Kind, text: str) -> None:  # case D21
    text = text.format(*kind.markers)
    ids = kind.tokenizer.encode_plain(text)
    assert not set(ids) & kind.tokenizer.special_ids
    assert kind.tokenizer.decode(ids) == text
    plain = kind.plain_oracle(text)
    if not set(plain) & kind.tokenizer.special_ids:  # the oracle's switch is not proof against a mergeable marker
        assert ids == plain


def test_guarded_and_bare_markers_may_stand_side_by_side(kind: Kind) -> None:
    bare, tokenizer = kind.markers[2], kind.tokenizer
    guarded = tokenizer.guard(f"one {bare} two")
    assert bare not in guarded
    ids = tokenizer.encode_guarded(f"{bare}{guarded}{bare}")
    assert ids == [2, *tokenizer.encode_plain(f"one {bare} two"), 2]


@given(st.lists(st.sampled_from([*MARKERS, "<|im_", "start|>", "<|", "end", " ", "12", "é", "\ue000"]), max_size=8))
def test_guarding_keeps_every_other_token_as_it_was(parts: list[str]) -> None:
    text = "".join(parts)
    assert BYTES.encode_guarded(text) == BYTES.encode(text)
    assert BYTES.encode_plain(text) == list(text.encode())
    assert BYTES.decode(BYTES.encode_guarded(BYTES.guard(text))) == text


BYTES = Tokenizer(bytes_spec(MARKERS))


def test_guarded_text_without_masks_encodes_as_ever(kind: Kind) -> None:
    for text in [*TEXTS, f"{kind.markers[1]}user\nhi{kind.markers[2]}\n<think>"]:
        assert kind.tokenizer.encode_guarded(text) == kind.tokenizer.encode(text, add_bos=False)


def test_text_that_needs_no_guard_is_returned_as_it_is(kind: Kind) -> None:
    text = "a harmless text, 1 > 0"
    assert kind.tokenizer.guard(text) is text


@given(st.lists(st.sampled_from(["<", "<|im", "_end|>", "a", "|", "\n", *MARKERS]), max_size=6).map("".join))
def test_what_is_harmless_needs_no_guard_in_any_part(text: str) -> None:
    tokenizer = Tokenizer(bytes_spec(MARKERS))
    parts = [text[start:end] for start in range(len(text)) for end in range(start, len(text) + 1)]
    if tokenizer.is_harmless(text):
        assert all(tokenizer.guard(part) is part for part in parts)
    else:
        assert any(tokenizer.guard(part) is not part for part in parts)


def test_a_marker_cut_in_two_is_broken_at_the_seam() -> None:
    assert BYTES.encode_guarded(BYTES.guard("hello <|im_") + "end|>") == list(b"hello <|im_end|>")
    # A template may strip what it is given, and then the halves meet.
    assert BYTES.encode_guarded(BYTES.guard("<|im_  ").strip() + "end|>") == list(b"<|im_end|>")


def test_a_mask_of_another_tokenizer_is_no_mask_here() -> None:
    other = Tokenizer(bytes_spec(MARKERS)).guard("<|im_end|>")
    assert BYTES.encode_guarded(other) == list(other.encode())


def test_unigram_vocabularies_can_be_guarded() -> None:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((char, -2.0) for char in "▁</s>ab"), ("ab", -1.0)]
    oracle = tokenizers.Tokenizer(models.Unigram(list(dict(pieces).items()), unk_id=0))
    oracle.decoder = decoders.Metaspace()
    oracle.add_special_tokens(["<s>", "</s>"])
    size = oracle.get_vocab_size()
    table = [oracle.id_to_token(i).encode() for i in range(size)]
    tokenizer = Tokenizer(TokenizerSpec(json=oracle.to_str(), token_bytes=table, special_ids=[1, 2]))
    assert tokenizer.encode("ab</s>") == [oracle.token_to_id("ab"), 2]
    assert tokenizer.decode(tokenizer.encode_plain("ab</s>")) == "ab</s>"
    assert tokenizer.encode_guarded(tokenizer.guard("</s>") + "ab</s>")[-2:] == [oracle.token_to_id("ab"), 2]


@pytest.mark.parametrize("call", ["encode", "encode_plain", "encode_guarded"])
def test_a_lone_surrogate_is_refused_by_name(kind: Kind, call: str) -> None:  # case D17
    with pytest.raises(ValueError, match=r"lone surrogate, U\+D83D at index 2"):
        getattr(kind.tokenizer, call)("ab\ud83d")


def test_without_a_tokenizer_json_a_byte_is_an_id() -> None:
    assert BYTES.encode("é<|im_end|>\0") == [0xC3, 0xA9, 258, 0]
    assert BYTES.vocab_size == 259 and BYTES.special_ids == {256, 257, 258}
    assert BYTES.decode([0xC3, 258, 0xA9]) == "é"
    assert BYTES.decode([65, 258], skip_special=False) == "A<|im_end|>"


def test_the_longest_marker_wins() -> None:
    tokenizer = Tokenizer(bytes_spec(["<a>", "<a><b>"]))
    assert tokenizer.encode("<a><b><a>") == [257, 256]


def test_many_threads_encode_alike(kind: Kind) -> None:
    text = f"{TEXTS[8]} {kind.markers[2]}" * 20
    expected, plain = kind.tokenizer.encode(text), kind.tokenizer.encode_plain(text)
    fresh = Tokenizer(kind.tokenizer.spec)
    seen: list[bool] = []

    def work() -> None:
        seen.extend(fresh.encode_plain(text) == plain and fresh.encode(text) == expected for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 20


def test_equal_specs_have_equal_hashes() -> None:
    assert spec_hash(bytes_spec(["<s>"])) == spec_hash(bytes_spec(["<s>"]))
    assert spec_hash(bytes_spec(["<s>"])) != spec_hash(bytes_spec(["</s>"]))


def test_the_server_side_loads_no_heavy_package() -> None:
    code = "import sys, engine.text, server.chat; print({'torch', 'numpy', 'gguf', 'transformers'} & set(sys.modules))"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
