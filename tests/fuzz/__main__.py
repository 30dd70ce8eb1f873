"""`python -m tests.fuzz TARGET --seconds N`: atheris looks for inputs that break a target, guided by coverage.

What it finds stays: inputs that reach new code in the work folder, from where the next run goes on, and one that
breaks something in a file that the last lines name, with the traceback. Put that file into tests/fuzz/corpus/TARGET,
where the tests replay it for ever. `--replay FILE` plays one file.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import sys
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
# Long enough for a scene of many operations; longer ones find nothing that these don't, slower.
INPUT_BYTES_MAX = 2048
INPUT_S_MAX = 20
MEMORY_MIB_MAX = 2048  # above what the process has at its start


def main() -> None:
    """Does not return when it fuzzes: libFuzzer ends the process, with 0 when nothing was found."""
    options = _options()
    if options.replay is not None:
        from tests.fuzz.targets import TARGETS

        TARGETS[options.target](options.replay.read_bytes())
        return
    import atheris  # type: ignore[import-untyped]  # only here: the tests replay the corpus without it

    with atheris.instrument_imports(include=["protocols", "server", "h11", "h2", "wsproto"]):
        from tests.fuzz.targets import TARGETS, seeds
    target = TARGETS[options.target]
    work = options.work / options.target
    work.mkdir(parents=True, exist_ok=True)
    for seed in seeds(options.target):
        (work / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    kept = CORPUS / options.target
    kept.mkdir(parents=True, exist_ok=True)
    argv = [
        sys.argv[0],
        f"-max_total_time={options.seconds}",
        f"-max_len={INPUT_BYTES_MAX}",
        f"-timeout={INPUT_S_MAX}",
        # The peak that the kernel tells of is inherited: started by a large process, this one seems as large.
        f"-rss_limit_mb={_peak_mib() + MEMORY_MIB_MAX}",
        f"-artifact_prefix={work.parent}/{options.target}-",
        "-print_final_stats=1",
        *([f"-seed={options.seed}"] if options.seed else []),
        str(work),
        str(kept),
    ]
    atheris.Setup(argv, target)
    atheris.Fuzz()


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__, allow_abbrev=False)
    parser.add_argument("target", help="http1, http2, sse, websocket, websocket_extensions or connection")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the mutations; 0: a random one")
    parser.add_argument("--work", type=Path, default=Path(".hypothesis/fuzz"), help="where found inputs are kept")
    parser.add_argument("--replay", type=Path, help="play one input, without atheris")
    return parser.parse_args()


if __name__ == "__main__":
    main()
