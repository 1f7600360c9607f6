"""Servers, applications, models and answers as HTML. Whatever comes from a model or a client is
escaped."""

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from clipper.server import ClipperServer
from clipper.serving.query.application import ApplicationHandle
from clipper.types import Answer, Answers
from clipper_core.engine.model import Model

_CHARS_MAX: Final = 500  # of a value
_ROWS_MAX: Final = 20  # models, and applications, of a server


def answer_html(answer: Answer) -> str:
    """Return an answer as HTML."""
    rows = [("output", repr(answer.output)), ("confidence", f"{answer.confidence:.3g}")]
    if answer.is_default:
        rows.append(("default", answer.reason or "yes"))
    rows += [(title, ", ".join(map(str, each))) for title, each in _named(answer) if each]
    rows.append(("latency", f"{answer.latency_us / 1000:.3g} ms"))
    return _listed("Answer", rows)


def _named(answer: Answer) -> Iterable[tuple[str, Sequence[object]]]:
    yield "from", answer.models
    yield "missing", answer.missing


def answers_html(answers: Answers) -> str:
    """Return the answers to an array as HTML."""
    return _listed("Answers", [("", repr(answers))])


def model_html(model: Model) -> str:
    """Return a model as HTML."""
    return _listed(f"Model {model.name}", [("input", model.describe_input())])


def application_html(application: ApplicationHandle) -> str:
    """Return an application as HTML."""
    return _listed(f"Application {application.name}", [("", repr(application))])


def server_html(server: ClipperServer) -> str:
    """Return a server as HTML: where it is reached, its models and its applications."""
    view = server.catalog.view
    models = [f"{model.id} {model.input}" for model in view.models()]
    rows = [
        ("queries", server.http_address),
        ("gRPC", server.grpc_address),
        ("management", server.admin_address),
        ("state", "closed" if server.is_closed else server.config.server.state or "memory"),
        ("models", _some(models)),
        ("applications", _some(sorted(view.applications))),
    ]
    return _listed("ClipperServer", [(title, text) for title, text in rows if text])


def _some(names: Sequence[str]) -> str:
    more = len(names) - _ROWS_MAX
    return ", ".join(names[:_ROWS_MAX]) + (f" and {more} more" if more > 0 else "")


def _listed(title: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(_cut(text))}</td></tr>"
        for name, text in rows
    )
    return f"<table><caption>{html.escape(title)}</caption>{lines}</table>"


def _cut(text: str) -> str:
    return text if len(text) <= _CHARS_MAX else f"{text[:_CHARS_MAX]}..."


SHOWN: Final[Mapping[type, Callable[..., str]]] = {
    Answer: answer_html,
    Answers: answers_html,
    ApplicationHandle: application_html,
    ClipperServer: server_html,
    Model: model_html,
}
