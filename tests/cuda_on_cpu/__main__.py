"""`python -m tests.cuda_on_cpu`: the whole of what CI does a share of. Every instance of every kernel for every
architecture (12 minutes of one CPU), which writes registers.tsv anew, and every mutation (2 minutes). Ends with 1 if a
kernel spills or a mutant lives.
"""

from __future__ import annotations

import sys
import time

from tests.cuda_on_cpu import mutate, nvrtc


def main() -> int:
    """The exit code."""
    start = time.monotonic()
    failed = [nvrtc.main(nvrtc.ARCHITECTURES), mutate.main()]
    print(f"{(time.monotonic() - start) / 60:.0f} minutes")
    return max(failed)


if __name__ == "__main__":
    sys.exit(main())
