"""Texts that are compared with files of tests/expected_output: what people read, whole.

WRITE_EXPECTED=1 python -m pytest tests/unit/test_verbs_say.py    write them anew, then git diff
"""

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from clipper.errors import ClipperError

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


def shown(value: Any) -> str:
    """Return a value as text: numbers with six digits, objects by their fields, arrays by type."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{shown(value.tolist())}"
    if isinstance(value, float | np.floating):
        return f"{value + 0.0:.6g}"
    if isinstance(value, msgspec.Struct):
        return f"{type(value).__name__}({shown(msgspec.structs.asdict(value))[1:-1]})"
    if is_dataclass(value) and not isinstance(value, type):
        fields = {name: getattr(value, name) for name in value.__dataclass_fields__}
        return f"{type(value).__name__}({shown(fields)[1:-1]})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {shown(one)}" for key, one in value.items()) + "}"
    if isinstance(value, frozenset | set):
        return shown(sorted(value))
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(shown, value)) + "]"
    return repr(value)


def table(name: str, *rows: tuple[Callable[..., Any], list[Any]]) -> None:
    """Compare what functions return, or raise, for lists of arguments with a file."""
    found = []
    for function, cases in rows:
        for case in cases:
            words = case if isinstance(case, tuple) else (case,)
            try:
                result = shown(function(*words))
            except (ClipperError, ValueError, TypeError) as error:
                result = f"{type(error).__name__}: {error}"
            found.append(f"{function.__name__}{shown(words)[:300]}: {result}")
    check_expected(f"tables/{name}.txt", "\n".join(found) + "\n")
