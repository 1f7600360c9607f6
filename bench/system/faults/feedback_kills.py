"""Feedback under faults: clients over HTTP send feedback, and send it again, while their server is
frozen and killed; the history of what they sent and heard is checked against the journal and the
state that was learned."""

import contextlib
import http.client
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clipper
from bench.harness import Goal, Row, row
from bench.system.faults.feedback_history import FeedbackHistory, Reply
from clipper.selection import Observation
from clipper.serving.feedback.journal_records import read
from clipper.store.journal import Journal
from tests.processes import Program, free_ports

CLIENTS = 3
POLICY = "kl_ucb(discount=1)"  # its state counts what it has seen
BUSY = (429, 500, 503, 504)
MORE = 30  # feedbacks that are acknowledged before the next fault
TIMEOUT_S = 0.5  # of a client's request; a frozen server answers later
FROZEN_S = 0.8
PATIENCE_S = 60.0
ROOT = Path(__file__).resolve().parents[3]


# -- the server, a process of its own


def same(xs: Any) -> Any:
    return xs[:, 0].astype(int)


def serve(folder: str, port: str, planted: str) -> None:
    """Serve until stdin ends. stdout: how many observations the state has at the start.

    planted: "unwritten": feedback is acknowledged, and not in the journal. "torn": the last record
    of the journal counts as torn.
    """
    settings: dict[str, Any] = {"journal": "memory"} if planted == "unwritten" else {}
    if planted == "torn":
        whole = Journal.replay

        def replay(self: Journal, after: int = 0) -> Iterator[tuple[int, bytes]]:
            return iter([*whole(self, after)][:-1])

        Journal.replay = replay  # type: ignore[method-assign]
    with clipper.start(
        state=folder, folder=folder, http=f"127.0.0.1:{port}", feedback=settings
    ) as server:
        if "same" not in server.catalog.view.versions:
            server.deploy("same", same, input="f64[1]")
        app = server.app("a", ["same"], policy=POLICY, slo_ms=30_000)
        seen = app._resolve("a").learner.state("").seen
        app.predict([1.0]).result(PATIENCE_S)
        print(int(seen), flush=True)
        sys.stdin.read()


class Server:
    """The process, and the journal that it leaves when it is killed. errors: of its states."""

    def __init__(self, folder: Path, planted: str) -> None:
        self.port = free_ports(1)[0]
        self._folder, self._planted = folder, planted
        self.counted: Counter[int] = Counter()
        self.errors: list[str] = []
        self._last = 0
        self.start()

    def start(self) -> None:
        """Start it, and compare what it has learned with the journal."""
        words = [sys.executable, "-m", "bench.system.faults.feedback_kills", self._folder]
        self.program = Program(*words, self.port, self._planted, folder=ROOT, apart=True)
        seen, expected = int(self.program.line()), self.counted.total()
        if seen != expected:
            self.errors.append(f"the state has {seen} observations, and the journal {expected}")

    def freeze(self) -> None:
        """Stop it for a while."""
        self.program.send(signal.SIGSTOP)
        time.sleep(FROZEN_S)
        self.program.send(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it, and read what is new in its journal."""
        self.program.kill()
        journal = Journal(self._folder / "journal")
        for number, record in journal.replay(self._last):
            seen = read(record)[4]
            assert isinstance(seen, Observation)
            self.counted[seen.truth.label] += 1
            self._last = number
        journal.close()


# -- a client


class Client(threading.Thread):
    """Sends queries, and feedback until it is acknowledged; sometimes once more."""

    def __init__(self, server: Server, history: FeedbackHistory, number: int, seed: int) -> None:
        super().__init__(daemon=True)
        self._server, self._history, self._next = server, history, number
        self._draw, self.enough = random.Random(seed), threading.Event()
        self._line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
        self.failed: Exception | None = None

    def run(self) -> None:
        try:
            while not self.enough.is_set():
                self._one()
        except Exception as error:
            self.failed = error
        self._line.close()

    def _one(self) -> None:
        label, self._next = self._next, self._next + CLIENTS
        answer = self._post("predict", {"input": [float(label)]})
        if answer is None:
            return
        body = {"feedback": [{"id": answer["id"], "label": label}]}
        while not self.enough.is_set():
            reply = self._history.send(label, lambda: self._outcome(body))
            if reply != "lost" and self._draw.random() < 0.8:
                return

    def _outcome(self, body: dict[str, Any]) -> Reply:
        """Send feedback; return what the server did with it, or that no response came."""
        found = self._post("feedback", body)
        if found is None:
            return "lost"
        return "counted" if found["counted"] else "duplicate" if found["duplicates"] else "unknown"

    def _post(self, what: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Return the response; None without one, or if the server was too busy."""
        try:
            self._line.request("POST", f"/api/a/{what}", json.dumps(body))
            response = self._line.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException):
            self._line.close()
            time.sleep(0.01)
            return None
        if response.status in BUSY:
            return None
        if response.status != 200:
            raise RuntimeError(f"{what} is answered {response.status}: {text[:300]!r}")
        found: dict[str, Any] = json.loads(text)
        return found


# -- a life


def life(kills: int, seed: int, planted: str = "") -> tuple[FeedbackHistory, list[str]]:
    """Return the history of so many kills, and what is wrong with it.

    planted: a bug that the server has; see `serve`.
    """
    draw, history = random.Random(seed), FeedbackHistory()
    with tempfile.TemporaryDirectory(prefix="feedback-") as name, contextlib.ExitStack() as ends:
        server = Server(Path(name), planted)
        ends.callback(lambda: server.program.kill())
        clients = [Client(server, history, i, seed + i) for i in range(CLIENTS)]
        for client in clients:
            client.start()
        for _ in range(kills):
            _wait_for_more(history)
            server.freeze()
            time.sleep(draw.uniform(0.0, 0.4))
            server.kill()
            server.start()
        _wait_for_more(history)
        for client in clients:
            client.enough.set()
        for client in clients:
            client.join()
        server.kill()
    wrong = [*server.errors, *history.errors(server.counted)]
    wrong += [f"a client: {client.failed!r}" for client in clients if client.failed]
    return history, wrong


def _wait_for_more(history: FeedbackHistory) -> None:
    enough, until_s = history.count("counted") + MORE, time.monotonic() + PATIENCE_S
    while history.count("counted") < enough and time.monotonic() < until_s:
        time.sleep(0.02)


def main(quick: bool, kills: int | None = None, seed: int | None = None) -> list[Row]:
    total = kills if kills is not None else 2 if quick else 30
    seed = seed if seed is not None else random.SystemRandom().randrange(1 << 30)
    print(f"feedback_kills: {total} kills, --seed {seed}", file=sys.stderr)
    history, wrong = life(total, seed)
    replies = ", ".join(
        f"{history.count(reply)} {reply}" for reply in ("duplicate", "unknown", "lost")
    )
    return [
        row(
            f"{total} kills of a server under feedback: wrong afterwards",
            float(len(wrong)),
            "findings",
            goal=Goal("value_at_most", 0),
            note="; ".join([f"seed {seed}; responses: {replies}", *wrong[:5]]),
        ),
        row("feedback acknowledged as new", float(history.count("counted")), "feedbacks"),
    ]


if __name__ == "__main__":
    serve(*sys.argv[1:])
