"""The policy `mixture`: all models, weighed in several ways, which are weighed by their success."""

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from clipper.selection.learning.learned_state import (
    DOUBT,
    LABEL_BITS,
    Array,
    LearnedState,
    calibrated,
    label_bit,
)
from clipper.selection.learning.learning_policy import LearningPolicy
from clipper.selection.learning.prediction_sets import LabelProbabilities
from clipper.selection.policies.class_probabilities import evidence_of, label_of
from clipper.selection.policies.experts import answer_of_labels
from clipper.selection.policy import (
    NO_ANSWER,
    Combined,
    Observation,
    Plan,
    Prediction,
    Predictions,
    Query,
    is_number,
    is_usable,
    sound_confidence,
)
from clipper.selection.votes import (
    Votes,
    combine,
    heaviest_kind,
    label_key,
    sorted_models,
    usable,
)
from clipper.types import VersionedModel
from clipper_core.learning import mixture
from clipper_core.learning.bandit import Rule, RuleKind
from clipper_core.learning.first_states import FirstStates
from clipper_core.learning.label_feedback import LabelVotes
from clipper_core.runtime.status import StatusError

COMPONENTS = [0, 1, 2, 3, 4, 5, 6, 10]  # columns of the last row: the components' weights
EQUAL_SUM = 8  # column of the last row: 0 until something was learned
FEATURES = 9  # column of the last row: length of the queries' context
FAVOURED = 15  # column of a model: the probability that it is the best one of this user
BY_CLASS = 16  # first column of the weights by label
SUMS = (5, 6, 9, 10, 13, 14)  # columns of a model's sums of squared gradients


class Mixture(LearningPolicy):
    """A mixture of logistic regressions on the votes: the recommended policy that queries all
    models.

    The components are the equal vote, a weight for each model, the same with the models' own
    confidence, and three with a further weight for each model and label, which differ in steps. A
    user's state has a seventh, in which one of the models is better for this user. An eighth weighs
    the class probabilities of models that report them (selection/policies/class_probabilities.py).
    Each answers with a probability for each label; the answer has the highest mean, by weights that
    follow how probable each component found the right labels. Nothing is to be set.

    Use it when feedback comes: models may differ by label, by user or by the query's context,
    report how sure they are or a probability for each label, become better or worse. Before the
    first feedback it is `ensemble`. It learns from labels, and from `correct=` and `score=` about
    the answer. Do not use it for numbers, which it averages without learning: `ridge` does; nor
    when querying all models costs too much: `bandit`.

    State: f64[K + 1, 16 + 6 B + 2 D], see clipper_core.learning.mixture; B is 8 to 64, above the
    hash of each label, and D the features of the context that the first feedback with one had. With
    class probabilities there are 2 + 2 B columns more.
    Cost: 0.5 us per query and 1 us per feedback for 5 models.
    Regret: the logarithmic loss exceeds that of any sequence of components with m changes by at
    most (m + 1) ln(8 / a) + 2 a T with a = 0.001. A component's own regret is O(sqrt(T)) against
    its best fixed weights.
    Source: Vovk 1990, "Aggregating strategies"; Herbster and Warmuth 1998, section 3, for changes;
    Duchi, Hazan and Singer 2011, section 1.1, and Chapelle and Li 2011, algorithm 3, for the steps;
    Wolpert 1992 for stacking; Genest and Zidek 1986, section 3, for class probabilities.
    """

    name = "mixture"
    averages = True

    def __init__(self) -> None:
        rule = Rule(RuleKind.MIXTURE)
        super().__init__(MixtureRows(), MixedVotes(rule), learn_mixture, rule)

    def init(
        self, models: Sequence[VersionedModel], prior: LearnedState | None = None
    ) -> LearnedState:
        """Return the initial state; with a prior a user's, whose best model may differ."""
        state = super().init(models, prior)
        if prior is None or not state.models:
            return state
        return msgspec.structs.replace(state, rows=mixture.of_user(state.rows))

    def first_states(self, models: tuple[VersionedModel, ...]) -> FirstStates:
        """Return what makes the state of users without an observation, as `init` does."""
        if type(self).init is not Mixture.init:
            return super().first_states(models)
        return FirstStates(models, self.init, LearnedState, self.rule)

    def initial_like(self, state: LearnedState) -> LearnedState:
        """Return an initial state with the same buckets and features, if the last row is sound."""
        initial = super().initial_like(state)
        if not state.models or not np.isfinite(state.rows[-1]).all():
            return initial
        buckets, features, pooled = mixture.shape(state.rows)
        rows = mixture.widened(initial.rows, buckets - 1, features, pooled)
        return msgspec.structs.replace(initial, rows=rows)

    def in_context(self, state: LearnedState, context: Sequence[float]) -> LearnedState:
        """Return the state with the weights of the votes as they are in this context."""
        if not context or not state.models:
            return state
        return msgspec.structs.replace(state, rows=mixture.in_context(state.rows, context))


class MixtureRows:
    """Maintains a mixture's rows while models come and go. Threads: any.

    The last row belongs to what the models share, and stays when they change.
    """

    per_model = True  # a damaged row of a state with few labels is reset alone

    def initial(self, k: int) -> Array:
        """Return the rows of an equal vote."""
        return mixture.initial(k) if k else mixture.initial(1)[1:]

    def insert(self, rows: Array, at: int) -> Array:
        """Add a model with the mean weights of the others, without evidence."""
        k = len(rows) - 1
        if k == 0:
            return mixture.initial(1)
        row = rows[:k].mean(axis=0)
        row[list(SUMS)] = 0.0
        row[BY_CLASS + 1 :: 2] = 0.0
        return _even(np.insert(rows, at, row, axis=0))

    def delete(self, rows: Array, at: int) -> Array:
        """Delete a model's row."""
        return _even(np.delete(rows, at, axis=0))

    def reorder(self, rows: Array, order: Sequence[int]) -> Array:
        """Permute the models' rows."""
        return rows[[*order, len(rows) - 1]]

    def limited(self, rows: Array, counts: float) -> Array:
        """Scale the sums of squared gradients that stand for more uncertain observations."""
        return mixture.limited(rows, counts) if len(rows) > 1 else rows

    def faded(self, rows: Array, share: Array) -> Array:
        """Scale the sums of squared gradients, so that the next steps are larger."""
        rows = rows.copy()
        rows[:-1, list(SUMS)] *= share[:, None]
        rows[:-1, BY_CLASS + 1 :: 2] *= share[:, None]
        return rows

    def merged(self, base: Array, mine: Array, theirs: Array) -> Array:
        """Add both servers' differences to `base`; multiply the changes of probabilities."""
        shapes = [mixture.shape(rows) for rows in (base, mine, theirs)]
        buckets, features, pooled = map(max, zip(*shapes, strict=True))
        if any(found not in (0, features) for _, found, _ in shapes):
            return mine  # they learned contexts that do not go together
        base, mine, theirs = (
            mixture.widened(rows, buckets - 1, features, pooled) for rows in (base, mine, theirs)
        )
        rows = mine + theirs - base
        rows[:-1, 0] = rows[:-1, 0].clip(0.0, 20.0)
        rows[:-1, list(SUMS)] = rows[:-1, list(SUMS)].clip(0.0)
        rows[:, BY_CLASS + 1 :: 2] = rows[:, BY_CLASS + 1 :: 2].clip(0.0)
        rows[-1, EQUAL_SUM - 1 :][:2] = rows[-1, EQUAL_SUM - 1 :][:2].clip((0.01, 0.0))
        rows[-1, FEATURES] = features
        for part in ((-1, COMPONENTS), np.s_[:-1, FAVOURED]):
            found = mine[part] * theirs[part] / base[part].clip(1e-9)
            rows[part] = found / found.sum() if found.sum() > 0 else mine[part]
        return rows

    def parse(self, numbers: Array, k: int) -> Array:
        """Reshape stored numbers. Raises ValueError unless they are rows of a mixture."""
        rows = numbers.reshape(k + 1, -1)
        if k:
            try:
                mixture.shape(rows)
            except StatusError as error:
                raise ValueError(str(error)) from None
        return rows

    def standing(self, state: LearnedState) -> Array:
        """Return the weight of each model's vote."""
        return mixture.weights(state.rows)


def _even(rows: Array) -> Array:
    """Let the probabilities of the models' being a user's best add up to 1 again."""
    total = rows[:-1, FAVOURED].sum()
    rows[:-1, FAVOURED] = rows[:-1, FAVOURED] / total if total > 0 else 1 / max(len(rows) - 1, 1)
    return rows


class MixedVotes:
    """Queries all models and answers with the most probable label of the mixture. Threads: any.

    Numbers are averaged with equal weights.
    """

    random = False

    def __init__(self, rule: Rule) -> None:
        self._labels = LabelVotes(rule, DOUBT)

    def select(
        self, state: LearnedState, query: Query, candidates: Sequence[VersionedModel]
    ) -> Plan:
        """Ask all candidates."""
        models = tuple(candidates)
        return Plan(
            models if models == state.models else sorted_models(models), features=query.features
        )

    def combine(
        self, state: LearnedState, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        """Return the most probable label; its confidence is calibrated."""
        if (answer := answer_of_labels(self._labels, state, arrived, missing)) is not None:
            return answer
        votes = usable(arrived)
        if not votes:
            return NO_ANSWER
        selected = len({*arrived, *missing})
        if selected == 1:
            ((model, only),) = votes.items()
            return Combined(only.output, sound_confidence(only.confidence), (model,))
        found = _mixed(state, votes, selected)
        if is_number(found.output) or is_untouched(state):
            return found
        return Combined(
            found.output, calibrated(state, found.confidence), found.used, found.agreement
        )

    def raw_confidence(
        self, state: LearnedState, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> tuple[object, float]:
        """Return the answer and its confidence before calibration."""
        votes = usable(arrived)
        if not votes:
            return None, 0.0
        found = _mixed(state, votes, len({*arrived, *missing}))
        return found.output, 0.0 if is_number(found.output) else found.confidence

    def probabilities(
        self, state: LearnedState, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> LabelProbabilities:
        """Return the mixture's probability of each label."""
        votes = {m: one for m, one in usable(arrived).items() if not is_number(one.output)}
        state = _with_models(state, votes)
        by_key, other = _probabilities(state, votes)
        return LabelProbabilities({key: (label_of(key), p) for key, p in by_key.items()}, other)

    def weights(
        self, state: LearnedState, models: set[VersionedModel]
    ) -> dict[VersionedModel, float]:
        """Return the weight of each vote; a model unknown to the state has the mean weight."""
        known = self.shares(state)
        found = {model: known.get(model, 1.0 / max(len(known), 1)) for model in models}
        return found if any(found.values()) else dict.fromkeys(models, 1.0)

    def shares(self, state: LearnedState) -> dict[VersionedModel, float]:
        """Return the weights of the models' votes."""
        if not state.models:
            return {}
        return dict(zip(state.models, mixture.weights(state.rows).tolist(), strict=True))


class Ballot:
    """The votes of one query, in the order of a state's models.

    codes: u32 numbers that are equal when the labels are, 0 without a vote.  cells: the labels'
    hashes, 0 to 63.  confidence: as reported, NaN without.  numbers: codes by label key.
    evidence, label_cells: of all labels of `numbers` (class_probabilities.py), and their hashes;
    None without class probabilities.
    """

    def __init__(self, state: LearnedState, votes: Votes, first: object = None) -> None:
        self.numbers: dict[object, int] = {} if first is None else {first: 1}
        self.codes, self.cells, self.confidence = [], [], []
        for model in state.models:
            one = votes.get(model)
            if one is None:
                self.codes.append(0)
                self.cells.append(0)
                self.confidence.append(math.nan)
                continue
            key = label_key(one.output)
            self.codes.append(self.numbers.setdefault(key, len(self.numbers) + 1))
            self.cells.append(cell_of(one.output))
            sure = one.confidence
            self.confidence.append(math.nan if sure is None else sound_confidence(sure))
        self.evidence = evidence_of(state.models, votes, self.numbers)
        self.label_cells = (
            None if self.evidence is None else [cell_of(label_of(key)) for key in self.numbers]
        )


def cell_of(label: object) -> int:
    """Return the hash of a label, 0 to 63; the same in every process."""
    if type(label) is int:
        return label % LABEL_BITS
    return max(label_bit(label).bit_length() - 1, 0)


def is_untouched(state: LearnedState) -> bool:
    """Return True if nothing was learned: the policy is an equal vote."""
    return bool(state.rows[-1, EQUAL_SUM] == 0.0)


def learn_mixture(
    state: LearnedState, observation: Observation, losses: Mapping[VersionedModel, float]
) -> Array:
    """Return the rows after a label, or after a score of the answer that was returned."""
    truth = observation.truth
    label = truth.label if truth.known else observation.answer
    if label is None or is_number(label):
        return state.rows
    votes: dict[VersionedModel, Prediction] = {
        model: one
        for model in state.models
        if (one := observation.predictions.get(model)) is not None
        and is_usable(one.output)
        and not is_number(one.output)
    }
    if not votes:
        return state.rows
    ballot, context = Ballot(state, votes, label_key(label)), observation.plan.features
    has_evidence = ballot.evidence is not None
    return mixture.learned(
        (
            mixture.widened(state.rows, 0, len(context), has_evidence)
            if context or has_evidence
            else state.rows
        ),
        ballot.codes,
        ballot.cells,
        ballot.confidence,
        max(state.classes, len(ballot.numbers)),
        1,
        cell_of(label),
        1.0 if truth.known else min(max(float(truth.score or 0.0), 0.0), 1.0),
        observation.weight,
        context,
        ballot.evidence,
        ballot.label_cells,
    )


def _mixed(state: LearnedState, votes: Votes, selected: int) -> Combined:
    """Return the answer with the mixture's probability as its confidence."""
    even = dict.fromkeys(votes, 1.0)
    kind, chosen = heaviest_kind(votes, even)
    if kind != "label" or is_untouched(state) or not state.models:
        return combine(votes, even, selected)
    state = _with_models(state, chosen)
    by_key, _ = _probabilities(state, chosen)
    weights = dict(zip(state.models, mixture.weights(state.rows).tolist(), strict=True))
    winner = _most_probable(chosen, by_key)
    agreeing = sum(
        weights[model] for model, one in chosen.items() if label_key(one.output) == winner
    )
    outputs = [one.output for one in chosen.values() if label_key(one.output) == winner]
    output = outputs[0] if outputs else label_of(winner)
    total = sum(weights.values()) * selected / max(len(state.models), 1)
    return Combined(
        output, min(by_key[winner], 1.0), tuple(chosen), min(agreeing / (total or 1.0), 1.0)
    )


def _probabilities(state: LearnedState, votes: Votes) -> tuple[dict[object, float], float]:
    """Return the mixture's probability of each named label, by label key, and of each other."""
    ballot = Ballot(state, votes)
    p, other = mixture.tallied(
        state.rows,
        ballot.codes,
        ballot.cells,
        ballot.confidence,
        max(state.classes, len(ballot.numbers)) if ballot.evidence is not None else state.classes,
        ballot.evidence,
        ballot.label_cells,
    )
    return {key: float(p[code - 1]) for key, code in ballot.numbers.items()}, other


def _most_probable(votes: Votes, by_key: Mapping[object, float]) -> object:
    """Return the key of the most probable label; of equals the surer models', then the first."""
    top = max(by_key.values())
    sure: dict[object, float] = {}
    for one in votes.values():
        key = label_key(one.output)
        if by_key[key] >= top * (1 - 1e-12):
            sure[key] = sure.get(key, 0.0) + sound_confidence(one.confidence, unknown=0.5)
    return max(sure or by_key, key=lambda key: (sure or by_key)[key])


def _with_models(state: LearnedState, votes: Votes) -> LearnedState:
    """Return the state with a row for each model that voted."""
    rows_of, models, rows = MixtureRows(), state.models, state.rows
    for model in votes:
        if model not in models:
            models = sorted_models((*models, model))
            rows = rows_of.insert(rows, models.index(model))
    if models is state.models:
        return state
    return LearnedState(models, rows, state.seen, state.labels, state.sure, state.tracked)
