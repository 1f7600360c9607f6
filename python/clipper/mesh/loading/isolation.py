"""Isolation of models that may have ended their host, each in a host of its own.

A host that holds many models cannot tell which one ended it, only which were at work. Each of these
is loaded into a host that holds nothing else, and its unanswered queries are sent there again. If
that host ends as well, the model was the cause, and its load has failed. Otherwise the model goes
back after a while. Threads: all on the event loop of the node.
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

from clipper.mesh.loading.model_host import SupervisedHost
from clipper.mesh.transport.channel import RequestFailed

ALONE_MAX: Final = 4  # hosts that hold one model; more suspects wait
SUSPECTS_MAX: Final = 4096  # latest suspects that are remembered
PROBATION_S: Final = 30.0  # doubled each further time
TIMES_MAX: Final = 8  # longest probation: after this many doublings


@dataclass(slots=True)
class _Suspect:
    times: int = 0
    is_alone: bool = False  # to be loaded into a host of its own
    host: SupervisedHost | None = None


class Isolation:
    """Places suspected models in hosts of their own.

    start: starts a host with a name, and returns it when it is ready; RequestFailed. acquit: called
    with a model and its host when its probation ends; the model is then to be loaded elsewhere, and
    `release` to be called. It returns False while the model is not loaded in that host: it is
    called again then, after as long a time.
    """

    def __init__(
        self,
        start: Callable[[str], Awaitable[SupervisedHost]],
        acquit: Callable[[str, SupervisedHost], bool],
    ) -> None:
        self._start, self._acquit = start, acquit
        self._suspects: OrderedDict[str, _Suspect] = OrderedDict()
        self._places = asyncio.Semaphore(ALONE_MAX)
        self._numbers = itertools.count()

    def is_suspect(self, model: str) -> bool:
        """Return whether the model is to be held alone."""
        suspect = self._suspects.get(model)
        return suspect is not None and suspect.is_alone

    def is_alone_in(self, host: SupervisedHost) -> bool:
        """Return whether the host is one of those that hold one model."""
        return any(suspect.host is host for suspect in self._suspects.values())

    def suspect(self, models: Iterable[str]) -> None:
        """Suspect the models that were at work when a host ended."""
        for model in models:
            suspect = self._suspects.setdefault(model, _Suspect())
            self._suspects.move_to_end(model)
            suspect.times += not suspect.is_alone
            suspect.is_alone = True
        for model in [model for model, one in self._suspects.items() if one.host is None][
            : -SUSPECTS_MAX or None
        ]:
            del self._suspects[model]

    async def host_of(self, model: str, wait_s: float) -> SupervisedHost:
        """Return a host that holds nothing but the model.

        RequestFailed when it does not start, or no place is free in time.
        """
        suspect = self._suspects.setdefault(model, _Suspect(1, True))
        if suspect.host is not None:
            return suspect.host
        try:
            async with asyncio.timeout(wait_s):
                await self._places.acquire()
        except TimeoutError:
            raise RequestFailed(
                f"{ALONE_MAX} models are held alone already, as many as may", "none"
            ) from None
        try:
            host = suspect.host = await self._start(f"alone-{next(self._numbers)}")
        except BaseException:
            self._places.release()
            raise
        probation_s = PROBATION_S * 2.0 ** (min(suspect.times, TIMES_MAX) - 1)
        self._start_probation(model, host, probation_s)
        return host

    def _start_probation(self, model: str, host: SupervisedHost, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, self._end_probation, model, host, seconds)

    def _end_probation(self, model: str, host: SupervisedHost, seconds: float) -> None:
        suspect = self._suspects.get(model)
        if suspect is None or suspect.host is not host:
            return
        if self._acquit(model, host):
            suspect.is_alone = False
        else:
            self._start_probation(model, host, seconds)

    async def release(self, model: str) -> None:
        """Stop the model's own host, if it has one."""
        suspect = self._suspects.get(model)
        if suspect is None or suspect.host is None:
            return
        host, suspect.host, suspect.is_alone = suspect.host, None, False
        try:
            await host.stop()
        finally:
            self._places.release()

    async def close(self) -> None:
        """Stop all hosts."""
        await asyncio.gather(
            *(
                self.release(model)
                for model, suspect in tuple(self._suspects.items())
                if suspect.host
            )
        )
