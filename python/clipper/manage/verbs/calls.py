"""The verbs of management as methods of clients. calls.pyi has their types: `python
tests/test_docs.py` writes it from the table, `clipper.manage.verbs.table`."""

from typing import Protocol

from clipper.manage.verbs.sending import Requests, method_of
from clipper.manage.verbs.table import VERBS
from clipper.options import refusing_unknown_keywords


class ManagementCalls(Requests, Protocol):
    """Interface of the verbs of a server. With dry_run a change is checked, and nothing is changed;
    the result is as it would be."""


class TableCalls(Requests, Protocol):
    """Interface of the verbs of parameter tables."""


class StreamCalls(Requests, Protocol):
    """Interface of the verbs of Redis streams."""


for _verb in VERBS:
    if "client" not in {**_verb.by_hand, **_verb.without}:
        _of = {"": ManagementCalls, "tables": TableCalls, "streams": StreamCalls}[_verb.on]
        setattr(_of, _verb.method, method_of(_verb))
for _of in (ManagementCalls, TableCalls, StreamCalls):
    refusing_unknown_keywords(_of)
