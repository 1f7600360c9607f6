"""Lines of the log as text and as JSON, and what [logging] sets."""

import json
import logging
import re
import warnings
from collections.abc import Iterator
from datetime import datetime

import pytest

from clipper.errors import ModelWarning
from clipper.frontend.access_log import AccessLog
from clipper.frontend.http.messages import HttpRequest, HttpResponse
from clipper.log_output import LogOutput, TextLines, log_to_terminal

_logger = logging.getLogger("clipper")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = _logger.level, _logger.propagate, list(_logger.handlers)
    yield
    assert (_logger.level, _logger.propagate, list(_logger.handlers)) == before


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_has_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    log = LogOutput(form="json")
    logging.getLogger("clipper.some.place").info(
        "container %s is\nhere", "svm:1", extra={"model": "svm:1", "replica": 0}
    )
    log.close()
    (line,) = lines(capsys)
    moment = line.pop("time")
    assert isinstance(moment, str)
    assert datetime.fromisoformat(moment).utcoffset() is not None
    assert line == {
        "level": "info",
        "logger": "clipper.some.place",
        "message": "container svm:1 is\nhere",
        "model": "svm:1",
        "replica": 0,
    }


def test_an_exception_is_one_string(capsys: pytest.CaptureFixture[str]) -> None:
    log = LogOutput(form="json")
    try:
        raise ValueError("why")
    except ValueError:
        _logger.exception("it failed", extra={"trace_id": "ab", "odd": object})
    log.close()
    (line,) = lines(capsys)
    assert str(line["exception"]).endswith("ValueError: why")
    assert (line["level"], line["trace_id"]) == ("error", "ab")


def test_what_was_comes_back_when_the_last_one_closes(capsys: pytest.CaptureFixture[str]) -> None:
    one, other = LogOutput(form="json"), LogOutput(form="json")
    one.close()
    one.close()
    _logger.info("still JSON")
    assert [line["message"] for line in lines(capsys)] == ["still JSON"]
    other.close()
    other.change("debug", "json")


def test_level_and_format_change_while_it_is_open(capsys: pytest.CaptureFixture[str]) -> None:
    before = _logger.level
    log = LogOutput()
    assert (_logger.level, _logger.handlers) == (before, [])
    log.change("debug", "json")
    _logger.debug("small")
    log.change("error", "json")
    _logger.warning("larger")
    assert [line["message"] for line in lines(capsys)] == ["small"]
    log.change("warning", "text")
    assert (_logger.level, _logger.handlers, _logger.propagate) == (logging.WARNING, [], True)
    log.change("", "text")
    assert _logger.level == before
    log.close()


def test_a_line_of_text_has_its_date_and_level() -> None:
    record = _logger.makeRecord("clipper", logging.WARNING, "", 0, "it is %s", ("so",), None)
    line = TextLines().format(record)
    date = line[: line.index(" WARNING")]
    assert line == f"{date} WARNING it is so"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", date)
    assert abs(datetime.fromisoformat(date).timestamp() - record.created) < 0.001


def test_the_access_log_logs_so_many_requests_in_a_second(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 7.0
    access = AccessLog(2, lambda: now)
    log = LogOutput(form="json")
    for second in (7.0, 8.0):
        now = second
        for number in range(5):
            request = HttpRequest("GET", b"/api/%d\x1b[2J" % number, b"key=secret", {}, b"")
            access.request(request, HttpResponse(200, b"{}"), b"id-1", "127.0.0.1:5")
    log.close()
    text = capsys.readouterr().err
    assert "secret" not in text
    found = [json.loads(line) for line in text.splitlines()]
    assert [(one["path"], one.get("left_out")) for one in found] == [
        ("/api/0\\x1b[2J", None),
        ("/api/1\\x1b[2J", None),
        ("/api/0\\x1b[2J", 3),
        ("/api/1\\x1b[2J", None),
    ]
    assert found[2]["message"].endswith("; 3 before it are not logged")
    assert (found[0]["status"], found[0]["client"]) == (200, "127.0.0.1:5")


def test_no_access_log_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    access = AccessLog(0)
    log = LogOutput(form="json")
    access.request(HttpRequest("GET", b"/", b"", {}, b""), HttpResponse(200, b""), b"", "")
    log.close()
    assert not access.logs_all
    assert capsys.readouterr().err == ""


def test_a_warning_of_a_command_is_a_line_of_its_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    log_to_terminal()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        shown = warnings.showwarning
        shown(ModelWarning("model 'm:1' is deployed, but it fails"), ModelWarning, "a.py", 3)
        shown("old", DeprecationWarning, "b.py", 7)
    assert [record.getMessage() for record in caplog.records] == [
        "model 'm:1' is deployed, but it fails",
        "DeprecationWarning: old (b.py:7)",
    ]
