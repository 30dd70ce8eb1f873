"""What the benchmarks' command lines have in common: types for argparse that refuse before a run what would fail in it.

Each takes the text of an argument and raises ArgumentTypeError, which argparse shows behind the flag's name.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

TOKENS_MAX = 100_000  # of an answer; the synthetic engine's context has room for them
STREAMS_MAX = 100_000
ROUNDS_MAX = 10_000
# What a process has open beside its streams: its listeners, logs, libraries, the loop's own.
OTHER_FILES = 64


def whole(least: int, most: int) -> Callable[[str], int]:
    """A whole number of this range."""

    def take(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least:,} to {most:,}")
        return number

    return take


def real(least: float, most: float) -> Callable[[str], float]:
    """A number of this range."""

    def take(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least:,g} to {most:,g}")
        return number

    return take


def one_of(names: Iterable[str], what: str) -> Callable[[str], str]:
    """One of these names, which may have commas and spaces."""
    known = list(names)

    def take(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}: {quoted(known)}")
        return text

    return take


def quoted(names: Iterable[str]) -> str:
    """As they are to be written in a shell."""
    return ", ".join(map(repr, names))


def new_file(text: str) -> str:
    """A path that can be written behind the run."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file in it")
    if path.exists() and not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} is not ours to write")
    if _is_ordinary(path):
        _try_to_write(path.parent, text)
    return text


def keep(path: str, run: dict[str, Any]) -> None:
    """Write what --json keeps: all of it, or nothing, and then an older file is as it was. Raises SystemExit with a
    sentence."""
    text, made = json.dumps(run, indent=1), Path(path)
    beside = made.with_name(f"{made.name}.new")
    try:
        if _is_ordinary(made):
            beside.write_text(text, encoding="utf-8")
            beside.replace(made)
        else:
            made.write_text(text, encoding="utf-8")
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise SystemExit(f"{path} can't be written: {error.strerror}") from None


def _is_ordinary(path: Path) -> bool:
    """Not a device or a pipe, say, which another file can't replace."""
    return path.is_file() or not path.exists()


def new_folder(text: str) -> str:
    """A folder that can be written, made behind the run where it isn't there."""
    above = Path(text).absolute()
    while not above.exists():
        above = above.parent
    _try_to_write(above, text)
    return text


def _try_to_write(folder: Path, text: str) -> None:
    """Permissions don't tell all: a disk is read-only, or the folder is none of a disk."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} can't be written: {folder}: {error.strerror}") from None


def kept(look: Callable[[Any], object], what: str) -> Callable[[str], dict[str, Any]]:
    """What --json kept. `look` fails on what is nothing of the kind that `what` names."""

    def take(text: str) -> dict[str, Any]:
        try:
            found = json.loads(Path(text).read_text(encoding="utf-8"))
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{text} can't be read: {error.strerror}") from None
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text} holds no JSON: {error}") from None
        try:
            str(found["machine"]), float(found["load"]), look(found)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise argparse.ArgumentTypeError(f"{text} holds no run that --json of {what} kept") from None
        assert isinstance(found, dict)
        return found

    return take


def add_kept(parser: argparse.ArgumentParser, look: Callable[[Any], object], *, moved: str) -> None:
    """The flags of a bench whose runs can be kept, drawn and compared; see `kept` for `look`. `moved`: what a
    comparison shows."""
    parser.add_argument("--json", type=new_file, metavar="FILE", help="keep every run's figures")
    parser.add_argument("--plots", type=new_folder, metavar="DIR", help="draw them as SVG; needs the extra `bench`")
    parser.add_argument(
        "--compare", type=kept(look, f"`{parser.prog}`"), metavar="OLD.json",
        help=f"show {moved} since a run that was kept",
    )  # fmt: skip


def program(text: str) -> str:
    """Something that can be run."""
    if shutil.which(text) is None:
        raise argparse.ArgumentTypeError(f"there is no program {text!r}")
    return text


def allow_open_files(parser: argparse.ArgumentParser, sockets: int, flag: str) -> None:
    """Take the limit on open files as high as so many sockets need; an error where it may not be."""
    need = sockets + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or need <= soft:
        return
    if hard != resource.RLIM_INFINITY and need > hard:
        parser.error(f"argument {flag}: {need:,} open files are needed, and the limit (ulimit -Hn) is {hard:,}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
