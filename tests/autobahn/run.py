"""Autobahn's fuzzing client against the conformance echo: RFC 6455 and RFC 7692 as people who did not write this server
understand them.

    python -m tests.autobahn.run            all 517 cases, about ten minutes
    python -m tests.autobahn.run --short    the 301 cases outside 12.* and 13.*, and a sample of those two
    python -m tests.autobahn.run --url ws://HOST:PORT   another echo server

The suite is Python 2 code, so this finds a Python 2.7 (`python2.7` on PATH, or one of pyenv's) and installs
`autobahntestsuite` for it into the user's cache folder, once. Where there is no Python 2.7, the last line says NOT RUN.
Exit codes: 0 when nothing failed or nothing could run, 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.serving import Server
from tests.support.tools import one_at_a_time

SUITE = "autobahntestsuite==25.10.1"
CASES_ALL, CASES_SHORT = 517, 301
# INFORMATIONAL: the case only records what a server does (7.1.6 and 7.13.*), no answer is wrong.
GOOD = frozenset({"OK", "INFORMATIONAL"})
# Messages of 16 bytes to 16 KiB of each kind: 12.* and 13.* repeat one exchange, a thousand times, over sizes and
# windows.
SAMPLE = ("12.1.1", "12.2.4", "12.3.6", "12.4.3", "12.5.7", "13.1.2", "13.3.5", "13.4.4", "13.5.3", "13.6.6", "13.7.7")
FAMILIES = ("1.*", "2.*", "3.*", "4.*", "5.*", "6.*", "7.*", "9.*", "10.*")
RUN_S_MAX = 3600
INSTALL_S_MAX = 600


class NotRun(Exception):
    """This machine lacks what the suite needs."""


@dataclass(frozen=True)
class Verdicts:
    """Case -> what the suite says of the exchange, and of its close."""

    cases: dict[str, tuple[str, str]]

    @property
    def failed(self) -> dict[str, tuple[str, str]]:
        """The cases that are not good."""
        return {name: found for name, found in self.cases.items() if not GOOD.issuperset(found)}

    def summary(self) -> str:
        """One line."""
        counts = Counter(behaviour for behaviour, _ in self.cases.values())
        shown = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items(), key=lambda item: -item[1]))
        return f"{len(self.cases)} cases: {shown}; {len(self.failed)} failed"


def find_python2() -> Path:
    """An interpreter that says that it is 2.7. Raises NotRun."""
    roots = [Path(root) for root in (os.environ.get("PYENV_ROOT"), _pyenv_root(), Path.home() / ".pyenv") if root]
    on_path = shutil.which("python2.7")
    found = [Path(on_path)] if on_path else []
    found += [path for root in roots for path in sorted(root.glob("versions/2.7*/bin/python2.7"), reverse=True)]
    for path in found:  # pyenv's shims are there even for versions that are not switched on
        if _says(path, "-c", "import sys; print(sys.version_info[:2])") == "(2, 7)":
            return path
    raise NotRun("no Python 2.7 was found, neither on PATH nor by pyenv")


def _pyenv_root() -> str:
    pyenv = shutil.which("pyenv")
    return _says(Path(pyenv), "root") if pyenv else ""


def _says(program: Path, *arguments: str) -> str:
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def installed_suite() -> Path:
    """The Python 2.7 of an environment that holds the suite; made at the first call. Raises NotRun."""
    base = find_python2()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice" / SUITE.replace("==", "-")
    folder.mkdir(parents=True, exist_ok=True)
    python, done = folder / "env" / "bin" / "python", folder / "complete"
    with one_at_a_time(folder):
        if not done.exists():
            shutil.rmtree(folder / "env", ignore_errors=True)
            _install(base, folder)
            done.touch()
    return python


def _install(base: Path, folder: Path) -> None:
    """virtualenv dropped Python 2.7 with 20.16, and venv never had it."""
    tools = folder / "tools"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(tools), "virtualenv<20.16"]
    subprocess.run(pip, check=True, timeout=INSTALL_S_MAX)
    environment = {**os.environ, "PYTHONPATH": str(tools)}
    make = [sys.executable, "-m", "virtualenv", "--quiet", "--python", str(base), str(folder / "env")]
    subprocess.run(make, check=True, timeout=INSTALL_S_MAX, env=environment)
    install = [
        str(folder / "env" / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-python-version-warning",
        SUITE,
    ]
    done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_S_MAX, check=False)
    if done.returncode:
        raise RuntimeError(f"{SUITE} was not installed:\n{done.stdout}{done.stderr}")


def run_suite(python: Path, url: str, *, short: bool, agent: str = "sluice") -> Verdicts:
    """Run the client to its end. Raises RuntimeError when it leaves no report."""
    with tempfile.TemporaryDirectory(prefix="autobahn-") as name:
        folder = Path(name)
        specification = {
            "outdir": str(folder / "report"),
            "servers": [{"agent": agent, "url": url}],
            "cases": [*FAMILIES, *SAMPLE] if short else ["*"],
            "exclude-cases": [],
            "exclude-agent-cases": {},
        }
        (folder / "spec.json").write_text(json.dumps(specification))
        command = [str(python), "-m", "autobahntestsuite.wstest", "-m", "fuzzingclient", "-s", "spec.json"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=RUN_S_MAX, check=False)
        report = folder / "report" / "index.json"
        if not report.exists():
            raise RuntimeError(f"the fuzzing client left no report:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        found = json.loads(report.read_text())[agent]
    return Verdicts({case: (entry["behavior"], entry["behaviorClose"]) for case, entry in found.items()})


@contextlib.contextmanager
def echo_url() -> Iterator[str]:
    """Our own server's echo, while the context lasts."""
    with Server("--conformance-echo", engine=None) as server:
        yield f"ws://127.0.0.1:{server.port}"


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.autobahn.run", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--url", help="an echo server of your own; without it, ours is started")
    parser.add_argument(
        "--short", action="store_true", help="the 301 cases outside 12.* and 13.*, and a sample of those"
    )
    options = parser.parse_args(argv)
    try:
        python = installed_suite()
    except NotRun as reason:
        print(f"NOT RUN: {reason}")
        return 0
    with contextlib.nullcontext(options.url) if options.url else echo_url() as url:
        verdicts = run_suite(python, url, short=options.short)
    for case, (behaviour, close) in verdicts.failed.items():
        print(f"{case}: {behaviour}, close {close}")
    print(verdicts.summary())
    expected = CASES_SHORT + len(SAMPLE) if options.short else CASES_ALL
    if len(verdicts.cases) != expected:
        print(f"{expected} cases were to be run")
        return 1
    return 1 if verdicts.failed else 0


if __name__ == "__main__":
    sys.exit(main())
