"""The packed product equals torch's own, and where it can't be had torch's own is used."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from engine.models.linear import Linear


@pytest.mark.parametrize("rows", [1, 2, 17, 130])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 0.002)]
)
def test_equals_a_plain_product(rows: int, bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 40, generator=generator).to(dtype) / 8
    b = torch.randn(48, generator=generator).to(dtype) if bias else None
    x = torch.randn(rows, 40, generator=generator).to(dtype)
    expected = functional.linear(x.double(), weight.double(), None if b is None else b.double())
    with torch.inference_mode():
        ours = Linear(weight, b)(x)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), expected, atol=tolerance, rtol=tolerance)


def test_falls_back_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    linear = Linear(torch.eye(3))
    assert not linear.packed
    assert torch.equal(linear(torch.ones(1, 3)), torch.ones(1, 3))


def test_falls_back_where_onednn_refuses() -> None:
    linear = Linear(torch.eye(3, dtype=torch.float64))
    assert not linear.packed
    assert torch.equal(linear(torch.ones(1, 3, dtype=torch.float64)), torch.ones(1, 3, dtype=torch.float64))
