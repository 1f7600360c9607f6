"""The verbs of management, each declared once: a row says what it takes, by which ways in it is
reached, and how it is explained there.

From a row follow the route over HTTP with its description in OpenAPI (http/rest.py,
http/described.py), the method of the client (calls.py), and the command (cli/catalog/verbs.py). The
method of Operations of the same name does it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from clipper.manage.rollouts.decisions import ERROR_RATE, GUARD
from clipper.selection import POLICIES
from clipper.settings.streams import ModelStreamSettings, StreamSettings
from clipper.spec.field import SpecField, at
from clipper.spec.keywords import ModelStreamMembers, StreamMembers, TableAlterations
from clipper.spec.model import ModelSpec
from clipper.spec.table import ALTERABLE, TableSpec
from clipper.store.history import ENTRIES_MAX
from clipper.types import NAME_GRAMMAR, UserValue

REQUIRED: Final = msgspec.NODEFAULT
EVALUATED: Final = 5000  # feedbacks that `evaluation` uses by default
EVALUATED_MAX: Final = 20_000  # so that it takes a few seconds at most
IDS_MAX: Final = 1 << 20  # of one request to erase rows
SHARDS_MAX: Final = 1024
Way = Literal["client", "command"]
Schema = Mapping[str, UserValue]


class Argument(NamedTuple):
    """An argument of a verb.

    type: as the client takes it, and JSON has it. text: one sentence without its full stop. schema:
    its JSON Schema, where the type says less. option: what the command calls it, and the word for
    its value; empty: `--name`, or a word of its own where it is required.
    """

    name: str
    type: UserValue = str
    default: UserValue = REQUIRED
    text: str = ""
    schema: Schema | None = None
    option: str = ""

    def json_schema(self) -> dict[str, UserValue]:
        """Return the JSON Schema of the argument, with its sentence."""
        described = {"description": self.text} if self.text else {}
        return {**(self.schema or msgspec.json.schema(self.type)), **described}


class VerbRoute(NamedTuple):
    """A method of HTTP and a path, whose {} are arguments of the verb."""

    method: str
    path: str

    @property
    def pattern(self) -> str:
        """Return the path without the names of its arguments, as routers have it."""
        return re.sub(r"{\w+}", "{}", self.path)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the arguments that the path has."""
        return tuple(re.findall(r"{(\w+)}", self.path))

    @property
    def changes(self) -> bool:
        """Return whether it changes something: then it may be tried, and the history has it."""
        return self.method != "GET"


class Verb(NamedTuple):
    """A verb. name: of the method of the operations. on: what those are about, if not the server.

    routes: the last one that the given arguments fill is used. text: what it does, in whole
    sentences. spec: a specification whose fields are arguments as well; keywords: their types in
    Python; only: these of them. gives: what the client returns, a type of clipper.manage.rows;
    member: of the response, where it is in one. client: its method. command: its words; short,
    example: its help. by_hand: ways in that are written for it, and why. without: those that lack
    it, and why.
    """

    name: str
    routes: tuple[VerbRoute, ...]
    text: str
    arguments: tuple[Argument, ...] = ()
    on: Literal["", "tables", "streams"] = ""
    spec: type[msgspec.Struct] | None = None
    keywords: UserValue = None
    only: tuple[str, ...] = ()
    gives: str = "ChangeResult"
    member: str = ""
    client: str = ""
    command: str = ""
    short: str = ""
    example: str = ""
    by_hand: Mapping[Way, str] = {}
    without: Mapping[Way, str] = {}

    @property
    def method(self) -> str:
        """Return the name of the client's method."""
        return self.client or self.name

    @property
    def changes(self) -> bool:
        """Return whether it changes something."""
        return self.routes[0].changes

    @property
    def fields(self) -> Mapping[str, SpecField]:
        """Return the fields of its specification, by name; none without one."""
        if self.spec is None:
            return {}
        known = at(self.spec, "http")
        return {name: known[name] for name in self.only or known}

    def takes(self) -> dict[str, UserValue]:
        """Return the types of what it takes, as JSON has it, by name."""
        own = {
            one.name: UserValue if one.name == "replicas" else one.type for one in self.arguments
        }
        return own | {name: one.type for name, one in self.fields.items()}

    def needed(self, route: VerbRoute) -> list[str]:
        """Return the arguments that it requires and the path does not have."""
        return [
            one.name
            for one in self.arguments
            if one.default is REQUIRED and one.name not in route.names
        ]


def _get(*paths: str) -> tuple[VerbRoute, ...]:
    return tuple(VerbRoute("GET", path) for path in paths)


def _post(path: str) -> tuple[VerbRoute, ...]:
    return (VerbRoute("POST", path),)


_NAMED: Final = f"^{NAME_GRAMMAR}$"
_FILE: Final = Argument(
    "file",
    text="in the folder `files` of the set of shards",
    schema={
        "type": "string",
        "pattern": "^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\\.(npz|safetensors|parquet|npy)$",
    },
)
_NAME: Final = Argument("name")
_APP: Final = Argument("application", option="APP")
_MODEL: Final = Argument(
    "model",
    text="`svm`, or `svm:3`",
    schema={"type": "string", "pattern": f"^{NAME_GRAMMAR}(:[1-9][0-9]{{0,8}})?$"},
    option="MODEL",
)
_SHARE: Final = Argument(
    "share",
    float,
    text="share of the queries",
    schema={"type": "number", "exclusiveMinimum": 0, "maximum": 1},
)
_OPEN_SHARE: Final = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
_IN_FOLDER: Final = "the command works on the set of a folder, also without a server"
_ONLY_READS: Final = "it prints a table"
_MOVED: Final = "/admin/applications/{application}/rollout"
VERBS: Final[tuple[Verb, ...]] = (
    Verb(
        "about",
        _get("/admin/about"),
        "The server itself: version, process, where queries come in over HTTP (a URL) and gRPC (or"
        " empty), its state, and a warning if its store is away or has another content.",
        gives="ServerRow",
        without={"command": "`clipper ps` has the warning, `clipper up` the addresses"},
    ),
    Verb(
        "ps",
        _get("/admin/ps"),
        "Each version in service as it runs: state, replicas, memory, queue, batch and why, the"
        " last error and what to do.",
        gives="list[ProcessRow]",
        member="models",
        command="model ps",
        by_hand={"command": _ONLY_READS},
    ),
    Verb(
        "stats",
        _get("/admin/stats"),
        "All statistics of the server, with histograms as quantiles.",
        gives="Stats",
        command="stats",
        by_hand={"command": _ONLY_READS},
    ),
    Verb(
        "history",
        _get("/admin/history"),
        "The last changes, the oldest first: number, time_us, actor, verb, changed (records before"
        " and after).",
        (
            Argument(
                "count",
                int,
                100,
                schema={"type": "integer", "minimum": 1, "maximum": ENTRIES_MAX},
            ),
        ),
        gives="list[HistoryRow]",
        member="history",
        command="history",
        by_hand={"command": _ONLY_READS},
    ),
    Verb(
        "models",
        _get("/admin/models", "/admin/models/{name}"),
        "Each version in service: its record, whether it is the `latest`, which applications link"
        " it, how many replicas it has.",
        (Argument("name", default=""),),
        gives="list[ModelRow]",
        member="models",
        command="model ls",
        by_hand={"command": _ONLY_READS},
    ),
    Verb(
        "logs",
        _get("/admin/models/{model}/logs"),
        "The last lines that a container wrote.",
        (
            _MODEL,
            Argument("replica", int, 0, schema={"type": "integer", "minimum": 0, "maximum": 64}),
        ),
        gives="list[str]",
        member="lines",
        command="model logs",
        by_hand={"command": _ONLY_READS},
    ),
    Verb(
        "follow",
        _get("/admin/models/{model}/follow"),
        "The lines that all containers of a model wrote since `after`, which the previous call"
        " returned. The result has `model`, `replicas` (each with `replica`, `lines`, and the"
        " number of `lost` lines) and `after`.",
        (_MODEL, Argument("after", default="")),
        gives="FollowedLines",
        without={"command": "`clipper logs -f`"},
    ),
    Verb(
        "model_stats",
        _get("/admin/models/{model}/stats"),
        "The part of the statistics that is about `svm:3`, or the latest `svm`.",
        (_MODEL,),
        gives="Stats",
        without={"command": "`clipper stats -o json`"},
    ),
    Verb(
        "stages",
        _get("/admin/models/{name}/stages"),
        "The deployment stage of each version of a model that was started here: `version`, `stage`,"
        " `detail`, and its age in seconds (`for_s`).",
        (_NAME,),
        gives="list[StageRow]",
        member="stages",
        without={"command": "`clipper deploy` shows them as they pass"},
    ),
    Verb(
        "deploy",
        _post("/admin/models/{name}/deploy"),
        "Deploy a model: \"module:attribute\", or a model's file or folder on the server's host."
        " promote: make it the latest version. wait: return when its containers are connected."
        " data: the bytes of such a file instead, and its `kind`; kinds that may hold pickles are"
        " refused. reads: columns of the input by table; functions are not accepted, since the"
        " server would run them. command: a program of the server's host that is the container, run"
        " in `folder`; it must be named in server.commands. requirements: packages and their"
        " versions only.",
        (
            _NAME,
            Argument("model", default=""),
            Argument("promote", bool, True),
            Argument("wait", bool, True),
        ),
        spec=ModelSpec,
        command="model deploy",
        by_hand={
            "client": "it reads files of its own host",
            "command": "it shows how far a deployment is",
        },
    ),
    Verb(
        "promote",
        _post("/admin/models/{model}/promote"),
        "Make a version the latest, which the name without a version refers to until another one is"
        " deployed or promoted; or link one application to that version alone.",
        (
            _MODEL._replace(option="NAME:VERSION"),
            Argument(
                "application",
                str | None,
                None,
                "link only this application to the version",
                {"type": ["string", "null"], "pattern": _NAMED},
                "--app APP",
            ),
        ),
        command="model promote",
        short="Make a version the latest.",
        example="svm:2",
    ),
    Verb(
        "rollback",
        _post("/admin/models/{model}/rollback"),
        "Make the next lower version that is in service the latest.",
        (_MODEL._replace(option="NAME"),),
        command="model rollback",
        short="Make the previous version the latest again.",
        example="svm",
    ),
    Verb(
        "scale",
        _post("/admin/models/{model}/scale"),
        "Run N containers of a version, or between MIN and MAX depending on the load. Containers"
        " that failed are started again.",
        (
            _MODEL,
            Argument(
                "replicas",
                int | tuple[int, int],
                text="so many, or [least, most]",
                schema={
                    "anyOf": [
                        {"type": "integer", "minimum": 0, "maximum": 64},
                        {
                            "type": "array",
                            "items": {"type": "integer"},
                            "minItems": 2,
                            "maxItems": 2,
                        },
                    ],
                },
                option="N|MIN-MAX",
            ),
        ),
        command="model scale",
        short="Set the number of containers of a model.",
        example="svm:1 1-4",
    ),
    Verb(
        "retire",
        _post("/admin/models/{model}/retire"),
        "Drain and stop a version. Its number is never used again.",
        (
            _MODEL,
            Argument(
                "force",
                bool,
                False,
                "retire it even if applications use it: the version before follows, or it is"
                " unlinked",
            ),
        ),
        command="model retire",
        short="Drain and remove a version.",
        example="svm:1",
    ),
    Verb(
        "applications",
        _get("/admin/applications"),
        "The record of each application.",
        gives="list[ApplicationRow]",
        member="applications",
        command="app ls",
        by_hand={"command": _ONLY_READS},
    ),
    Verb(
        "application",
        _get("/admin/applications/{name}"),
        "The record of one application.",
        (_NAME,),
        gives="ApplicationRow",
        command="app show",
        by_hand={"command": _ONLY_READS},
    ),
    Verb(
        "application_stats",
        _get("/admin/applications/{name}/stats"),
        "The part of the statistics that is about one application.",
        (_NAME,),
        gives="Stats",
        without={"command": "`clipper stats -o json`"},
    ),
    Verb(
        "evaluation",
        _get("/admin/applications/{application}/evaluation"),
        "Estimate the accuracy that another policy would have had on the application's feedback."
        " policy: with settings if any. count: of the newest feedbacks; each takes 20 to 150 us."
        " The result has the members of `Evaluation`, each estimate with its 95 % interval.",
        (
            _APP,
            Argument(
                "policy",
                text="a name, or with settings, as `exp3(eta=0.05)`, or `package.module:Class`",
                schema={"type": "string", "pattern": f"^({'|'.join(sorted(POLICIES))})$"},
            ),
            Argument(
                "count",
                int,
                EVALUATED,
                schema={"type": "integer", "minimum": 1, "maximum": EVALUATED_MAX},
            ),
        ),
        gives="dict[str, object]",
        command="app evaluate",
        by_hand={"command": "it reads the journal of a folder, also without a server"},
    ),
    Verb(
        "link",
        _post("/admin/applications/{application}/link"),
        "Link a model to an application: `svm` for its latest version, or `svm:3`.",
        (
            _APP,
            _MODEL,
            Argument(
                "role",
                default="",
                text="primary, shadow, canary or challenger(share=0.1): see docs/selection.md",
            ),
        ),
        command="app link",
        short="Link a model to an application.",
        example="digits svm",
    ),
    Verb(
        "unlink",
        _post("/admin/applications/{application}/unlink"),
        "Remove a model from an application. The model keeps running.",
        (_APP, _MODEL),
        command="app unlink",
        short="Remove a model from an application.",
        example="digits svm",
    ),
    Verb(
        "challenge",
        _post("/admin/applications/{application}/challenge"),
        "Let a model alone answer a share of an application's queries. The statistics have its"
        " results.",
        (_APP, _MODEL, _SHARE._replace(default=0.1, schema=_OPEN_SHARE)),
        command="app challenge",
        short="Let a model answer a share of an application's queries.",
        example="digits svm:2 --share 5%",
    ),
    Verb(
        "shadow",
        _post("/admin/applications/{application}/shadow"),
        "Send an application's queries, or a share of them, to a model as well, without using its"
        " predictions. The statistics have how often it agreed.",
        (_APP, _MODEL, _SHARE._replace(default=1.0)),
        command="app shadow",
        short="Send queries to a model without using its predictions.",
        example="digits svm:2",
    ),
    Verb(
        "remove_application",
        _post("/admin/applications/{name}/remove"),
        "Delete an application. Its models keep running.",
        (_NAME,),
        command="app remove",
        short="Delete an application.",
        example="digits",
    ),
    Verb(
        "accept_store",
        _post("/admin/store/accept"),
        "Take a store that came back empty, older or as another for the one that is known here."
        " restore: write back what is known here; otherwise what the store lacks is gone. Every"
        " server of the store follows.",
        (Argument("restore", bool),),
        command="store accept",
        by_hand={"command": "it asks for --restore or --as-is"},
    ),
    Verb(
        "rollouts",
        _get("/admin/rollouts", _MOVED),
        "The last rollout of each application, or of one: its record, the figures of its stage, and"
        " what it waits for.",
        (
            Argument(
                "application",
                default="",
                text="of one; else of all",
                schema={"type": "string", "pattern": f"^({NAME_GRAMMAR})?$"},
            ),
        ),
        gives="list[RolloutRow]",
        member="rollouts",
        command="rollout status",
        by_hand={"command": _ONLY_READS},
    ),
    Verb(
        "rollout",
        _post(_MOVED),
        "Send a growing share of an application's queries to a version instead of the one that the"
        " application uses now. A user stays with one version. A stage ends when its time is over"
        " and every guard holds with enough observations. If a guard is violated, all queries"
        " return to the old version.",
        (
            _APP._replace(text="application to roll out to", option="--app APP"),
            _MODEL._replace(option="NAME:VERSION"),
            Argument(
                "canary",
                str | float | None,
                None,
                "the first share, such as 5%: in per cent as a string, or a number",
                {
                    "anyOf": [
                        {"type": "string", "pattern": "^[1-9]%$"},
                        {"type": "number", "minimum": 0.01, "maximum": 0.09},
                        {"type": "null"},
                    ],
                },
                "--canary SHARE",
            ),
            Argument(
                "stages",
                str | list[str | float] | None,
                None,
                "shares, in per cent, as 5,25,50,100",
                {
                    "type": ["string", "null"],
                    "pattern": "^(1[0-9],)?([2-4][0-9],)?([5-9][0-9],)?100$",
                },
                "--stages SHARES",
            ),
            Argument(
                "hold",
                str | float,
                "60s",
                "how long each stage lasts at least: 60s, 5m, 1h",
                {"type": "string", "pattern": "^[1-9][0-9]{0,2}(ms|s|m)$"},
                "--hold TIME",
            ),
            Argument(
                "guard",
                str,
                GUARD,
                "conditions that revert it when violated: see docs/managing.md",
                {
                    "type": "string",
                    "pattern": "^(error<[1-9]%|p99<[1-9][0-9]ms)(, reward>=-[1-9]%)?$",
                },
            ),
            Argument(
                "error_rate",
                float,
                ERROR_RATE,
                "maximum probability of reverting a version that satisfies its guards",
                {"type": "number", "minimum": 1e-9, "maximum": 0.5},
            ),
        ),
        command="rollout start",
        short="Start a rollout; the word `start` is optional.",
        example='svm:2 --app digits --stages 5,50,100 --guard "p99<20ms, error<1%"',
    ),
    Verb(
        "pause_rollout",
        _post(f"{_MOVED}/pause"),
        "Keep an application's rollout at its share; a broken guard reverts it all the same.",
        (_APP,),
        command="rollout pause",
        short="Keep the current share.",
        example="digits",
    ),
    Verb(
        "resume_rollout",
        _post(f"{_MOVED}/resume"),
        "Let an application's rollout grow again; its stage starts again.",
        (_APP,),
        command="rollout resume",
        short="Continue after a pause.",
        example="digits",
    ),
    Verb(
        "abort_rollout",
        _post(f"{_MOVED}/abort"),
        "Send all of an application's queries to the version before again.",
        (_APP,),
        command="rollout abort",
        short="Return to the old version now.",
        example="digits",
    ),
    Verb(
        "promote_rollout",
        _post(f"{_MOVED}/promote"),
        "Send all of an application's queries to the new version, whatever the guards report.",
        (_APP,),
        command="rollout promote",
        short="Use the new version for all queries now.",
        example="digits",
    ),
    Verb(
        "tables",
        _get("/admin/tables"),
        "Each table: its specification, and its rows on all shards.",
        on="tables",
        member="tables",
        client="list",
        by_hand={"client": "it returns a TableSpec"},
        without={"command": _IN_FOLDER},
    ),
    Verb(
        "table",
        _get("/admin/tables/{name}"),
        "One table: its specification, and its rows on all shards.",
        (_NAME,),
        on="tables",
        client="get",
        by_hand={"client": "it returns a TableSpec"},
        without={"command": _IN_FOLDER},
    ),
    Verb(
        "create_table",
        _post("/admin/tables/{name}/create"),
        "Create a table. One that exists with the same settings stays as it is.",
        (_NAME, Argument("dim", int)),
        on="tables",
        spec=TableSpec,
        client="create",
        command="table create",
        by_hand={"client": "it takes a TableSpec", "command": _IN_FOLDER},
    ),
    Verb(
        "alter_table",
        _post("/admin/tables/{name}/alter"),
        "Change settings and quotas of a table while it is trained. What is None stays as it is.",
        (_NAME,),
        on="tables",
        spec=TableSpec,
        keywords=TableAlterations,
        only=ALTERABLE,
        gives="TableChangeResult",
        client="alter",
        command="table alter",
        by_hand={"command": _IN_FOLDER},
    ),
    Verb(
        "drop_table",
        _post("/admin/tables/{name}/drop"),
        "Remove a table with its rows. Its name is free at once.",
        (_NAME,),
        on="tables",
        gives="TableChangeResult",
        client="drop",
        command="table drop",
        by_hand={"command": _IN_FOLDER},
    ),
    Verb(
        "erase_rows",
        _post("/admin/tables/{name}/erase"),
        "Remove rows of a table by their ids. The history has their number.",
        (
            _NAME,
            Argument(
                "ids",
                Sequence[int],
                schema={
                    "type": "array",
                    "items": {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 64) - 1},
                    "minItems": 1,
                    "maxItems": IDS_MAX,
                },
            ),
        ),
        on="tables",
        gives="TableChangeResult",
        client="erase",
        command="table erase",
        by_hand={"command": _IN_FOLDER},
    ),
    Verb(
        "copy_table",
        _post("/admin/tables/{name}/copy"),
        "Make a table `to` with the settings, rows and state of another.",
        (_NAME, Argument("to", schema={"type": "string", "pattern": _NAMED})),
        on="tables",
        gives="TableChangeResult",
        client="copy",
        command="table copy",
        by_hand={"command": _IN_FOLDER},
    ),
    Verb(
        "export_table",
        _post("/admin/tables/{name}/export"),
        "Write the ids and rows of a table to a file in the folder `files` of the set: .npz,"
        " .safetensors or .parquet.",
        (_NAME, _FILE),
        on="tables",
        gives="TableChangeResult",
        client="export_rows",
        command="table export",
        by_hand={"command": _IN_FOLDER},
    ),
    Verb(
        "import_table",
        _post("/admin/tables/{name}/import"),
        "Write the rows of a file in the folder `files` of the set into a table, over those of the"
        " same ids. create: make the table, as wide as the rows.",
        (_NAME, _FILE, Argument("create", bool, False)),
        on="tables",
        gives="TableChangeResult",
        client="import_rows",
        command="table import",
        by_hand={"command": _IN_FOLDER},
    ),
    Verb(
        "shards",
        _get("/admin/shards"),
        "The shards that have the tables: `shards`, their number; `resharding`, how far the last"
        " change of it is; null if there was none.",
        on="tables",
        gives="dict[str, object]",
        without={"command": "`clipper params ps` shows the set of a folder"},
    ),
    Verb(
        "reshard",
        _post("/admin/shards/reshard"),
        "Change the number of shards while they serve. `GET /admin/shards` tells how far it is.",
        (Argument("shards", int, schema={"type": "integer", "minimum": 1, "maximum": SHARDS_MAX}),),
        on="tables",
        gives="TableChangeResult",
        command="params reshard",
        by_hand={"command": _IN_FOLDER},
    ),
    Verb(
        "streams",
        _get("/admin/streams", "/admin/streams/{name}"),
        'Each running stream: `name`, `kind` ("records" or "models"), `settings`, `stats`.',
        (Argument("name", default=""),),
        on="streams",
        member="streams",
        client="list",
        command="stream ls",
        by_hand={"client": "`list` and `get`", "command": _ONLY_READS},
    ),
    Verb(
        "create_stream",
        _post("/admin/streams/{name}/create"),
        "Answer the records of a Redis stream by an application, until the stream is stopped or the"
        " server ends. To have it at each start, declare [streams.NAME] in the file.",
        (_NAME,),
        on="streams",
        spec=StreamSettings,
        keywords=StreamMembers,
        client="create",
        command="stream create",
        short="Answer the records of a stream by an application.",
        example="digits --app digits --redis redis://127.0.0.1:6379/0",
    ),
    Verb(
        "create_model_stream",
        _post("/admin/streams/{name}/create-models"),
        "Deploy the models of a Redis stream as next versions, until the stream is stopped or the"
        " server ends. To have it at each start, declare [model_streams.NAME] in the file.",
        (_NAME,),
        on="streams",
        spec=ModelStreamSettings,
        keywords=ModelStreamMembers,
        client="create_models",
        command="stream create-models",
        short="Deploy the models of a stream.",
        example="live --redis redis://127.0.0.1:6379/0",
    ),
    Verb(
        "stop_stream",
        _post("/admin/streams/{name}/stop"),
        "Read no more records of a stream, answer those that were read, and stop. Records that were"
        " not read stay in Redis.",
        (_NAME,),
        on="streams",
        client="stop",
        command="stream stop",
        short="Stop a stream.",
        example="digits",
    ),
)
