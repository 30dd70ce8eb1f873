"""What the engine's process makes of its command line."""

from __future__ import annotations

import pytest

from engine.__main__ import _limits, _parser


@pytest.mark.parametrize(
    ("told", "limits"),
    [
        ("", (64, 256)),
        ("--device cuda", (256, 2048)),
        ("--device cuda --max-running 4000", (4000, 4001)),
        ("--device cuda --max-batch-tokens 100", (99, 100)),
        ("--engine synthetic --device cuda", (16_384, 65_536)),
    ],
)
def test_a_step_is_as_large_as_its_device_bears(told: str, limits: tuple[int, int]) -> None:
    """(sequences, tokens)"""
    assert _limits(_parser().parse_args(told.split())) == limits
