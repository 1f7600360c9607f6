"""Texts of models, made safe for a log and a client."""

import pytest

from clipper.errors import ModelFailed
from clipper.foreign_text import LINE_CHARS_MAX, Sampler, last_line, printable
from clipper.frontend.inference.outcome import _error


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Traceback\n  File x\nValueError: boom\n", "ValueError: boom"),
        ("", "no reason given"),
        ("ValueError: \x1b]0;title\x07\x1b[31mred", r"ValueError: \x1b]0;title\x07\x1b[31mred"),
        ("ValueError: a\rb", r"ValueError: a\rb"),
        ("KeyError: '\u202eabc'", r"KeyError: '\u202eabc'"),
        ("No such file: '/srv/secret/models/w.bin'", "No such file: 'w.bin'"),
        ("see http://host/a/b and 3/4", "see http://host/a/b and 3/4"),
        ("naïve: 数", "naïve: 数"),
        ("KeyError: <object object at 0x7f16cfda6b80>", "KeyError: <object object at 0x...>"),
        ("OSError: code 0xC0000005", "OSError: code 0xC0000005"),
    ],
)
def test_a_models_words_are_made_fit_for_a_terminal_and_a_client(text: str, shown: str) -> None:
    assert last_line(text) == shown


def test_a_printable_text_has_no_character_that_a_terminal_obeys() -> None:
    assert printable("a\tb\nnaïve 数") == "a\tb\nnaïve 数"
    assert printable("\x1b]0;t\x07\x1b[2J\rok\x08\x9b1m\u202e") == (
        r"\x1b]0;t\x07\x1b[2J\rok\x08\x9b1m\u202e"
    )


def test_a_long_line_is_cut() -> None:
    assert len(last_line("x" * 10_000_000)) == LINE_CHARS_MAX
    assert len(last_line("\x1b" * 10_000)) == LINE_CHARS_MAX


def test_a_flood_of_lines_is_sampled_and_the_rest_is_counted() -> None:
    now = [0.0]
    sampler = Sampler(2, lambda: now[0])
    assert [sampler.admit() for _ in range(5)] == [0, 0, -1, -1, -1]
    now[0] = 1.5
    assert [sampler.admit() for _ in range(3)] == [3, 0, -1]


def test_a_sentence_of_a_model_ends_with_one_period():
    for said in ("m:1 failed: no number", "m:1 failed: no number."):
        error = _error([ModelFailed("x")], said)
        assert (type(error), error.message) == (ModelFailed, "m:1 failed: no number.")
