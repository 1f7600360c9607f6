"""Models whose functions are coroutines: the event loop that runs them, and how a batch of theirs
is evaluated.

All coroutines of a container run in one event loop, in a thread of its own: clients that a model
opens in `load` belong to it, whichever connection a row comes from.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from dataclasses import replace
from typing import TypeVar

from clipper_container.errors import fails_call_only
from clipper_container.model import BorrowedModel, FunctionModel, Model, OneRowFailed, UserValue
from clipper_container.threads import KeptThread
from clipper_container.wire.frames import Rows
from clipper_container.worker.evaluation import Evaluator
from clipper_container.worker.named_tensors import RecordModel
from clipper_container.worker.outputs import InvalidOutput
from clipper_container.worker.parts import PARTS_MAX

CONCURRENCY = 128  # batches or rows at a time, if a model does not say
_T = TypeVar("_T")


class CoroutineLoop:
    """The event loop of a container's coroutines, in a thread of its own. Threads: any but its
    own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = KeptThread("clipper-async", self._run)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the loop call a function, and do not wait."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def run(self, coroutine: Coroutine[object, object, _T]) -> _T:
        """Run a coroutine to its end, and return its result. Raises what it raises."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            # the wait may have been interrupted
            future.cancel()
            raise

    def close(self) -> None:
        """End the loop and its thread."""
        self.call(self._loop.stop)
        if self._thread.join(10.0):
            self._loop.close()


def _function_of(model: Model) -> UserValue:
    """Return the function that the model calls for a batch."""
    if isinstance(model, FunctionModel):
        return model.inner
    return model.inner.predict_batch if isinstance(model, BorrowedModel) else model.predict_batch


def is_async(model: Model) -> bool:
    """Return whether the function of a model is a coroutine function or an async generator."""
    function = _function_of(model)
    # an object whose call is a coroutine function
    call = getattr(function, "__call__", None)  # noqa: B004
    return any(
        inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each)
        for each in (function, call)
    )


class AsyncModel(Model):
    """A model whose function is a coroutine function or an async generator.

    `begin` is awaited in `loop`, by as many batches at a time as are wanted. `predict_batch` waits
    for one: so the model can be warmed up, and served to a server that knows no concurrency.
    """

    def __init__(self, inner: Model, loop: CoroutineLoop) -> None:
        self.inner, self.loop = inner, loop
        self.input, self.output = inner.input, inner.output
        self.batch_max, self.sessions = inner.batch_max, inner.sessions
        self.fork, self.tables = inner.fork, inner.tables
        function = _function_of(inner)
        call = getattr(function, "__call__", None)  # noqa: B004
        self.gives_parts = inspect.isasyncgenfunction(function) or inspect.isasyncgenfunction(call)

    def load(self) -> None:
        """Load the model; its load() may be a coroutine."""

        async def load() -> None:
            returned: UserValue = self.inner.load()  # type: ignore[func-returns-value]
            if inspect.isawaitable(returned):
                await returned

        self.loop.run(load())

    def stream(self, *given: object) -> AsyncGenerator[object, None]:
        """Return the async generator of the parts of a batch."""
        made: AsyncGenerator[object, None] = self.inner.predict_batch(*given)
        return made

    async def begin(self, *given: object) -> UserValue:
        """Evaluate a batch; return what the model returned, or a generator of what it has yielded.

        given: the rows, and their sessions if the model takes them. Raises: what the model raises.
        """
        if not self.gives_parts:
            return await self.inner.predict_batch(*given)
        parts: list[object] = []
        async for part in self.stream(*given):
            if len(parts) == PARTS_MAX:
                raise InvalidOutput(f"the model gave more than {PARTS_MAX} parts for a batch.")
            parts.append(part)
        return _again(parts)

    def predict_batch(self, inputs: UserValue, *sessions: object) -> UserValue:
        """Evaluate one batch, and wait for it."""
        return self.loop.run(self.begin(inputs, *sessions))

    def correct(self, inputs: UserValue, labels: UserValue, sessions: UserValue) -> None:
        """Call the model's correct()."""
        self.inner.correct(inputs, labels, sessions)

    def accuracy(self) -> float | None:
        """Return the model's accuracy, if it reports one."""
        return self.inner.accuracy()

    @property
    def corrects(self) -> bool:
        """Return True if the model learns from feedback."""
        return self.inner.corrects


def async_model_of(model: Model) -> AsyncModel | None:
    """Return the async model that is served, also under an adapter; None for any other."""
    if isinstance(model, RecordModel):
        model = model.inner
    return model if isinstance(model, AsyncModel) else None


def _again(parts: list[object]) -> Iterator[object]:
    """Yield what an async generator has yielded."""
    yield from parts


class _Replayed(Model):
    """A model that returns or raises, call by call, what coroutines have returned or raised."""

    def __init__(self, served: Model, outcomes: list[object]) -> None:
        self.sessions = served.sessions
        self._outcomes = iter(outcomes)

    def predict_batch(self, inputs: UserValue, *sessions: object) -> UserValue:
        """Return or raise the next outcome."""
        outcome = next(self._outcomes)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


class AsyncEvaluator:
    """Evaluates batches of an async model, as `evaluator` does those of others. Threads: that of
    the event loop."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = replace(evaluator, pad=0)
        self._model: UserValue = evaluator.model

    async def run(self, rows: Rows) -> tuple[list[Rows], int]:
        """Predict the rows of a batch; return those of the reply, and the microseconds taken.

        Raises: PredictionFailed, UnicodeDecodeError.
        """
        started = time.perf_counter_ns()
        evaluator, n = self._evaluator, rows.n
        given: list[UserValue] = [evaluator.given(rows)]
        if evaluator.model.sessions:
            given.append(rows.sessions)
        if evaluator.row_by_row:
            outcomes = await self._each(given, n, one=True)
        else:
            outcomes = [await _outcome(self._model.begin(*given))]
            failed = outcomes[0]
            again = evaluator.retry_singly or isinstance(failed, OneRowFailed)
            if isinstance(failed, BaseException) and again and n > 1:
                outcomes += await self._each(given, n, one=False)
        replayed = replace(evaluator, model=_Replayed(evaluator.model, outcomes))
        outputs, _ = replayed.run(given[0], n, *given[1:])
        return outputs, (time.perf_counter_ns() - started) // 1000

    async def _each(self, given: list[UserValue], n: int, one: bool) -> list[object]:
        """Return the outcome of each row, given to the model as it is or as a batch of one."""
        begun = [
            _outcome(self._model.begin(*(part[i] if one else part[i : i + 1] for part in given)))
            for i in range(n)
        ]
        if n == 1:
            # it needs no task of its own
            return [await begun[0]]
        return await asyncio.gather(*begun)


async def _outcome(coroutine: Coroutine[object, object, object]) -> object:
    """Return what a coroutine returns, or the exception that it raises; a cancel is raised."""
    try:
        return await coroutine
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        if not fails_call_only(error):
            raise
        return error


class Places:
    """Counts what is under way in the event loop, so that another thread can wait for its end.
    Threads: any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = 0

    def __len__(self) -> int:
        """Return how many are under way."""
        return self._taken

    def take(self) -> None:
        """Count one more."""
        with self._changed:
            self._taken += 1

    def leave(self) -> None:
        """Count one less."""
        with self._changed:
            self._taken -= 1
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until none is under way, at most so long; return whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._taken, seconds)
