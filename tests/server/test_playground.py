"""server.playground: the page's files, who may have them, and how long a browser may keep them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from protocols.http1 import Request
from server import playground
from server.http import Call
from server.playground import StaticFile
from tests.support.http2 import Peer
from tests.support.serving import REPOSITORY, Server

FOLDER = Path(playground.__file__).parent
SOURCES = sorted(path for path in FOLDER.iterdir() if path.is_file() and path.suffix != ".py")


def made(*, needs_key: bool = False, status_access: str = "loopback") -> dict[str, StaticFile]:
    return {
        file.path: file for file in playground.files(needs_key=needs_key, status_access=status_access, resume_ttl_s=2.5)
    }


def asked(file: StaticFile, tag: bytes | None) -> int:
    fields = ((b"if-none-match", tag),) if tag is not None else ()
    request = Request("GET", file.path, "1.1", fields, None, False, False, True, False)
    return file.answer(Call(request, file.path, "", "127.0.0.1", "req", 0.0)).status


def test_every_file_of_the_folder_is_served_and_installed() -> None:
    digest = {path.split("/")[2] for path in made() if path != "/"}
    assert len(digest) == 1 and re.fullmatch("[0-9a-f]{16}", digest.pop())
    assert {Path(path).name for path in made() if path != "/"} == {path.name for path in SOURCES} - {"index.html"}
    assert set(playground._KINDS) == {path.suffix for path in SOURCES}
    installed = re.search(r"^PAGE = (\[.+\])", (REPOSITORY / "setup.py").read_text(), re.MULTILINE)
    assert installed and set(re.findall(r'"\*(\.\w+)"', installed[1])) == set(playground._KINDS)


def test_the_page_knows_what_it_may_ask_for() -> None:
    page = made(needs_key=True, status_access="key")["/"].body.decode()
    assert '<html lang="en" data-key="needed" data-status="key" data-lease="2.5">' in page
    assert "%" not in re.sub(r"\d+%", "", page)


@pytest.mark.parametrize(
    ("tag", "status"),
    [
        (None, 200),
        (b'"other"', 200),
        (b"%s", 304),
        (b"W/%s", 304),
        (b'"other", %s', 304),
        (b"*", 304),
        (b"", 200),
        (b'"%s"', 200),
    ],
)
def test_a_browser_that_has_it_gets_a_304(tag: bytes | None, status: int) -> None:
    for file in made().values():
        assert asked(file, tag and tag.replace(b"%s", file.tag)) == status


def test_another_version_is_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in SOURCES:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "page.css").write_text("body { margin: 1px }")
    before = set(made())
    monkeypatch.setattr(playground, "_FOLDER", tmp_path)
    playground._read.cache_clear()
    try:
        after = set(made())
    finally:
        playground._read.cache_clear()
    assert before & after == {"/"}


class Page(HTMLParser):
    """Everything that the page has inline or asks others for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inline: list[str] = []
        self.wanted: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See HTMLParser."""
        given = dict(attrs)
        self.inline += [name for name in given if name.startswith("on") or name == "style"]
        self.wanted += [given[name] or "" for name in ("src", "href") if name in given]
        self.ids += [given["id"] or ""] if "id" in given else []
        if tag in ("script", "style") and "src" not in given:
            self.inline.append(tag)


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    served = made()
    page = Page(served["/"].body.decode())
    assert page.inline == []
    files = [wanted for wanted in page.wanted if not wanted.startswith("#")]
    assert files and all(f"/{wanted}" in served for wanted in files)
    for path in SOURCES:
        foreign = set(re.findall(r"\b\w+://[^\s\"'`]+", path.read_text())) - {"http://www.w3.org/2000/svg"}
        assert not foreign, path.name


def test_modules_import_what_is_there_and_make_no_html_of_strings() -> None:
    names = {path.name for path in SOURCES}
    for path in (path for path in SOURCES if path.suffix == ".js"):
        text = path.read_text()
        assert set(re.findall(r'from "\./([^"]+)"', text)) <= names
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)


def test_each_id_is_there_once() -> None:
    ids = Page(made()["/"].body.decode()).ids
    assert len(ids) == len(set(ids))


# Through a server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With keys, none of which the tests have."""
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(f'[keys.alice]\nsha256 = "{"0" * 64}"\n')
    with Server("--api-keys", str(keys)) as running:
        yield running


def parts(server: Server) -> list[str]:
    page = Page(server.ask("GET", "/").body.decode())
    return [f"/{wanted}" for wanted in page.wanted if not wanted.startswith("#")]


def test_it_is_there_without_a_key_and_guarded(server: Server) -> None:
    for target in ("/", "/?x=1", *parts(server)):
        answer = server.ask("GET", target)
        assert answer.status == 200
        policy = answer.header("content-security-policy") or ""
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert answer.header("x-content-type-options") == "nosniff"
        assert answer.header("x-request-id")
    assert server.ask("GET", "/v1/models").status == 401


def test_the_page_is_asked_for_again_and_its_parts_are_kept(server: Server) -> None:
    assert server.ask("GET", "/").header("cache-control") == "no-cache"
    for target in parts(server):
        assert "immutable" in (server.ask("GET", target).header("cache-control") or "")


@pytest.mark.parametrize("status", [200, 304])
def test_heads_and_304s_have_the_fields_and_no_body(server: Server, status: int) -> None:
    whole = server.ask("GET", "/")
    tag = whole.header("etag") or ""
    have = [("If-None-Match", tag)] if status == 304 else []
    with server.connect() as client:
        for method in ("HEAD", "GET", "HEAD") if have else ("HEAD", "HEAD"):  # nothing is left behind the head
            client.request(method, "/", None, have)
            answer = client.answer(method)
            assert (answer.status, answer.body) == (status, b"")
            assert answer.header("content-length") == str(len(whole.body))
            for name in ("etag", "cache-control", "content-security-policy"):
                assert answer.header(name) == whole.header(name)


def test_over_http2_too(server: Server) -> None:
    with Peer(server.port) as peer:
        fields, body = peer.answer(peer.ask("/"))
        again, nothing = peer.answer(peer.ask("/", fields=[("if-none-match", fields["etag"])]))
    assert (fields[":status"], again[":status"], nothing) == ("200", "304", b"")
    assert body.startswith(b"<!doctype html>") and len(body) == int(again["content-length"])
