"""The verbs of `clipper` that talk to a running server, each that of `clipper.connect`; `-o json` prints what it returns."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from clipper.errors import ClipperError, InvalidInput

_SETTINGS = ("slo_ms", "policy", "confidence_min", "input", "decider", "missing", "coverage")


def _connected(url: str | None, token: str | None) -> Any:
    """The server of --url or CLIPPER_URL, else the one of ./clipper.toml's state, else the only one."""
    from clipper.config import load
    from clipper.manage.client import connect

    state = ""
    if not url and not os.environ.get("CLIPPER_URL"):
        file = Path("clipper.toml")
        state = load(file if file.exists() else None).server.state
    return connect(url, token, state=state)


class Asking:
    """What all verbs share: whom to ask, and how to print what comes back."""

    def __init__(self, url: str | None, token: str | None, output: str) -> None:
        self.as_json = output == "json"
        self._url, self._token = url, token

    @property
    def server(self) -> Any:
        return _connected(self._url, self._token)

    def show(self, value: Any, text: Callable[[], str]) -> None:
        click.echo(json.dumps(value, indent=2) if self.as_json else text())

    def show_change(self, change: dict[str, Any]) -> None:
        self.show(change, lambda: "\n".join(_change_lines(change)))


def _talks(verb: Callable[..., None]) -> Callable[..., None]:
    """Adds --url, --token and -o to a verb, which gets an Asking for them."""

    def asked(url: str | None, token: str | None, output: str, **words: Any) -> None:
        verb(Asking(url, token, output), **words)

    asked.__doc__, asked.__name__ = verb.__doc__, verb.__name__
    asked.__click_params__ = getattr(verb, "__click_params__", [])  # type: ignore[attr-defined]
    for option in (
        click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="How to print."),
        click.option("--token", metavar="TOKEN", help="http.token of the server.  [CLIPPER_ADMIN_TOKEN]"),
        click.option("--url", metavar="URL", help="Where it is managed.  [CLIPPER_URL; else the one that runs here]"),
    ):
        asked = option(asked)
    return asked


_dry = click.option("--dry-run", is_flag=True, help="Check, say what would change, and change nothing.")


# -- printing


def _change_lines(change: dict[str, Any]) -> Iterable[str]:
    yield f"{'would be: ' if change['dry_run'] else ''}{change['said']}"
    for one in change["changed"]:
        before, after = one["before"], one["after"]
        if isinstance(before, dict) and isinstance(after, dict):
            keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
            yield from (f"  {one['key']}: {key} {_short(before.get(key))} -> {_short(after.get(key))}" for key in keys)
        else:
            yield f"  {one['key']}: {'new' if before is None else 'gone' if after is None else 'changed'}"


def _short(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(one, dict) and set(one) == {"name", "version"} for one in value):
        value = [one["name"] if one["version"] is None else f"{one['name']}:{one['version']}" for one in value]
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _table(rows: Sequence[Sequence[Any]], empty: str) -> str:
    if len(rows) < 2:
        return empty
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)


def _read_json(text: str, what: str) -> Any:
    """A value as JSON; a word that is none is itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        if text[:1] in "[{":
            raise InvalidInput(f"{what} {text[:60]!r} is no JSON.", hint="Quote it for the shell: '[1, 2, 3]'.") from None
        return text


def _bounds(text: str) -> int | tuple[int, int]:
    least, dash, most = text.partition("-")
    if not (least.isdecimal() and (most.isdecimal() if dash else True)):
        raise InvalidInput(f"replicas {text!r}: a number or two of them.", hint="Write 2, or 1-4 to follow the load.")
    return (int(least), int(most)) if dash else int(least)


# -- looking


@click.command(short_help="List models: versions, replicas, who asks them.")
@click.argument("name", required=False, default="")
@_talks
def models(ask: Asking, name: str) -> None:
    """Each version in service, of NAME alone or of all models. `*`: the one that NAME without a version means.

    \b
    clipper models
    clipper models svm -o json
    """
    rows = ask.server.models(name)
    head = ("MODEL", "", "INPUT", "REPLICAS", "ASKED BY", "WHAT")
    table = [
        (f"{row['name']}:{row['version']}", "*" if row["latest"] else "", row["input"], f"{row['has']}/{row['wanted']}",
         ",".join(row["applications"]) or "-", Path(row["target"]).name or "started elsewhere")
        for row in rows
    ]  # fmt: skip
    ask.show(rows, lambda: _table([head, *table], "no models. To add one: clipper deploy NAME module:function"))


@click.command(short_help="List applications.")
@_talks
def apps(ask: Asking) -> None:
    """Each application: whom it asks, by when, and what it answers otherwise.

    \b
    clipper apps
    """
    rows = ask.server.applications()
    head = ("APPLICATION", "INPUT", "MODELS", "SLO", "POLICY", "DEFAULT")
    table = [
        (row["name"], row["input"], ",".join(_cast(row)) or "-", f"{row['slo_ms']:g} ms", row["policy"], _short(row["default"]))
        for row in rows
    ]
    ask.show(rows, lambda: _table([head, *table], "no applications. To make one: clipper app set NAME --model MODEL"))


def _cast(row: dict[str, Any]) -> list[str]:
    return [f"{model} ({row['roles'][model]})" if model in row["roles"] else model for model in row["models"]]


@click.command(short_help="Counters now.")
@_talks
def stats(ask: Asking) -> None:
    """Counters of models, applications, cache and loops now; as JSON they are complete.

    \b
    clipper stats -o json
    """
    said = ask.server.stats()
    models_ = [("MODEL", "REPLICAS", "QUEUED", "P50 ms", "P99 ms")] + [
        (name, f"{row['has']}/{row['wanted']}", row.get("queued", 0), *_quantiles(row.get("latency_us")))
        for name, row in said["models"].items()
    ]
    apps_ = [("APPLICATION", "QUERIES", "OK", "DEFAULTS")] + [
        (name, row.get("queries", 0), row["answers"].get("ok", 0), _total(row["answers"].get("default", {})))
        for name, row in said["applications"].items()
    ]
    ask.show(said, lambda: f"{_table(models_, 'no models')}\n\n{_table(apps_, 'no applications')}")


def _quantiles(histogram: Any) -> tuple[str, str]:
    found = histogram if isinstance(histogram, dict) else {}
    low, high = (f"{found[key] / 1000:.2f}" if key in found else "-" for key in ("p50", "p99"))
    return low, high


def _total(counts: Any) -> int:
    return sum(counts.values()) if isinstance(counts, dict) else int(counts)


@click.command()
@click.argument("model")
@click.option("--replica", type=click.IntRange(min=0), default=0, show_default=True, help="Which of its containers.")
@_talks
def logs(ask: Asking, model: str, replica: int) -> None:
    """The last lines that a container of MODEL wrote.

    \b
    clipper logs svm:2 --replica 1
    """
    lines = ask.server.logs(model, replica)
    ask.show(lines, lambda: "\n".join(lines) or f"{model}/{replica} has written nothing")


@click.command(short_help="Who changed what, and when.")
@click.option("-n", "--count", type=click.IntRange(min=1), default=20, show_default=True, help="So many, the last ones.")
@_talks
def history(ask: Asking, count: int) -> None:
    """Who changed what, and when; with -o json, each record before and after. The last 1000 changes are kept.

    \b
    clipper history -n 5
    """
    rows = ask.server.history(count)
    head = ("#", "WHEN", "WHO", "VERB", "WHAT")
    table = [
        (row["number"], time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time_us"] / 1e6)), row["actor"], row["verb"],
         ", ".join(one["key"] for one in row["changed"]))
        for row in rows
    ]  # fmt: skip
    ask.show(rows, lambda: _table([head, *table], "nothing has changed yet"))


# -- models


@click.command(short_help="Start a model, or a new version of one.")
@click.argument("name")
@click.argument("target")
@click.option("--version", type=click.IntRange(min=1), help="Its number.  [the next]")
@click.option("--replicas", metavar="N|LEAST-MOST", default="1", show_default=True, help="Containers; bounds follow the load.")
@click.option("--input", metavar="TYPE", default="", help="Of one row, as f64[64] or str.  [as the model says]")
@click.option("--batching", metavar="MODE", help="aimd, fit, quantile or static.  [the server's]")
@click.option("--code", metavar="DIR", multiple=True, help="A folder that the model imports from; several times if need be.")
@click.option("--trust", metavar="TYPE", multiple=True, help="A type that a .skops file may ask for.")
@click.option("--behind", is_flag=True, help="Do not make it the latest: promote does that.")
@click.option("--no-wait", is_flag=True, help="Do not wait until its containers are connected.")
@_dry
@_talks
def deploy(
    ask: Asking, name: str, target: str, version: int | None, replicas: str, input: str, batching: str | None,
    code: tuple[str, ...], trust: tuple[str, ...], behind: bool, no_wait: bool, dry_run: bool,
) -> None:  # fmt: skip
    """Serve TARGET as NAME: module:attribute on the server's host, or an .onnx or .skops file of this one.

    A module in this folder is found by a server on this host. The new version is the latest once it runs; what links
    NAME without a version then asks it.

    \b
    clipper deploy doubler doubler:double --input "f64[3]"
    clipper deploy svm svm.onnx --replicas 1-4 --behind
    """
    settings: dict[str, Any] = {"replicas": _bounds(replicas), "promote": not behind, "wait": not no_wait}
    settings |= {"version": version} if version else {}
    settings |= {"input": input} if input else {}
    settings |= {"batching": batching} if batching else {}
    settings |= {"trusted": trust} if trust else {}
    places = [str(Path(place).absolute()) for place in code] or _home_of(target)
    settings |= {"code": places} if places else {}
    if sys.stderr.isatty() and not dry_run and not no_wait:
        click.echo(f"deploying {name}: waiting for its containers", err=True)
    ask.show_change(ask.server.deploy(name, target, dry_run=dry_run, **settings))


def _home_of(target: str) -> list[str]:
    """This folder, if the module is in it."""
    top = Path(target.partition(":")[0].partition(".")[0])
    here = top.with_suffix(".py").is_file() or (top / "__init__.py").is_file()
    return [str(Path.cwd())] if ":" in target and here else []


@click.command(short_help="Make a version the latest.")
@click.argument("model", metavar="NAME:VERSION")
@click.option("--app", "application", metavar="APP", help="For this application alone: it links that very version.")
@_dry
@_talks
def promote(ask: Asking, model: str, application: str | None, dry_run: bool) -> None:
    """Make NAME:VERSION what NAME means, from the next query on, until another is deployed or promoted.

    \b
    clipper promote svm:2
    """
    ask.show_change(ask.server.promote(model, application, dry_run=dry_run))


@click.command(short_help="Go back to the version before.")
@click.argument("name")
@_dry
@_talks
def rollback(ask: Asking, name: str, dry_run: bool) -> None:
    """Make the version before NAME's latest the latest: the highest below it that is in service.

    \b
    clipper rollback svm
    """
    ask.show_change(ask.server.rollback(name, dry_run=dry_run))


@click.command(short_help="Change how many containers run a model.")
@click.argument("model")
@click.argument("replicas", metavar="N|LEAST-MOST")
@_dry
@_talks
def scale(ask: Asking, model: str, replicas: str, dry_run: bool) -> None:
    """Run N containers of MODEL, or as many of LEAST to MOST as the load asks for.

    \b
    clipper scale svm 2
    clipper scale svm:1 1-4
    """
    ask.show_change(ask.server.scale(model, _bounds(replicas), dry_run=dry_run))


@click.command(short_help="Take a version out of service for good.")
@click.argument("model")
@click.option("--force", is_flag=True, help="Even if an application asks it: it is unlinked.")
@_dry
@_talks
def retire(ask: Asking, model: str, force: bool, dry_run: bool) -> None:
    """Drain and stop a version of MODEL; its number is never used again.

    \b
    clipper retire svm:1
    """
    ask.show_change(ask.server.retire(model, force=force, dry_run=dry_run))


# -- applications


@click.command(short_help="Let an application ask one more model.")
@click.argument("application", metavar="APP")
@click.argument("model")
@click.option("--role", default="", help="primary, shadow, canary or challenger(share=0.1): see docs/selection.md.")
@_dry
@_talks
def link(ask: Asking, application: str, model: str, role: str, dry_run: bool) -> None:
    """Let APP ask MODEL too: NAME, whichever is the latest, or NAME:VERSION.

    \b
    clipper link digits svm
    """
    ask.show_change(ask.server.link(application, model, role, dry_run=dry_run))


@click.command(short_help="Let an application ask one model less.")
@click.argument("application", metavar="APP")
@click.argument("model")
@_dry
@_talks
def unlink(ask: Asking, application: str, model: str, dry_run: bool) -> None:
    """Let APP ask MODEL no more; it goes on running.

    \b
    clipper unlink digits svm
    """
    ask.show_change(ask.server.unlink(application, model, dry_run=dry_run))


@click.command(short_help="Give a model a share of an application's queries.")
@click.argument("application", metavar="APP")
@click.argument("model")
@click.option("--share", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.1, show_default=True)
@_dry
@_talks
def challenge(ask: Asking, application: str, model: str, share: float, dry_run: bool) -> None:
    """Let MODEL alone answer a share of APP's queries; `clipper stats` tells how it does.

    \b
    clipper deploy svm svm.onnx --behind
    clipper challenge digits svm:2 --share 0.05
    """
    ask.show_change(ask.server.challenge(application, model, share, dry_run=dry_run))


@click.command(short_help="Ask a model beside an application's own, unheard.")
@click.argument("application", metavar="APP")
@click.argument("model")
@click.option("--share", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True, help="Of the queries.")
@_dry
@_talks
def shadow(ask: Asking, application: str, model: str, share: float, dry_run: bool) -> None:
    """Ask MODEL beside APP's queries and never use what it says; `clipper stats` tells how often it agreed.

    \b
    clipper shadow digits svm:2
    """
    ask.show_change(ask.server.shadow(application, model, share, dry_run=dry_run))


def _app_group(cls: type[click.Group]) -> click.Group:
    @click.group(cls=cls, short_help="Make, change, show or remove an application.")
    def app() -> None:
        """Make, change, show or remove an application.

        \b
        clipper app set digits --model svm --slo-ms 20 --default -1
        """

    for verb in (app_set, app_show, app_remove):
        app.add_command(verb)
    return app


@click.command("set", short_help="Make an application, or change it.")
@click.argument("name")
@click.option("--model", "models_", metavar="MODEL", multiple=True, help="Whom to ask; several times for several.")
@click.option("--slo-ms", type=float, help="Time from a query to its answer.")
@click.option("--default", metavar="JSON", help="The answer when no model is heard in time.")
@click.option("--policy", help="As stacking or exp3(eta=0.05).")
@click.option("--decider", help="As 'majority within 12 ms, else first'.")
@click.option("--confidence-min", type=float, help="A less sure answer is replaced by the default.")
@click.option("--input", metavar="TYPE", help="Of one row.  [that of the first model]")
@click.option("--missing", type=click.Choice(["mean", "skip"]), help="A number missing at the deadline.")
@click.option("--coverage", type=float, help="Share of the answers whose set holds the truth.")
@_dry
@_talks
def app_set(ask: Asking, name: str, models_: tuple[str, ...], default: str | None, dry_run: bool, **settings: Any) -> None:
    """Make application NAME, or change what is given of it; the rest stays.

    \b
    clipper app set digits --model svm --model forest:2 --slo-ms 20 --default -1
    """
    given = {key: settings[key] for key in _SETTINGS if settings[key] is not None}
    given |= {"default": _read_json(default, "the default")} if default is not None else {}
    ask.show_change(ask.server.set_application(name, models_ or None, dry_run=dry_run, **given))


@click.command("show")
@click.argument("name")
@_talks
def app_show(ask: Asking, name: str) -> None:
    """Everything about application NAME.

    \b
    clipper app show digits
    """
    row = ask.server.application(name)
    ask.show(row, lambda: "\n".join(f"{key:16}{_short(value)}" for key, value in row.items()))


@click.command("remove")
@click.argument("name")
@_dry
@_talks
def app_remove(ask: Asking, name: str, dry_run: bool) -> None:
    """Delete application NAME; its models go on running.

    \b
    clipper app remove digits
    """
    ask.show_change(ask.server.remove_application(name, dry_run=dry_run))


# -- asking


@click.command(short_help="Ask an application.")
@click.argument("application", metavar="APP")
@click.argument("input", metavar="INPUT")
@click.option("--user", help="Whose selection state applies.")
@click.option("--slo-ms", type=float, help="Instead of the application's.")
@_talks
def predict(ask: Asking, application: str, input: str, user: str | None, slo_ms: float | None) -> None:
    """Ask APP about one INPUT: JSON, a word, or - for what comes on stdin.

    \b
    clipper predict digits "[0, 1, 2]"
    """
    text = sys.stdin.read() if input == "-" else input
    given = {key: value for key, value in (("user", user), ("slo_ms", slo_ms)) if value is not None}
    said = ask.server.predict_plainly(application, _read_json(text, "the input"), **given)
    why = f"default: {said['reason']}" if said["default"] else f"by {','.join(said['models'])}"
    ask.show(said, lambda: f"{json.dumps(said['output'])}\t{why} in {said['latency_us'] / 1000:.2f} ms, id {said['id']}")


@click.command(short_help="Tell an application what was right.")
@click.argument("application", metavar="APP")
@click.argument("id")
@click.option("--label", metavar="JSON", help="What would have been right.")
@click.option("--correct/--wrong", default=None, help="Whether the answer was.")
@click.option("--score", type=click.FloatRange(0, 1), help="How right it was.")
@_talks
def feedback(ask: Asking, application: str, id: str, label: str | None, correct: bool | None, score: float | None) -> None:
    """Tell APP the truth about the answer of that ID, which `clipper predict` prints.

    \b
    clipper feedback digits 4bde13fa-1 --label 7
    """
    truth = {"label": None if label is None else _read_json(label, "the label"), "correct": correct, "score": score}
    counted = ask.server.feedback(application, id, **{key: value for key, value in truth.items() if value is not None})
    ask.show({"counted": counted}, lambda: "counted" if counted else "it had come before")


# -- the state as one file


@click.command("state", short_help="Write the state of a server as one file.")
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path))
@_talks
def export_state(ask: Asking, file: Path) -> None:
    """Write models, applications and what was learned into FILE, or - for stdout.

    \b
    clipper export state state.json
    """
    state = ask.server.export_state()
    if str(file) == "-":
        click.echo(state, nl=False)
        return
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as out:
        out.write(state)
    ask.show({"file": str(file), "bytes": len(state)}, lambda: f"wrote {len(state)} bytes to {file}")


@click.command("import", short_help="Add an exported state.")
@click.argument("file", type=click.Path(dir_okay=False, exists=True, allow_dash=True, path_type=Path))
@_dry
@_talks
def import_(ask: Asking, file: Path, dry_run: bool) -> None:
    """Add what `clipper export state` wrote. The models in FILE are code that will run: import only from whom you trust.

    \b
    clipper import state.json
    """
    state = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    ask.show_change(ask.server.import_state(state, dry_run=dry_run))


# -- completion


@click.command(short_help="Print what makes a shell complete verbs.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script for SHELL, after which the tab key completes verbs and options.

    \b
    clipper completion bash >> ~/.bashrc
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise ClipperError(f"no completion for {shell!r}.", hint="Shells: bash, zsh, fish.")
    root = ctx.find_root()
    click.echo(kind(root.command, {}, "clipper", "_CLIPPER_COMPLETE").source())


_VERBS = (
    models, apps, deploy, promote, rollback, scale, retire, link, unlink, challenge, shadow, logs, history, stats, predict,
    feedback, import_, completion,
)  # fmt: skip


def add_to(main: click.Group) -> None:
    for verb in (*_VERBS, _app_group(type(main))):
        main.add_command(verb)
