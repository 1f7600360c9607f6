import threading
from concurrent.futures import Future
from typing import Any

class StandardState:
    condition: threading.Condition
    state: str
    waiters: list[Any]
    def end(self, future: Future[Any]) -> None: ...
