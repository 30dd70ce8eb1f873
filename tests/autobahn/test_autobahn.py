"""Issue 3, item 7: Autobahn's fuzzing client finds no fault. The whole run is `python -m tests.autobahn.run`."""

from __future__ import annotations

import pytest

from tests.autobahn import run


@pytest.mark.timeout(900)  # on a machine that does other things; alone it takes about 40 s, the first time 60
def test_fuzzing_client() -> None:
    """RFC 6455 and RFC 7692: the 301 cases outside 12.* and 13.*, and a sample of those two."""
    try:
        python = run.installed_suite()
    except run.NotRun as reason:
        pytest.skip(f"NOT RUN: {reason}")
    with run.echo_url() as url:
        verdicts = run.run_suite(python, url, short=True)
    assert verdicts.failed == {}
    assert len(verdicts.cases) == run.CASES_SHORT + len(run.SAMPLE)


def test_no_python_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The script says in its last line that nothing was run."""

    def find() -> None:
        raise run.NotRun("no Python 2.7 was found")

    monkeypatch.setattr(run, "find_python2", find)
    assert run.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("NOT RUN")
