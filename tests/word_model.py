"""A model that answers in parts, for tests."""

import pathlib
import time
from collections.abc import Iterator


def words(x: str) -> Iterator[str]:
    """Give the words of a text. Some do something: `fail` raises, `wait:PATH` waits for a file,
    `log:PATH` adds an x to a file; a text that begins with `closes:PATH` makes a file at its end.
    """
    try:
        for word in x.split():
            if word == "fail":
                raise ValueError("no more words")
            if word.startswith("wait:"):
                while not pathlib.Path(word[5:]).exists():
                    time.sleep(0.001)
                continue
            if word.startswith("log:"):
                with open(word[4:], "a") as file:
                    file.write("x")
            yield word + " "
    finally:
        if x.startswith("closes:"):
            pathlib.Path(x.split()[0][7:]).touch()
