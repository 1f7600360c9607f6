"""Texts that are compared with files of tests/expected_output: what people read, whole.

WRITE_EXPECTED=1 python -m pytest tests/unit/test_verbs_say.py    write them anew, then git diff
"""

import difflib
import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "expected_output"


def check_expected(name: str, text: str) -> None:
    """Compare a text with a file, or write it there if WRITE_EXPECTED is set."""
    path = FOLDER / name
    if os.environ.get("WRITE_EXPECTED"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    lines = difflib.unified_diff(
        path.read_text().splitlines(), text.splitlines(), str(path), "now", lineterm="", n=1
    )
    difference = "\n".join(lines)
    assert not difference, f"{difference}\n\nIf that is meant: WRITE_EXPECTED=1 writes the file."
