"""ApplicationHandle: the user's handle of an application."""

import numbers
from collections.abc import Callable, Sequence

from numpy.typing import ArrayLike

from clipper.errors import InvalidInput, ShuttingDown, UnknownApplication
from clipper.options import refusing_unknown_keywords
from clipper.schema import Tensors
from clipper.selection.learning.off_policy import Evaluation
from clipper.serving.feedback.evaluation import QUERIES_MAX, evaluate_policy
from clipper.serving.feedback.ground_truth import truth_of, user_of, weight_of
from clipper.serving.feedback.observe import Counted, observe, observe_many
from clipper.serving.query.arrays import ARRAY_SLO_MS, predict_array
from clipper.serving.query.parts import no_priority_of_parts, predict_parts
from clipper.serving.query.processor import ResolvedApplication, predict
from clipper.types import Answer, Answers, PartsFuture, UserValue
from clipper_core.application.application import ApplicationTable, QueryHandle
from clipper_core.engine.model import slo_of_ms
from clipper_core.results.future import Future

ID_CHARS_MAX = 512  # of a request's own id


class PythonQueries:
    """Schedules the queries of an application, and learns the feedback, that the core does not
    take. Threads: any."""

    __slots__ = ("_name", "_resolve", "_slo_ms_max")

    def __init__(
        self, name: str, resolved: Callable[[str], ResolvedApplication], slo_ms_max: float
    ) -> None:
        self._name = name
        self._resolve = resolved
        self._slo_ms_max = slo_ms_max

    def predict(
        self,
        x: UserValue,
        user: str | None,
        slo_ms: float | None,
        salt: int,
        context: UserValue,
        id: str,
        outputs: Sequence[str],
        priority: int | None,
    ) -> Future:
        """Schedule a query with these arguments of `ApplicationHandle.predict`."""
        resolved = self._resolve(self._name)
        slo_us = resolved.slo_us if slo_ms is None else slo_in_us(slo_ms, self._slo_ms_max)
        own = request_id(id) if id else ""
        band = resolved.band(priority)
        return predict(resolved, x, user, slo_us, salt, context, own, tuple(outputs), band)

    def predict_parts(
        self,
        x: UserValue,
        user: str | None,
        slo_ms: float | None,
        salt: int,
        context: UserValue,
        id: str,
        outputs: Sequence[str],
        stream: bool,
        part_slo_ms: float | None,
        slo_total_ms: float | None,
        priority: int | None,
    ) -> PartsFuture:
        """Schedule a query that is answered in parts, with these arguments of
        `ApplicationHandle.predict`."""
        if not stream:
            raise InvalidInput("part_slo_ms and slo_total_ms are for queries with stream=True.")
        if priority is not None:
            raise no_priority_of_parts()
        resolved = self._resolve(self._name)
        slo_us = resolved.slo_us if slo_ms is None else slo_in_us(slo_ms, self._slo_ms_max)
        for limit_ms in (part_slo_ms, slo_total_ms):
            if limit_ms is not None:
                slo_in_us(limit_ms, self._slo_ms_max)
        own = request_id(id) if id else ""
        return predict_parts(
            resolved,
            x,
            user,
            slo_us,
            salt,
            context,
            own,
            tuple(outputs),
            part_slo_ms,
            slo_total_ms,
        )

    def feedback(
        self,
        prediction: str | Answer | None,
        label: object,
        correct: bool | None,
        score: float | None,
        input: object,
        user: str | None,
        weight: float,
        context: object,
    ) -> bool:
        """Learn feedback with these arguments of `ApplicationHandle.feedback`."""
        resolved = self._resolve(self._name)
        truth = truth_of(label, correct, score)
        return observe(resolved, prediction, input, user, truth, weight_of(weight), context)


@refusing_unknown_keywords
class ApplicationHandle(QueryHandle):
    """An application by name; it follows every change of its record. Threads: any."""

    __slots__ = ("_resolve", "_slo_ms_max")

    def __init__(
        self,
        name: str,
        resolved: Callable[[str], ResolvedApplication],
        table: ApplicationTable,
        slo_ms_max: float,
    ) -> None:
        super().__init__(name, table, slo_ms_max, PythonQueries(name, resolved, slo_ms_max))
        self._resolve = resolved
        self._slo_ms_max = slo_ms_max

    @property
    def tensors(self) -> Tensors | None:
        """The named tensors that an input has; None for one without a name, and while they or the
        application are unknown.
        """
        try:
            cores = self._resolve(self.name).cores.values()
        except (UnknownApplication, ShuttingDown):  # which a query says
            return None
        return next((core.tensors for core in cores if core.tensors is not None), None)

    def feedback_many(
        self,
        predictions: Sequence[str | Answer] | Answers,
        labels: Sequence[object],
        rows: ArrayLike | None = None,
    ) -> Counted:
        """Learn the right outputs of many predictions, which are written to the journal together.

        predictions: a list of `Answer`s or their ids; or the `Answers` of an array, which costs far
        less: then labels is an array too, a label a row.  rows: of `Answers`, the places of the
        rows that `labels` are of; all if not given. Returns how many counted, how many had feedback
        before, and how many are about predictions that are not known any more or that no model
        made. Raises InvalidInput, Overloaded, StoreError: then all may be sent again, and what was
        written counts once. Feedback about answers of other servers on this store is sent to those;
        about an array only to its own server. Threads: any.
        """
        return observe_many(self._resolve(self.name), predictions, labels, rows)

    def shares(self, user: str | None = None) -> dict[str, float]:
        """Return the weights that the policy has learned, by `name:version`; they sum to 1.

        A weight is a model's share of the queries if the policy selects one model, else of the
        answer. Empty for a policy that does not learn. Threads: any.
        """
        return shares_of(self._resolve(self.name), user_of(user))

    def evaluate(
        self, policy: str, queries_max: int = QUERIES_MAX, since: float = 0.0
    ) -> Evaluation:
        """Estimate the accuracy that another policy would have had on the logged feedback.

        policy: as for `app(policy=...)`.  queries_max: the newest so many feedbacks are used.
        since: Unix time in seconds; older feedback is not used. It reads the journal, so the server
        needs a state folder, and takes 20 to 150 us of this thread for each feedback. Raises
        InvalidInput for an unknown policy, NotAllowed where the log allows no estimate (for example
        since choices were made without randomness). Threads: any.
        """
        journal = self._resolve(self.name).learner.states.journal
        records = (record for _, record in journal.replay())
        return evaluate_policy(records, self.name, policy, queries_max, since)

    def predict_many(
        self,
        inputs: object,
        user: str | None = None,
        slo_ms: float | None = None,
        salt: int = 0,
        outputs: Sequence[str] = (),
        priority: int | None = None,
    ) -> Future:
        """Schedule an array of queries and return the Future of their `Answers`, with a row for
        each.

        inputs: an array of shape (n, *shape), or a sequence of inputs; of named tensors a dict of
        these, or a sequence of dicts.  outputs: of named outputs only these.  priority: 1, the
        highest, to 3, of all rows, instead of the application's.  slo_ms: by when all
        rows are answered, by the models or the default; 60 s if not given, whatever a single
        query's SLO is. The call returns once all rows are queued: at once for as many as the queue
        of arrays holds (limits.queue_bytes_max), else as room appears. Raises what `predict`
        raises, before the first row is submitted. No rows have no answers.
        """
        resolved = self._resolve(self.name)
        slo_us = array_slo_in_us(slo_ms, self._slo_ms_max)
        band = resolved.band(priority)
        return predict_array(resolved, inputs, user, slo_us, salt, tuple(outputs), band)

    def __repr__(self) -> str:
        try:
            resolved = self._resolve(self.name)
        except (UnknownApplication, ShuttingDown) as error:
            return f"<Application {self.name}: {error.message}>"
        models = ", ".join(map(str, resolved.models))
        return (
            f"<Application {self.name}: {models} by {resolved.policy.name}, SLO"
            f" {resolved.slo_us / 1000:g} ms>"
        )


def shares_of(resolved: ResolvedApplication, user: str | None = None) -> dict[str, float]:
    """Return the weights that an application's policy has learned, by `name:version`."""
    portions = getattr(resolved.policy, "portions", None)
    if portions is None:
        return {}
    return {str(model): share for model, share in portions(resolved.learner.state(user)).items()}


def slo_in_us(slo_ms: float, slo_ms_max: float) -> int:
    """Convert an SLO to microseconds. Raises InvalidInput when it is out of range."""
    is_number = isinstance(slo_ms, numbers.Real) and not isinstance(slo_ms, bool)
    if not (is_number and 0 < slo_ms <= slo_ms_max):
        raise InvalidInput(
            f"slo_ms={slo_ms!r:.100}: it must lie above 0 and at most at {slo_ms_max:g} ms.",
            hint="See limits.slo_ms_max.",
        )
    return max(1, round(slo_ms * 1000))


def model_slo_in_us(slo_ms: float | None, otherwise_us: int) -> int:
    """Convert the SLO of a query to one model, which no setting limits, to microseconds; None:
    otherwise_us. Raises InvalidInput."""
    return slo_of_ms(slo_ms, otherwise_us)


def request_id(id: object) -> str:
    """Check the id of a request, and return it. Raises InvalidInput."""
    if not isinstance(id, str):
        raise InvalidInput(f"id={id!r:.100}: a request's id is a str, not a {type(id).__name__}.")
    if not fits_id(id):
        why = (
            f"has {len(id)} characters"
            if len(id) > ID_CHARS_MAX
            else "has characters that cannot be printed"
        )
        raise InvalidInput(
            f"the request's id {id[:40]!r} {why}.",
            hint=f"Give up to {ID_CHARS_MAX} printable characters.",
        )
    return id


def fits_id(id: str) -> bool:
    """Return whether a string can be the id of a request."""
    return len(id) <= ID_CHARS_MAX and id.isprintable()


def array_slo_in_us(slo_ms: float | None, slo_ms_max: float) -> int:
    """Return the SLO of an array in microseconds; None: ARRAY_SLO_MS. Raises InvalidInput."""
    return slo_in_us(min(ARRAY_SLO_MS, slo_ms_max) if slo_ms is None else slo_ms, slo_ms_max)
