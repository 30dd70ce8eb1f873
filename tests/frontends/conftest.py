"""One server of two processes for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.frontends import PACE, Frontends


@pytest.fixture(scope="module")
def server() -> Iterator[Frontends]:
    with Frontends(*PACE) as running:
        yield running
