"""What tests of models and their operators share: how many threads torch has, and a small model for attention alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.models.config import ModelConfig, Rope

ATTENTION = ModelConfig(
    architecture="llama",
    vocab_size=10,
    hidden_size=1,
    intermediate_size=1,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=8,
    rotary_dim=8,
    rms_norm_eps=1e-5,
    context_tokens_max=10**6,
    rope=Rope(),
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tied_embeddings=False,
    windows=(0, 0),
)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch computes with so many meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other over tiny products take most of the time where cores are shared."""
    with threads(1):
        yield


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """Work that is cut in parts is computed by more than one."""
    with threads(2):
        yield
