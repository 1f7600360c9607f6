"""One JSON object a line, with what the line was given."""

import json
import logging
from datetime import datetime

import pytest

from clipper.json_log import JsonLog


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_has_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    log = JsonLog()
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
    log = JsonLog()
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("clipper").exception("it failed", extra={"trace_id": "ab", "odd": object})
    log.close()
    (line,) = lines(capsys)
    assert str(line["exception"]).endswith("ValueError: why")
    assert (line["level"], line["trace_id"]) == ("error", "ab")


def test_what_was_comes_back_when_the_last_one_closes(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("clipper")
    before = logger.level, logger.propagate, list(logger.handlers)
    one, other = JsonLog(), JsonLog()
    one.close()
    one.close()
    logger.info("still JSON")
    assert [line["message"] for line in lines(capsys)] == ["still JSON"]
    other.close()
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
