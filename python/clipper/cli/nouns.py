"""The grammar `clipper NOUN VERB`: groups of the commands that are written by hand, each with the
help of its place. shell.py adds those of the table of verbs. The verbs alone (`clipper deploy`) are
short forms of the same commands."""

import copy
import re
from collections.abc import Mapping

import click

from clipper.cli.catalog.applications import app_set, app_show, apps
from clipper.cli.catalog.models import deploy
from clipper.cli.catalog.queries import feedback, predict
from clipper.cli.catalog.registry import registry
from clipper.cli.catalog.store import accept
from clipper.cli.catalog.streams import stream_show, streams
from clipper.cli.command_group import CommandGroup
from clipper.cli.measurement.bench import bench
from clipper.cli.measurement.evaluating import evaluate
from clipper.cli.measurement.profiling import profile
from clipper.cli.mesh.models import instances, vmodel
from clipper.cli.mesh.node import node as node_run
from clipper.cli.monitoring.inspection import models
from clipper.cli.monitoring.status import logs, ps
from clipper.cli.params.tables import TABLE_COMMANDS


def _noun(
    name: str,
    text: str,
    verbs: Mapping[str, tuple[str, click.Command]],
    example: str,
    default: str | None = None,
) -> click.Group:
    """Return a group. verbs: by name, the form that the command's examples have, and the command.
    default: the verb of arguments that name none."""
    help_ = f"{text}\n\n\b\n{example}"
    group = CommandGroup(
        name, help=help_, short_help=text, default=default, no_args_is_help=default is None
    )
    for verb, (form, command) in verbs.items():
        group.add_command(placed(command, f"clipper {form}", f"clipper {name} {verb}"), verb)
    return group


def placed(command: click.Command, form: str, place: str) -> click.Command:
    """Return a command whose examples are those of its place."""
    placed = copy.copy(command)
    placed.help = re.sub(rf"{re.escape(form)}(?![-\w])", place, command.help or "")
    return placed


NOUNS = (
    _noun(
        "model",
        "Deploy, list, change and retire models.",
        {
            "ls": ("models", models),
            "ps": ("ps", ps),
            "deploy": ("deploy", deploy),
            "logs": ("logs", logs),
            "profile": ("profile", profile),
        },
        "clipper model deploy svm svm.onnx\nclipper model ls",
    ),
    _noun(
        "app",
        "Create, change, query and remove applications.",
        {
            "ls": ("apps", apps),
            "set": ("app set", app_set),
            "show": ("app show", app_show),
            "predict": ("predict", predict),
            "feedback": ("feedback", feedback),
            "evaluate": ("evaluate", evaluate),
            "bench": ("bench", bench),
        },
        "clipper app set digits --model svm --slo-ms 20 --default -1\nclipper app ls",
    ),
    _noun(
        "name",
        "Manage names that refer to models of a mesh (v-models).",
        {verb: (f"mesh vmodel {verb}", command) for verb, command in vmodel.commands.items()},
        "clipper name set best m1\nclipper name ls",
    ),
    _noun(
        "table",
        "Create, read, change and drop tables of a parameter server.",
        {str(one.name): (f"params {one.name}", one) for one in TABLE_COMMANDS},
        "clipper table create users 64\nclipper table pull users 3 17",
    ),
    _noun(
        "stream",
        "Answer the records of Redis streams, and deploy models from them.",
        {
            "ls": ("stream ls", streams),
            "show": ("stream show", stream_show),
        },
        "clipper stream create digits --app digits --redis redis://127.0.0.1:6379/0\n"
        "clipper stream ls",
    ),
    _noun(
        "node",
        "Run a node of a mesh, and list the nodes.",
        {"run": ("node", node_run), "ls": ("mesh ps", instances)},
        "clipper node run --store etcd://10.0.0.5:2379\nclipper node ls",
        default="run",
    ),
    _noun(
        "store",
        "Copy a store, or decide about one that came back empty or older.",
        {"accept": ("store accept", accept), "copy": ("registry copy", registry.commands["copy"])},
        "clipper store copy ./state redis://127.0.0.1:6379/0 --verify\n"
        "clipper store accept --restore",
    ),
)
