"""Off-policy evaluation of an application: what another policy would have achieved on its feedback.

The journal keeps each feedback with the choice that was made and its probability
(`serving/feedback/journal_records.py`); `selection/learning/off_policy.py` estimates from that.
Reading the journal does not disturb the server that writes it.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from clipper.errors import NotAllowed
from clipper.selection import Observation, create_policy
from clipper.selection.learning.batch_learning import ObservationRows
from clipper.selection.learning.off_policy import Evaluation, evaluate
from clipper.serving.feedback.journal_records import read_with_time
from clipper.store.journal import read_journal
from clipper.types import VersionedModel

QUERIES_MAX = 100_000  # of the log that are used by default, newest first


def evaluate_policy(
    records: Iterable[bytes],
    application: str,
    policy: str,
    queries_max: int = QUERIES_MAX,
    since: float = 0.0,
) -> Evaluation:
    """Estimate what `policy` would have achieved on an application's logged feedback.

    records: of the journal, oldest first.  policy: its name, with settings if any, as for `app()`.
    queries_max: the newest so many feedbacks are used.  since: Unix time in seconds; older feedback
    is not used.  The policy chooses from the models that the
    application had at its last feedback; older feedback for others is skipped. Takes 20 to 150 us
    for each feedback. Raises InvalidInput for an unknown policy, NotAllowed where the log does not
    allow an estimate, with the reason.
    """
    chosen = create_policy(policy)
    log: deque[Observation] = deque(maxlen=queries_max)
    models: tuple[VersionedModel, ...] = ()
    for those, seen in _observations(records, application, since):
        models = those
        log.append(seen)
    if not log:
        when = f" since {time.strftime('%F %T', time.localtime(since))}" if since > 0 else ""
        raise NotAllowed(
            f"the journal holds no feedback for application {application!r}{when}.",
            hint="Send feedback first: clipper feedback, app.feedback() or POST .../feedback.",
        )
    return evaluate(chosen, models, log)


def evaluate_journal(
    folder: Path,
    application: str,
    policy: str,
    queries_max: int = QUERIES_MAX,
    since: float = 0.0,
) -> Evaluation:
    """Do the same for the journal in a server's state folder, whether or not the server runs."""
    journal = folder / "journal"
    if not journal.is_dir():
        raise NotAllowed(
            f"{folder} has no journal of feedback.",
            hint="Name the server's state folder (server.state): clipper evaluate --folder DIR.",
        )
    return evaluate_policy(read_journal(journal), application, policy, queries_max, since)


def _observations(
    records: Iterable[bytes], application: str, since: float
) -> Iterator[tuple[tuple[VersionedModel, ...], Observation]]:
    """Yield the observations of one application, each with the models that it had then."""
    for record in records:
        try:
            (name, _, models, _, seen), time_us = read_with_time(record)
        except ValueError:  # damaged, or of another version
            continue
        if name != application or time_us < since * 1e6:
            continue
        if isinstance(seen, ObservationRows):
            for i in range(len(seen)):
                yield models, seen.observation(i)
        else:
            yield models, seen
