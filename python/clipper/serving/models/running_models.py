"""The engine of this node and the model versions that it serves: each a record of the catalog
beside its queue in the engine."""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ParamSpec

import msgspec
import numpy as np
from numpy.typing import NDArray

from clipper.errors import InvalidInput
from clipper.schema import Array, InvalidTensor, Records, Tensors
from clipper.serving.models.batch_cost import row_cost
from clipper.serving.models.containers import Seat
from clipper.serving.models.reads import Reads, Watches, ids_of
from clipper.settings.server import LimitSettings
from clipper.types import InputType, Model, VersionedModel
from clipper_core.cache.clock_cache import Similarity
from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model as CoreModel
from clipper_core.wire.prediction import register_record
from clipper_core.wire.record import RecordLayout

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_MODEL_SLO_US = 1_000_000  # of a query that names a model and no SLO


@dataclass(frozen=True, slots=True)
class Running:
    """A record of the catalog with its handle in the engine: a ResolvedModel."""

    model: Model
    core: CoreModel

    @property
    def record(self) -> Model:
        """The record of the catalog."""
        return self.model

    @property
    def is_on_demand(self) -> bool:
        """Return False: a deployment decides when its containers run."""
        return False

    @property
    def is_ready(self) -> bool:
        """Return True: nothing is loaded for a query."""
        return True

    def touch(self) -> None:
        """Do nothing: the engine counts its queries."""

    def admit(self, slo_us: int) -> None:
        """Do nothing: the engine admits its queries."""

    def reason(self) -> str:
        """Return an empty text: it is ready."""
        return ""


class RunningModels:
    """The models that this server runs, by version. Threads: any.

    engine_of: returns the engine for a model's name. on_cached: is called with the engine of each
    model whose predictions are cached. watching: returns the watcher of parameter rows, if any.
    """

    def __init__(
        self,
        engine_of: Callable[[str], Engine],
        limits: LimitSettings,
        on_cached: Callable[[Engine], None],
        watching: Callable[[], Watches | None] = lambda: None,
    ) -> None:
        self._engine_of = engine_of
        self._on_cached = on_cached
        self._limits = limits
        self._uids = itertools.count(1)
        self._guard = threading.Lock()
        self._running: dict[VersionedModel, Running] = {}
        self._watching = watching

    def __iter__(self) -> Iterator[Running]:
        return iter(tuple(self._running.values()))

    def get(self, wanted: VersionedModel) -> Running | None:
        """Return a running model; None when it does not run here."""
        return self._running.get(wanted)

    def ids(self) -> set[VersionedModel]:
        """Return the versions that run here."""
        return set(self._running)

    def ensure(self, model: Model) -> Running:
        """Return the running model of a record; make it if it is new."""
        with self._guard:
            running = self._running.get(model.id)
            if running is None:
                running = self._running[model.id] = Running(model, self._make(model))
            elif running.model != model:
                running = self._running[model.id] = Running(model, running.core)
            return running

    def unlisted(self, model: Model, lane_rows: int) -> CoreModel:
        """Return a core model that no list shows and its caller keeps: of the mesh, which has
        thousands."""
        return self._make(model, lane_rows, unlisted=True)

    def forget(self, wanted: VersionedModel) -> None:
        """Stop serving a model. Its queue stays with the engine, and gets no more queries."""
        with self._guard:
            gone = self._running.pop(wanted, None)
        watching = self._watching()
        if gone is not None and gone.core.watch is not None and watching is not None:
            watching.remove(gone.core.watch)

    def _make(self, model: Model, lane_rows: int = 0, unlisted: bool = False) -> CoreModel:
        output = InputType.parse(model.output)
        inputs = model.input.named
        reads = self._reads_of(model)
        engine = self._engine_of(model.name)
        cached = model.cache and (reads is not None or not (model.reads or model.tables))
        core = CoreModel(
            engine,
            str(model.id),
            next(self._uids),
            model.input.dtype,
            row_shape(model.input),
            slo_us=_MODEL_SLO_US,
            cached=cached,
            finite=model.finite,
            lane_rows=lane_rows or self._limits.queue_rows_max,
            lane_bytes_max=self._limits.queue_bytes_max,
            output="" if output.dtype == "any" else output.dtype,
            output_shape=None if output.variable or output.dtype == "any" else output.shape,
            similar=Similarity(**msgspec.structs.asdict(model.similar)) if model.similar else None,
            unlisted=unlisted,
            tensors=Tensors(inputs.specs, model.finite) if inputs is not None else None,
            outputs=output.named,
            output_record=record_number(output.named),
            cost=row_cost(model.batching, model.input),
            padded=model.batching.padded,
        )
        core.on_untyped = _infer
        if cached:
            self._on_cached(engine)
        watching = self._watching()
        if reads is not None and watching is not None:
            forget = lambda key, number: core.forget(key[0], key[1], number)  # noqa: E731
            core.watch = watching.watched(reads, model.tolerance, self._limits.followed_max, forget)
        return core

    def _reads_of(self, model: Model) -> Reads | None:
        """Return the rows that a model's predictions are made of, which end their time in the cache
        when they change. A model with tables that does not declare them is not cached.
        """
        if model.tables and model.cache and not model.reads:
            _log.info(
                "model %s has tables and does not declare which rows it reads: its predictions are"
                " not cached",
                model.id,
            )
        if not (model.reads and model.cache):
            return None
        try:
            if self._watching() is not None:
                return ids_of(model.reads)
            why = "This server has no tables."
        except InvalidInput as error:
            why = str(error)
        _log.warning("model %s reads tables, and its predictions are not cached: %s", model.id, why)
        return None

    def seat(self, running: Running) -> Seat:
        """Return the seat of a connecting container."""
        return Seat(
            running.core,
            InputType.parse(running.core.describe_input()),
            InputType.parse(running.model.output),
            running.model.batching,
        )


def record_number(outputs: Tensors | None) -> int:
    """Return the number by which the engine knows the records of a model's named outputs; 0
    without."""
    if outputs is None:
        return 0

    def open_many(rows: Array, offsets: NDArray[np.int64] | None) -> object:
        return outputs.unpack_many(rows if offsets is None else Records(rows, offsets))

    layout = RecordLayout(outputs.specs)
    return register_record(str(outputs), layout, _reader(outputs.unpack), _reader(open_many))


def _reader(unpack: Callable[_P, object]) -> Callable[_P, object]:
    """Return a reader of what a container sent: None for what is no record."""

    def read(*given: _P.args, **named: _P.kwargs) -> object:
        try:
            return unpack(*given, **named)
        except InvalidTensor as error:
            _log.warning("a container sent an output that cannot be read: %s", error)
            return None

    return read


def settle_input(core: CoreModel, input: InputType) -> None:
    """Give a model of type `any` the type of its rows, as a container stated it."""
    core.settle(input.dtype, row_shape(input), input.named)


def settle_output(core: CoreModel, output: InputType) -> None:
    """Give a model whose output is not known the named outputs that a container stated."""
    if output.named is not None and core.outputs is None:
        shape = None if output.variable else output.shape
        core.settle_output(output.dtype, shape, output.named, record_number(output.named))


def row_shape(input: InputType) -> tuple[int, ...]:
    """Return the engine's notation of a row's shape: (-1,) when numeric rows have lengths of their
    own."""
    if input.variable and input.dtype not in ("str", "bytes"):
        return (-1,)
    return input.shape


def _infer(value: object) -> tuple[str, tuple[int, ...]]:
    """Infer the type of a model that was not stated: that of its first input. Raises
    InvalidInput."""
    try:
        found = InputType.infer(value)
    except ValueError as error:
        raise InvalidInput(f"the input of this model: {error}") from None
    return found.dtype, row_shape(found)
