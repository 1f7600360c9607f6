"""Learning from feedback: policy states, journal, feedback window, and the server's name among
those that share the store.
"""

import contextlib
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from clipper.component import Health
from clipper.errors import ClipperError, ConfigError
from clipper.metrics.stats import FeedbackStats
from clipper.selection import Policy, create_policy
from clipper.serving.feedback.answer_records import AnswerRecords, RecordLimits
from clipper.serving.feedback.ended_servers import EndedServers
from clipper.serving.feedback.forwarding import ForwardedFeedback, Forwarding, Reply
from clipper.serving.feedback.journal_records import read
from clipper.serving.feedback.presence import Presence
from clipper.serving.feedback.state_sync import StoreTrust
from clipper.serving.feedback.states import Learner, Seen, States
from clipper.serving.feedback.window import FeedbackWindow
from clipper.settings.server import FeedbackSettings
from clipper.state_dir import write_private
from clipper.store.journal import Journal
from clipper.store.memory import MemoryStore
from clipper.store.sqlite import SqliteStore
from clipper.store.store import Store
from clipper.types import VersionedModel

_log = logging.getLogger(__name__)

STATES_FILE = "learned.db"
_NAME = re.compile(r"[\w.-]{1,64}")  # of a server, made by it or set by an operator


class Learning:
    """The parts that learn from feedback. Threads: any. folder: the server's state folder; None:
    keep nothing beyond the process. shared: whether other servers may use the store.

    Where the store is memory and there is a folder, states are kept in a file of that folder, of at
    most `bytes_max` bytes (0: no limit): the journal forgets what has been written to the store,
    which has to outlive the process. trust: whether the store is the one that is known here.
    """

    def __init__(
        self,
        store: Store,
        folder: Path | None,
        settings: FeedbackSettings,
        shared: bool = False,
        bytes_max: int = 0,
        trust: StoreTrust | None = None,
    ) -> None:
        self.node = secrets.token_hex(4)  # part of the ids of the answers of this process
        mode = "memory" if folder is None else settings.journal
        self.journal = Journal(
            None if folder is None else folder / "journal", mode, settings.journal_bytes_max
        )
        if self.journal.damaged:
            _log.error(
                "the journal is damaged; feedback acknowledged there is lost: %s",
                self.journal.damaged,
            )
        in_memory = isinstance(store, MemoryStore)
        self._file: SqliteStore | None = None
        if in_memory and folder is not None:
            self._file = SqliteStore(folder / STATES_FILE, bytes_max=bytes_max)
        name = _name_in(folder if self.journal.mode != "memory" else None)
        self.states = States(
            self._file or store,
            self.journal,
            name,
            settings.contexts_max,
            settings.write_ms / 1000,
            not in_memory,
            EndedServers(store, name, settings.ended_s) if shared else None,
            alone=self.journal.mode == "memory" and not shared,
            trust=None if in_memory else trust,
        )
        self._forwarding: Forwarding | None = None
        if shared:
            self._forwarding = Forwarding(
                store, Presence(store, name, self.node, folder), self.states.stop_writing
            )
        self.records: AnswerRecords | None = None
        if shared:
            limits = RecordLimits(
                settings.window_s,
                settings.records_ms / 1000 if store.remote else 0.0,
                settings.window,
                settings.records_bytes_max,
                settings.records_total_bytes_max,
            )
            self.records = AnswerRecords(store, self.node, limits, self._read)
        writes = self.records is not None and self.records.is_writing
        self.window = FeedbackWindow(
            settings.window,
            settings.window_s,
            settings.window_bytes_max,
            forwarding=self._forwarding,
            keep=self.records.add if self.records is not None and writes else None,
            node=self.node,
        )

    def learner(
        self, application: str, text: str, models: Sequence[VersionedModel]
    ) -> tuple[Policy, Learner, FeedbackWindow | None]:
        """Return the policy, the learner and the join window of an application as it is now.

        The window is None for a query that names its models itself, and so belongs to no
        application.
        """
        policy = create_policy(text)
        learner = self.states.learner(application, text, policy, models)
        return policy, learner, self.window if application else None

    def enter(self, learn: Callable[[ForwardedFeedback], Reply]) -> None:
        """Register with the servers that share the store; they forward feedback about answers of
        this one.

        Call it before anything is written to the store. learn: applies forwarded feedback.
        Raises AlreadyExists when another running server has the same name, since its folder was
        copied.
        """
        if self._forwarding is not None:
            self._forwarding.start(learn)
        if self.records is not None:
            self.records.start()

    def replay(self) -> None:
        """Learn what was acknowledged and not yet written when the last server of this folder
        ended."""
        count = self.states.replay(self._read)
        if count:
            _log.info("replayed %d feedbacks from the journal", count)

    def start_without_store(self) -> None:
        """Start while the store is away: until resume(), what is learned stays in the journal."""
        self.states.start_without_store()

    def resume(self) -> None:
        """Resume once the store is reachable. Raises StoreError when it is unreachable again."""
        count = self.states.resume(self._read)
        _log.info("what was learned is there; %d feedbacks came from the journal", count)

    def _read(self, record: bytes) -> tuple[Learner, str, Seen] | None:
        try:
            application, text, models, user, seen = read(record)
            policy = create_policy(text)
        except (ValueError, ClipperError) as error:
            _log.error("a record of the journal cannot be replayed: %s", error)
            return None
        return self.states.learner(application, text, policy, models), user, seen

    def stats(self) -> FeedbackStats:
        """Return the size of the journal, and the number of answers that await feedback."""
        journal = self.journal
        return {
            "waiting": len(self.window),
            "journal_bytes": journal.nbytes,
            "journal_records": journal.last,
        }

    def health(self) -> list[Health]:
        """Return the states of the threads that were started."""
        records = [] if self.records is None else self.records.health()
        return [*self.states.health(), *records]

    def close(self) -> None:
        """Write what is not written yet, and stop. An error of one step does not stop the next."""
        with contextlib.ExitStack() as stack:
            if self._file is not None:
                stack.callback(self._file.close)
            stack.callback(self.states.close)
            stack.callback(self.window.close)
            if self._forwarding is not None:
                stack.callback(self._forwarding.close)
                stack.callback(self._leave_answers)
                stack.callback(self._forwarding.stop)

    def _leave_answers(self) -> None:
        if self.records is not None and (count := self.records.leave(self.window)):
            _log.info("feedback about %d answers of this server can be sent to others", count)


def _name_in(folder: Path | None) -> str:
    """Return this server's name among those that share a store. It is kept in its folder, since its
    numbers are its journal's; another at each start if nothing keeps the journal."""
    if folder is None:
        return secrets.token_hex(8)
    path = folder / "node"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_private(path, f"{secrets.token_hex(8)}\n".encode())
        name = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _no_name(path, getattr(error, "strerror", None) or "it is no text") from None
    if _NAME.fullmatch(name) is None:
        raise _no_name(path, "it is no name")
    return name


def _no_name(path: Path, why: str) -> ConfigError:
    hint = (
        "Restore it. Or remove it together with the folder `journal`: feedback that the store lacks"
        " is lost then."
    )
    return ConfigError(f"this server's name {path} cannot be read: {why}.", hint=hint)
