"""The course of the demo, from its banner to its summary."""

import json
import logging
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from clipper.config import load as load_config
from clipper.errors import DeployFailed
from clipper.keys import Keys
from clipper.load.chart_png import check_matplotlib
from clipper.server import ClipperServer
from clipper_demo import digits, live, picture, plot
from clipper_demo.faults import FaultInjector, InjectedFault
from clipper_demo.load import RATE_MAX, DemoLoad
from clipper_demo.online_learning import OnlineLearning, Story
from clipper_demo.report import DemoReport, Sample, between

SLO_MS = 50.0
SECONDS_UNATTENDED = 10.0
ACCURACY_MIN = 0.5  # a lower accuracy means that something is broken
LEARNERS = ("exp3", "stacking")  # applications and policies
LEARNERS_SLO_MS = 250.0
FEEDBACK_RATE_MAX = 100.0
_LINE_S = 1.0
_TICK_S = 0.02
_CHECK_S = 0.5
_READINGS = 6  # samples behind the live figures: the last 3 s
_RATE_STEP = 1.25
_SWITCH_S = 0.0005  # so that drawing does not delay the load's thread by 5 ms


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options. seconds: None for 10 without a terminal, and until `q` with one. rate: queries
    per second. state: folder that stores the models, or empty. json: print the summary as JSON
    on stdout, the rest on stderr. version: for the banner. plot: PNG to write at the end, or
    empty.
    """

    seconds: float | None = None
    rate: float = 300.0
    state: str = ""
    json: bool = False
    version: str = ""
    plot: str = ""


def run(options: DemoOptions) -> int:
    """Run the demo; return 0, or 1 if nothing was answered or the accuracy is implausible.
    Raises: ClipperError.
    """
    logging.getLogger("clipper").addHandler(logging.NullHandler())  # the table shows the same
    if options.plot:
        check_matplotlib()
    console = Console(stderr=options.json, highlight=False)
    banner(console, options)
    scans = digits.load()
    config = load_config(state=options.state or None, restarts_max=1000, restart_ms_max=1000)
    with _interruptible(), _folder(options) as folder, ClipperServer(config).start() as server:
        spoiler = digits.Spoiler(folder)
        deploy(server, scans, console, spoiler)
        app = server.app(
            "digits", models=list(digits.GOOD), slo_ms=SLO_MS, default=-1, policy="ensemble"
        )
        learners = [
            server.app(
                name, models=list(digits.REPLICAS), slo_ms=LEARNERS_SLO_MS, default=-1, policy=name
            )
            for name in LEARNERS
        ]
        learning = OnlineLearning(
            learners, list(digits.REPLICAS), scans, min(options.rate, FEEDBACK_RATE_MAX)
        )
        demo = Demo(
            server, DemoLoad(app, scans, options.rate, SLO_MS), learning, spoiler, console, options
        )
        report = demo.go()
        if options.plot:
            picture.draw(learning.story, options.plot)
        summary(console, report, demo.faults.all, learning.story, options)
    return 0 if report.application.answered and report.application.accuracy >= ACCURACY_MIN else 1


def banner(console: Console, options: DemoOptions) -> None:
    """Print what the demo will do."""
    state = f"state in {options.state}" if options.state else "state in memory"
    console.print(Text.assemble(("\n clipper ", "bold"), (f"{options.version} · {state}", "dim")))
    console.print(
        " Five scikit-learn models of handwritten digits, each in processes of its own.\n"
        f" An application queries the three good ones and answers within {SLO_MS:g} ms by the\n"
        " vote of those that replied in time, or with its default if none did. Two others\n"
        " learn from feedback which model to query (exp3), and how to weigh all five (stacking).\n"
    )


def deploy(
    server: ClipperServer, scans: digits.Digits, console: Console, spoiler: digits.Spoiler
) -> None:
    """Train and deploy models that the state lacks; return when every replica has answered."""
    for name, replicas in digits.REPLICAS.items():
        if name in server.catalog.view.versions:
            console.print(Text(f" {name:<8}from the state", "dim"))
            continue
        started = time.perf_counter()
        estimator = digits.train(name, scans)
        score = estimator.score(scans.held_x, scans.held_y)
        server.deploy(
            name, digits.spoilable(estimator, spoiler.flag(name)), replicas=replicas, wait=False
        )
        processes = f"{replicas} process{'es' if replicas > 1 else ''}"
        took = f"trained in {time.perf_counter() - started:.1f} s"
        console.print(
            Text.assemble(
                (f" {name:<8}", "bold"), (f"{took}, {score:.1%} right; {processes}", "dim")
            )
        )
    started = time.perf_counter()
    wait_until_ready(server)
    patience_s = server.config.server.load_s
    for name in digits.REPLICAS:
        server.model(name).predict_many(scans.train_x[:32]).result(timeout=patience_s)
    console.print(Text(f" ready after {time.perf_counter() - started:.1f} s more", "dim"))


def wait_until_ready(server: ClipperServer) -> None:
    """Wait until every replica has answered."""
    until = time.monotonic() + server.config.server.load_s
    while True:
        waiting = [
            (model, replica)
            for model, counters in server.stats()["models"].items()
            for replica in counters["replicas"]
            if replica["state"] != "ready"
        ]
        if not waiting:
            return
        model, replica = waiting[0]
        if (
            replica["state"] == "failed"
            or replica.get("restart_count", 0) > 3
            or time.monotonic() > until
        ):
            lines = "\n".join(server.logs(model, replica["number"])[-20:])
            raise DeployFailed(
                f"container {model}/{replica['number']} does not come up. Its last lines:\n{lines}"
            )
        time.sleep(_TICK_S)


class Demo:
    """Load, learning, table, keys and faults together. Threads: one."""

    def __init__(
        self,
        server: ClipperServer,
        load: DemoLoad,
        learning: OnlineLearning,
        spoiler: digits.Spoiler,
        console: Console,
        options: DemoOptions,
    ) -> None:
        self.faults = FaultInjector(server, load.outcomes)
        self._learning = learning
        self._spoiler = spoiler
        self._shows_learning = True
        self._server = server
        self._load = load
        self._console = console
        self._seconds = options.seconds
        self._events: list[Text] = []
        self._readings: deque[Sample] = deque(maxlen=_READINGS + 1)
        self._started = 0.0
        self._attended = sys.stdin.isatty() and console.is_terminal

    def go(self) -> DemoReport:
        """Send queries until the time is over or the user quits; return the figures of the whole
        run.
        """
        if self._seconds is None and not self._attended:
            self._seconds = SECONDS_UNATTENDED
        self._started = time.monotonic()
        first = self._read()
        switch_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        self._load.start()
        self._learning.start()
        try:
            if self._attended:
                self._watch()
            else:
                assert self._seconds is not None
                self._console.print(
                    f" sending {self._load.rate:g} queries a second for {self._seconds:g} s\n"
                )
                self._play(self._seconds)
        except KeyboardInterrupt:
            pass
        finally:
            self._load.stop()
            self._learning.stop()
            self.faults.end()
            sys.setswitchinterval(switch_s)
        return self._between(first, self._read())

    def _play(self, seconds: float) -> None:
        """Without a user: spoil exp3's favourite model after a third of the time, mend it at
        half, and spoil the then favourite at three quarters.
        """
        printed_s = 0.0
        due_s = [seconds / 3, seconds / 2, seconds * 3 / 4]
        while (now := self._elapsed()) < seconds:
            time.sleep(_TICK_S)
            if due_s and now >= due_s[0]:
                due_s.pop(0)
                self._console.print(" ", self._spoil_or_mend(), sep="")
            if now >= printed_s + max(_LINE_S, seconds / 20):
                printed_s = now
                self._console.print(
                    f" {live.clock(now)}  {plot.line(self._learning.story)}", soft_wrap=True
                )
        self._console.print()

    def _spoil_or_mend(self) -> Text:
        """Spoil exp3's favourite model, or mend the spoiled one."""
        spoiled = [model for model in digits.REPLICAS if self._spoiler.is_spoiled(model)]
        for model in spoiled:
            self._spoiler.mend(model)
            self._learning.happened(f"{model} is right again", model, "m")
        if spoiled:
            return live.event_line(
                self._elapsed(), spoiled[0], " gives right labels again", "green"
            )
        model = self._learning.favourite()
        self._spoiler.spoil(model)
        self._learning.happened(f"{model} gives wrong labels", model, "d")
        return live.event_line(
            self._elapsed(), model, " gives wrong labels; exp3 queried it most", "red"
        )

    def _watch(self) -> None:
        with (
            Keys(sys.stdin) as keys,
            Live(console=self._console, auto_refresh=False, transient=True) as display,
        ):
            drawn = 0.0
            while self._seconds is None or self._elapsed() < self._seconds:
                if not self._handle_key(keys.pressed(_TICK_S)):
                    return
                happened = [live.happened(fault, self._elapsed()) for fault in self.faults.update()]
                self._events += happened
                if happened or self._elapsed() >= drawn + _CHECK_S:
                    drawn = self._elapsed()
                    self._readings.append(self._read())
                    display.update(self._screen(), refresh=True)

    def _handle_key(self, pressed: str) -> bool:
        """Handle a key; return False to quit."""
        for key in pressed:
            if key in "qQ":
                return False
            if key in "kKsS":
                fault = self.faults.kill() if key in "kK" else self.faults.freeze()
                nothing = Text("no container is ready", "yellow")
                self._events.append(live.happened(fault, self._elapsed()) if fault else nothing)
                if fault:
                    model = fault.container.partition(":")[0]
                    self._learning.happened(
                        f"{fault.container} {fault.kind}",
                        model,
                        "k" if fault.kind == "killed" else "s",
                    )
            elif key in "dD":
                self._events.append(self._spoil_or_mend())
            elif key in "vV":
                self._shows_learning = not self._shows_learning
            elif key in "+=":
                self._load.rate = min(self._load.rate * _RATE_STEP, RATE_MAX)
            elif key in "-_":
                self._load.rate = max(self._load.rate / _RATE_STEP, 1.0)
        return True

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _read(self) -> Sample:
        return Sample(self._elapsed(), self._server.stats(), self._load.outcomes.counts.copy())

    def _between(self, before: Sample, after: Sample) -> DemoReport:
        return between(before, after, self._load.outcomes, "digits", SLO_MS)

    def _screen(self) -> RenderableType:
        report = self._between(self._readings[0], self._readings[-1])
        learning_plot = plot.shares_plot(self._learning.story, self._elapsed())
        height = self._console.height
        return live.screen(
            report,
            round(self._load.rate),
            self._elapsed(),
            self._events,
            learning_plot,
            self._shows_learning,
            height,
        )


def summary(
    console: Console,
    report: DemoReport,
    faults: list[InjectedFault],
    story: Story,
    options: DemoOptions,
) -> None:
    """Print the summary."""
    if options.json:
        whole = {"version": options.version, "rate": options.rate, **report.as_dict()}
        learning = {
            app: {
                "answers": story.samples[-1].answers[app], "errors": story.samples[-1].errors[app],
                "shares": story.samples[-1].shares[app],
            }
            for app in story.applications
        }  # fmt: skip
        events = [asdict(event) for event in story.events]
        print(
            json.dumps(
                {
                    **whole,
                    "faults": [asdict(fault) for fault in faults],
                    "learning": learning,
                    "events": events,
                }
            )
        )
        return
    figures = report.application
    if options.plot:
        console.print(
            f" {options.plot}: the shares, the errors and what happened when, as a picture"
        )
    console.print(
        Text(
            f" {figures.answered} of {figures.sent} queries answered in {figures.seconds:.1f} s",
            "bold",
        )
    )
    console.print(live.models(report.models), live.application(report.application))
    console.print(Text(), plot.shares_plot(story, story.samples[-1].at_s), Text(), sep="\n")
    for fault in faults:
        what = (
            f"back after {fault.back_s:.2f} s; answers: {live.meanwhile(fault)}"
            if fault.over
            else "not back yet"
        )
        console.print(f" {fault.container} was {fault.kind}, {what}")
    console.print()


@contextmanager
def _folder(options: DemoOptions) -> Iterator[Path]:
    """Return the folder of flag files: beside the state, so that stored models find them."""
    if options.state:
        yield Path(options.state).absolute() / "demo"
        return
    with tempfile.TemporaryDirectory(prefix="clipper-demo-") as folder:
        yield Path(folder)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C: both end the demo gracefully."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
