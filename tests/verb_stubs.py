"""Generate `python/clipper/manage/verbs/calls.pyi`, the types of the client's methods, from the
table of verbs.

`python tests/test_docs.py` writes it.
"""

import collections.abc
import re
from typing import Any

from clipper.manage import rows
from clipper.manage.verbs import calls
from clipper.manage.verbs.table import REQUIRED, VERBS, Verb

CLASSES = {
    "": calls.ManagementCalls,
    "tables": calls.TableCalls,
    "streams": calls.StreamCalls,
}
HEAD = """# The verbs of management as methods of clients, from clipper.manage.verbs.table.
# `python tests/test_docs.py` writes this file.

from collections.abc import Sequence
from typing import Protocol, Unpack

from clipper.manage.rows import (
{rows}
)
from clipper.manage.verbs.sending import Requests
from clipper.metrics.samples import Stats
from clipper.spec.keywords import {settings}
"""


def stub() -> str:
    """Return the text of the stub."""
    derived = [one for one in VERBS if "client" not in {**one.by_hand, **one.without}]
    used = {name for one in derived for name in re.findall(r"\w+", one.gives)}
    imported = "\n".join(f"    {name}," for name in sorted(used & set(vars(rows))))
    settings = sorted(one.keywords.__name__ for one in derived if one.keywords)
    text = HEAD.format(rows=imported, settings=", ".join(settings))
    for on, kind in CLASSES.items():
        text += f"\nclass {kind.__name__}(Requests, Protocol):\n"
        text += "".join(_method(verb) for verb in derived if verb.on == on)
    return text


def _method(verb: Verb) -> str:
    words = ["self"]
    for one in verb.arguments:
        default = "" if one.default is REQUIRED else " = ..."
        words.append(f"{one.name}: {_type(one.type)}{default}")
    if verb.changes:
        words += ["*", "dry_run: bool = ..."]
    if verb.spec is not None:
        words.append(f"**settings: Unpack[{verb.keywords.__name__}]")
    line = f"    def {verb.method}({', '.join(words)}) -> {verb.gives}: ...\n"
    if len(line) <= 101:
        return line
    short = f"        {', '.join(words)}\n"
    if len(short) > 101:
        short = "".join(f"        {word},\n" for word in words)
    return f"    def {verb.method}(\n{short}    ) -> {verb.gives}: ...\n"


def _type(type_: Any) -> str:
    if isinstance(type_, type) and not hasattr(type_, "__args__"):
        return type_.__name__
    return str(type_).replace(f"{collections.abc.__name__}.", "")
