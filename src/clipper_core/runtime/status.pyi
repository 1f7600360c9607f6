from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import NoReturn

class Status(IntEnum):
    PENDING = 0
    OK = 1
    FULL = 2
    DEADLINE = 3
    DROPPED = 4
    NO_REPLICA = 5
    MODEL_ERROR = 6
    BAD_OUTPUT = 7
    REPLICA_LOST = 8
    CANCELLED = 9
    CLOSED = 10
    FORKED = 11
    BAD_INPUT = 12
    BAD_FRAME = 13
    TOO_LARGE = 14
    NO_MEMORY = 15
    UNKNOWN = 16
    UNNEEDED = 17

class StatusError(Exception):
    status: Status
    def __init__(self, detail: str, status: int = 0) -> None: ...

def bind_errors(classes: Mapping[int, Callable[[str], Exception]]) -> None: ...
def bind_keywords(refuse: Callable[[str, Sequence[str], Sequence[str]], None]) -> None: ...
def refuse_keyword(function: str, keyword: str, names: list[str]) -> NoReturn: ...
def error_for(status: int, detail: str) -> Exception: ...
