"""Programs that some tests need and that no Python package brings."""

from __future__ import annotations

import os
import shutil

import pytest


def tool(name: str, package: str) -> str:
    """The path of a program. Where it is missing, CI fails with the Debian package's name; elsewhere the test is left
    out with the same sentence."""
    path = shutil.which(name)
    if path is not None:
        return path
    sentence = f"{name} is not installed; it comes with Debian's package {package}"
    if os.environ.get("CI") == "true":
        pytest.fail(sentence, pytrace=False)
    pytest.skip(sentence)
