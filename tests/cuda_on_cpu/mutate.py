"""Takes each barrier and each bound test out of the kernels in turn; the checks must fail every time.

`python -m tests.cuda_on_cpu.mutate` runs all and ends with 1 if one lives. A bound test is a call of `inside`
(numbers.cuh), which becomes true; the conditions of loops stay. A mutant is judged under AddressSanitizer and
ThreadSanitizer: by its results, its accesses and its races, on small launches of both kinds of arithmetic. One that the
compiler refuses is no mutant, and ends the run.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.cuda_kernels import Shape
from tests.cuda_on_cpu import checks
from tests.cuda_on_cpu.emulator import KERNELS, LaunchError, Sanitized

SHAPES = (
    Shape("bfloat16", heads=3, kv_heads=1, head_dim=80, rotary_dim=80, block_size=16),
    Shape("float32", heads=4, kv_heads=2, head_dim=48, rotary_dim=32, block_size=16),
)
_BARRIER = re.compile(r"__syncthreads\(\);|__syncwarp\(\);|wait_for_copies<\d>\(\);")
_FOUND = re.compile(r"divergent barrier|data race|ERROR: (\w+Sanitizer)")
_INCLUDE = re.compile(r'#include "(\w+\.cuh)"')


@dataclass(frozen=True)
class Mutant:
    """`text` at [start, end) of a file becomes `instead`."""

    file: str
    line: int
    text: str
    start: int
    end: int
    instead: str

    @property
    def barrier(self) -> bool:
        return not self.instead

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text} -> {self.instead or 'nothing'}"


def mutants() -> list[Mutant]:
    """All, in the order of files and lines."""
    found = []
    for path in sorted(KERNELS.glob("*.cu*")):
        text = path.read_text()
        for start, end in sorted([*_barriers(text), *_bound_tests(text)]):
            instead = "true" if text[start:end].startswith("inside") else ""
            line = text.count("\n", 0, start) + 1
            found.append(Mutant(path.name, line, text[start:end], start, end, instead))
    return found


def caught_by(mutant: Mutant) -> str | None:
    """What the first check that fails finds; None if none does."""
    with tempfile.TemporaryDirectory() as folder:
        kernels = Path(folder) / "cuda"
        shutil.copytree(KERNELS, kernels)
        path = kernels / mutant.file
        text = path.read_text()
        path.write_text(text[: mutant.start] + mutant.instead + text[mutant.end :])
        sanitizers = ("thread", "address") if mutant.barrier else ("address", "thread")
        found = (
            _fault(kernels, check, shape, sanitizer)
            for check in _checks_of(mutant.file)
            for sanitizer in sanitizers
            for shape in SHAPES
        )
        return next((each for each in found if each), None)


def _fault(kernels: Path, check: str, shape: Shape, sanitizer: str) -> str | None:
    def load(source: str, constants: Mapping[str, int]) -> Sanitized:
        return Sanitized(source, constants, sanitizer, kernels=kernels, order="shuffled")

    try:
        checks.CHECKS[check](load, shape, np.random.default_rng(1))
    except AssertionError:
        return "a wrong result"
    except LaunchError as error:
        said = _FOUND.search(str(error))
        return (said[1] or said[0]) if said else "a failed launch"
    return None


def _checks_of(file: str) -> list[str]:
    """The checks that reach a file: of itself, or of whatever includes it."""
    return [name for name in checks.CHECKS if file in _read_by(f"{name}.cu") or file == checks.BESIDE.get(name)]


def _read_by(file: str) -> set[str]:
    included = _INCLUDE.findall((KERNELS / file).read_text())
    return {file}.union(*(_read_by(each) for each in included))


def _barriers(text: str) -> Iterator[tuple[int, int]]:
    for match in _BARRIER.finditer(text):
        yield match.span()


def _bound_tests(text: str) -> Iterator[tuple[int, int]]:
    for match in re.finditer(r"\binside\(", text):
        if text[: match.start()].endswith("bool "):
            continue  # its own definition
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        yield match.start(), end


def main() -> int:
    """Runs all mutants; 1 if one lived."""
    every = mutants()
    counts: Counter[tuple[str, str]] = Counter()
    for number, mutant in enumerate(every, 1):
        found = caught_by(mutant) or "LIVES"
        counts["barriers" if mutant.barrier else "bound tests", found] += 1
        print(f"{number}/{len(every)} {found}: {mutant}", flush=True)
    for (kind, found), count in sorted(counts.items()):
        print(f"{count} {kind}: {found}")
    alive = sum(count for (_, found), count in counts.items() if found == "LIVES")
    print(f"{len(every) - alive} of {len(every)} mutants caught")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
