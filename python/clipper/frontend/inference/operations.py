"""The operations of the Open Inference Protocol, for HTTP (http/inference.py) and gRPC.

The protocol's model is an application here or, by its own name, a model. A tensor of up to 32 rows
becomes that many queries, each with the application's SLO. More rows are one array, which has a
minute unless `parameters.timeout` or a deadline sets another time.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from clipper.errors import (
    Forbidden,
    InvalidInput,
    UnknownApplication,
    UnknownModel,
    UnknownVersion,
)
from clipper.frontend.auth.api_keys import KeyOwner, band_of
from clipper.frontend.http.messages import to_json
from clipper.frontend.inference import codec
from clipper.frontend.inference.json_inputs import input_of
from clipper.frontend.inference.outcome import answer_of, answers_of
from clipper.frontend.inference.type_wait import types_are_known, wait_for_types
from clipper.frontend.inference.whole_answers import (
    PARAMETER,
    asks_for_answers,
    of_array,
    of_rows,
)
from clipper.frontend.server_interface import ServerInterface
from clipper.frontend.tracing.context import Trace
from clipper.metrics.stats import ModelStats, QueryStats
from clipper.schema import Schema
from clipper.serving.query.application import array_slo_in_us, fits_id
from clipper.serving.query.arrays import predict_array
from clipper.serving.query.future_watcher import Future
from clipper.serving.query.named_outputs import outputs_of
from clipper.serving.query.processor import ResolvedApplication, predict
from clipper.types import Answer, InputType, Model, PredictionRequest, UserValue

Rows = UserValue  # an array (n, ...), a list of n, or NamedRows
EXTENSIONS = [
    "binary_tensor_data",
    "generate",
    "model_configuration",
    "model_repository",
    "schedule_policy",
    "statistics",
]
SINGLE_ROWS_MAX = 32  # rows of a request that are queries of their own
_THE_VERSION = "1"  # version of an application in statistics, which perf_analyzer requires
_NOTHING = {"count": 0, "ns": 0}


class InferenceTarget(NamedTuple):
    """An application, or a model that is queried by its own name.

    version: of a model, as requested; empty when none was named.
    """

    resolved: ResolvedApplication
    name: str
    version: str

    @property
    def answered_version(self) -> str:
        """The model version in a response; empty for an application."""
        return self.version or (
            str(self.resolved.models[0].version) if not self.resolved.name else ""
        )


class InferenceResult(NamedTuple):
    """The result of a request. outputs: an array (n, ...) or a list of n."""

    outputs: UserValue
    parameters: dict[str, object]


class NamedRows(msgspec.Struct):
    """The rows of a request for named tensors. columns: an array (n, ...) or a list for each
    tensor; iterating gives a dict for each row."""

    n: int
    columns: dict[str, codec.Values]

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[dict[str, codec.Values]]:
        return ({name: column[i] for name, column in self.columns.items()} for i in range(self.n))


class PendingInference(msgspec.Struct):
    """The queries of one request. Call `inferred()` once all `futures` are done.

    is_whole: the response has what the answers have beside their outputs, too.
    """

    futures: Sequence[Future]
    resolved: ResolvedApplication
    is_array: bool
    is_whole: bool = False

    def inferred(self) -> InferenceResult:
        """Return the outputs and parameters of the response. Raises the queries' error."""
        if self.is_array:
            many = answers_of(self.futures[0], self.resolved)
            qualifiers: dict[str, object] = (
                {"default": True, "reason": "; ".join(many.reasons)}
                if many.is_default.any()
                else {}
            )
            if self.is_whole:
                qualifiers[PARAMETER] = of_array(many)
            return InferenceResult(self._named(many.outputs), qualifiers)
        answers = [answer_of(future, self.resolved) for future in self.futures]
        reasons = dict.fromkeys(answer.reason for answer in answers if answer.is_default)
        parameters: dict[str, object] = (
            {"default": True, "reason": "; ".join(reasons)} if reasons else {}
        )
        if len(answers) == 1:
            parameters |= {"prediction_id": answers[0].id, "confidence": answers[0].confidence}
            parameters |= _beside(answers[0])
        if self.is_whole:
            parameters[PARAMETER] = of_rows(answers)
        return InferenceResult(self._named([answer.output for answer in answers]), parameters)

    def _named(self, outputs: codec.Values) -> codec.Values:
        """Return the outputs of an application that answers one of several by its name."""
        name = self.resolved.output_name
        return {name: outputs} if name else outputs


class InferenceOperations:
    """The operations on one server. Threads: any."""

    def __init__(self, node: ServerInterface) -> None:
        self._node = node

    def exists(self, name: str) -> bool:
        """Return whether an application or a model has this name."""
        view = self._node.catalog.view
        return name in view.applications or name in view.versions

    def target(self, name: str, version: str = "") -> InferenceTarget:
        """Return the target of a request. Raises UnknownModel, UnknownVersion, InvalidInput."""
        view = self._node.catalog.view
        if not version and name in view.applications:
            return InferenceTarget(self._node.resolve(name), name, "")
        if name not in view.versions:
            if (
                self._node.mesh is not None
                and name not in view.applications
                and version in ("", _THE_VERSION)
            ):
                return InferenceTarget(
                    self._node.resolve_request(PredictionRequest(None, candidate_models=(name,))),
                    name,
                    version,
                )
            if name in view.applications:
                raise UnknownVersion(
                    f"application {name!r} has no version {version[:20]!r}.",
                    hint="Query it without one.",
                )
            raise UnknownModel.named(
                name[:200], {*view.applications, *(model.name for model in view.models())}
            )
        prediction_request = PredictionRequest(
            None, candidate_models=(f"{name}:{version}" if version else name,)
        )
        return InferenceTarget(self._node.resolve_request(prediction_request), name, version)

    # -- about the server

    def server(self) -> dict[str, object]:
        """Return the server's metadata."""
        return {"name": "clipper", "version": self._node.version, "extensions": EXTENSIONS}

    def index(self, only_ready: bool) -> list[dict[str, object]]:
        """List applications and models with their state.

        Blocks on the engines, like `is_ready` and `statistics`: do not call it on an event loop.
        """
        running = self._node.running()
        names = self._node.catalog.view.applications
        rows = [_row(name, "", self._node.is_ready(name, running)) for name in sorted(names)]
        rows += [
            _row(m.name, str(m.version), str(m.id) in running)
            for m in self._node.catalog.view.models()
        ]
        return [row for row in rows if not only_ready or row["state"] == "READY"]

    def load(self, name: str) -> None:
        """Check that a model is ready. Raises Forbidden if not: starting containers is for
        management."""
        target = self.target(name)
        if not self.is_ready(target):
            hint = (
                "Management does: POST /v2/repository/models/NAME/load where http.admin is, or gRPC"
                " with http.token."
            )
            raise Forbidden(f"{name!r} has no container, and queries start none.", hint=hint)

    def unload(self, name: str) -> None:
        """Raise Forbidden: unloading is for management."""
        self.target(name)
        hint = (
            "Management does: POST /v2/repository/models/NAME/unload where http.admin is, or gRPC"
            " with http.token."
        )
        raise Forbidden(f"{name!r} is not unloaded by a client: others use it too.", hint=hint)

    # -- about a model

    def metadata(self, target: InferenceTarget) -> dict[str, object]:
        """Return the metadata of a target: its versions and tensors."""
        resolved, name, version = target
        known = self._node.catalog.view.versions.get(name, ())
        versions = (
            [version]
            if version
            else []
            if resolved.name
            else [str(m.version) for m in known if not m.retired_us]
        )
        body: dict[str, object] = {
            "name": name,
            **({"versions": versions} if versions else {}),
            "platform": "clipper",
        }
        inputs, outputs = self._tensors(resolved)
        return {**body, "inputs": inputs, "outputs": outputs}

    def _tensors(self, resolved: ResolvedApplication) -> tuple[codec.Described, codec.Described]:
        first = self._first(resolved)
        named = outputs_of(resolved.cores.values())
        output = "any" if first is None else str(named) if named else self._output_of(first)
        schema = Schema.of(str(input_of(resolved)), output)
        outputs = schema.output_specs(codec.OUTPUT)
        if resolved.output_name:
            outputs = tuple(spec for spec in outputs if spec.name == resolved.output_name)
        return codec.described(schema.input_specs(codec.INPUT)), codec.described(outputs)

    def _output_of(self, model: Model) -> str:
        """Return the output type, as registered or as found by the warm-up of a container."""
        if model.output != "any":
            return model.output
        return str(self._node.stats()["models"].get(str(model.id), {}).get("output", "any"))

    def _first(self, resolved: ResolvedApplication) -> Model | None:
        if not resolved.models:
            return None
        found = resolved.on_demand.get(resolved.models[0])
        return (
            found.record
            if found is not None
            else self._node.catalog.view.record(resolved.models[0])
        )

    def config(self, target: InferenceTarget) -> dict[str, object]:
        """Return the target's configuration in the form of Triton's ModelConfig; dims are those
        of one row."""
        first = self._first(target.resolved)
        size_max = first.batching.size_max if first is not None else 1
        inputs, outputs = (
            [
                {
                    "name": t["name"],
                    "data_type": _config_type(t["datatype"]),
                    "dims": t["shape"][1:],
                }
                for t in tensors
            ]
            for tensors in self._tensors(target.resolved)
        )
        about = {
            "name": target.name,
            "platform": "clipper",
            "backend": "clipper",
            "max_batch_size": size_max,
        }
        return {**about, "input": inputs, "output": outputs}

    def waits_for_types(
        self, target: InferenceTarget, request: codec.InferRequest | None = None
    ) -> bool:
        """Return whether the tensors of a mesh model are known only after its first load.

        request: a request that needs them; None: a question about them. The model of the target is
        being loaded: the question counts as a use.
        """
        several = request is None or len(request.inputs) > 1
        return several and not types_are_known(target.resolved)

    def wait_for_types(self, target: InferenceTarget, slo_ms: float | None = None) -> int:
        """Wait until a model's tensors are known; return the microseconds that it took. Blocks.

        slo_ms: the most to wait; None: the time of a query and a load. Raises DeadlineExceeded.
        """
        limit_us = self._node.slo_us(slo_ms, target.resolved.slo_us)
        return wait_for_types(target.resolved, target.name, limit_us)

    def is_ready(self, target: InferenceTarget) -> bool:
        """Return whether the target has a connected container, or can be loaded by the mesh."""
        if target.resolved.on_demand:  # it is loaded by its first query
            return True
        running = self._node.running()
        return any(str(id) in running for id in target.resolved.models)

    def statistics(self, name: str = "", version: str = "") -> dict[str, object]:
        """Return counts since the start, of one target or of all. Figures that are not measured
        are 0."""
        stats = self._node.stats()
        rows = [_of_application(name, row) for name, row in sorted(stats["applications"].items())]
        rows += [_of_model(name, row) for name, row in sorted(stats["models"].items())]
        if not name:
            return {"model_stats": rows}
        target = self.target(name, version)
        is_it = (target.name, target.answered_version or _THE_VERSION)
        found = [row for row in rows if (row["name"], row["version"]) == is_it]
        return {"model_stats": found or [_statistics(*is_it, 0, 0, {})]}

    # -- queries

    def rows(self, target: InferenceTarget, request: codec.InferRequest) -> Rows:
        """Return the queries of a request, in order. Raises InvalidInput."""
        if asks_for_answers(request):
            self.check_application(target)
        if request.outputs:
            self._check_outputs(target, request.outputs)
        type_ = input_of(target.resolved)
        if isinstance(type_, InputType):
            columns = target.resolved.columns
            if columns and {tensor.name for tensor in request.inputs} == {*columns}:
                return codec.rows_of_columns(request, columns)
            return codec.rows_of(request, type_)
        return NamedRows(*codec.columns_of(request, type_))

    def check_application(self, target: InferenceTarget) -> None:
        """Raise UnknownApplication for a model that is queried by its own name."""
        if not target.resolved.name:
            raise self.unknown_application(target.name)

    def unknown_application(self, name: str) -> UnknownApplication:
        """Return the error for what is no application."""
        return UnknownApplication.named(name[:200], self._node.catalog.view.applications)

    def _check_outputs(
        self, target: InferenceTarget, outputs: Sequence[codec.RequestedOutput]
    ) -> None:
        """Raise InvalidInput for an output that the model is known not to have.

        A model whose outputs are not known is queried; the response is checked then.
        """
        resolved, first = target.resolved, self._first(target.resolved)
        named = outputs_of(resolved.cores.values())
        if resolved.output_name:
            codec.check_names(outputs, [resolved.output_name])
        elif named is not None:
            codec.check_names(outputs, [*named.by_name])
        elif first is not None and first.output != "any":
            codec.check_names(outputs, [codec.OUTPUT])

    def is_array(self, rows: Rows) -> bool:
        """Return whether the rows are sent as one array. That may block: do not do it on an
        event loop."""
        return len(rows) > SINGLE_ROWS_MAX

    def slo_us(self, target: InferenceTarget, rows: Rows, slo_ms: float | None) -> int:
        """Return the SLO of a request in microseconds.

        slo_ms: of the request; None for the application's SLO, or a minute for an array. Raises
        InvalidInput if it is out of range.
        """
        if self.is_array(rows):
            return array_slo_in_us(slo_ms, self._node.config.limits.slo_ms_max)
        return self._node.slo_us(slo_ms, target.resolved.slo_us)

    def submit(
        self,
        target: InferenceTarget,
        rows: Rows,
        request: codec.InferRequest,
        slo_us: int,
        id: str = "",
        trace: Trace | None = None,
        owner: KeyOwner | None = None,
    ) -> PendingInference:
        """Submit the queries of a request. id: of the request; `request.id` is used if
        it is empty. owner: of the request's key. Raises InvalidInput; Forbidden for a priority
        that the key is not for."""
        resolved, user, salt = target.resolved, user_of(request), whole_number(request, "salt", 0)
        context = context_of(request)
        band = band_of(resolved, owner, whole_number(request, "priority", 0))
        if trace is not None:
            trace.start_query()
        pending = self._submit(
            resolved,
            rows,
            user,
            slo_us,
            salt,
            context,
            id or (request.id if fits_id(request.id) else ""),
            band,
        )
        pending.is_whole = asks_for_answers(request)
        if trace is not None:
            trace.end_query(resolved.name, pending.futures)
        return pending

    def _submit(
        self,
        resolved: ResolvedApplication,
        rows: Rows,
        user: str | None,
        slo_us: int,
        salt: int,
        context: object,
        id: str,
        band: int,
    ) -> PendingInference:
        if self.is_array(rows):
            if context is not None:
                raise InvalidInput(
                    f"an array of more than {SINGLE_ROWS_MAX} rows has no context.",
                    hint="Send fewer rows at once.",
                )
            return PendingInference(
                [
                    predict_array(
                        resolved,
                        rows.columns if isinstance(rows, NamedRows) else rows,
                        user,
                        slo_us,
                        salt,
                        (),
                        band,
                    )
                ],
                resolved,
                True,
            )
        return PendingInference(
            [predict(resolved, row, user, slo_us, salt, context, id, (), band) for row in rows],
            resolved,
            False,
        )


def timeout_ms(request: codec.InferRequest) -> float | None:
    """Return `parameters.timeout` (microseconds) in milliseconds; None if it is missing or 0.

    Raises InvalidInput for `slo_ms`, which is a word of other requests and must not be ignored.
    """
    if "slo_ms" in request.parameters:
        raise InvalidInput(
            "parameters.slo_ms is not known here.",
            hint="Write parameters.timeout, in microseconds.",
        )
    timeout_us = whole_number(request, "timeout", 0)
    return timeout_us / 1000 if timeout_us else None


def whole_number(request: codec.InferRequest, key: str, otherwise: int) -> int:
    """Return a parameter that is a whole number from 0, also as text. Raises InvalidInput."""
    value = request.parameters.get(key, otherwise)
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidInput(f"parameters.{key} = {str(value)[:40]!r}: it is a whole number from 0.")
    return value


def context_of(request: codec.InferRequest) -> object:
    """Return `parameters.context`: a list, or a string of JSON, as gRPC's parameters are no
    lists."""
    context = request.parameters.get("context")
    if isinstance(context, str):
        try:
            context = msgspec.json.decode(context)
        except msgspec.DecodeError as error:
            raise InvalidInput(
                f"parameters.context is not JSON: {error}.", hint="Write '[0.5, 2]'."
            ) from None
    return context


def _beside(answer: Answer) -> dict[str, object]:
    """Return further parts of an answer as parameters; nested values are strings of JSON."""
    parameters: dict[str, object] = {}
    if answer.request_id:
        parameters["request_id"] = answer.request_id
    if answer.decided_by not in ("", "all"):
        parameters["decided_by"] = answer.decided_by
    if answer.set:
        parameters["set"] = to_json(answer.set).decode()
    if answer.qualifiers:
        parameters["qualifiers"] = to_json(
            {str(model): given for model, given in answer.qualifiers.items()}
        ).decode()
    return parameters


def user_of(request: codec.InferRequest) -> str | None:
    """Return `parameters.user`. Raises InvalidInput."""
    user = request.parameters.get("user")
    if user is not None and not isinstance(user, str):
        raise InvalidInput("parameters.user is a string.")
    return user


# -- rows of the index and of the statistics


def _row(name: str, version: str, is_ready: bool) -> dict[str, object]:
    state = (
        {"state": "READY", "reason": ""}
        if is_ready
        else {"state": "UNAVAILABLE", "reason": "no container is connected"}
    )
    return {"name": name, **({"version": version} if version else {}), **state}


def _config_type(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def _of_application(name: str, row: QueryStats) -> dict[str, object]:
    answers = row["answers"]
    metadata = {
        "queue": {"count": row["queries"], "ns": 0},
        "success": {"count": answers["ok"], "ns": 0},
        "fail": {"count": sum(answers["default"].values()), "ns": 0},
    }
    return _statistics(name, _THE_VERSION, row["queries"], row["queries"], metadata)


def _of_model(id: str, row: ModelStats) -> dict[str, object]:
    name, _, version = id.partition(":")
    evaluated, hits = row["ended"]["OK"], row["hits"] + row["joined"]
    latency = row["latency_us"]
    spent_ns = round(latency.count * latency.mean * 1000) if latency.count else 0
    metadata = {
        "success": {"count": evaluated + hits, "ns": spent_ns},
        # perf_analyzer uses the version whose count changes
        "queue": {"count": evaluated + hits, "ns": 0},
        "fail": {"count": sum(row["ended"].values()) - evaluated, "ns": 0},
        "cache_hit": {"count": hits, "ns": 0},
        "cache_miss": {"count": row["evaluated"], "ns": 0},
    }
    return _statistics(name, version, row["evaluated"], row["batches"], metadata)


def _statistics(
    name: str, version: str, inferences: int, executions: int, details: Mapping[str, object]
) -> dict[str, object]:
    keys = (
        "success",
        "fail",
        "queue",
        "compute_input",
        "compute_infer",
        "compute_output",
        "cache_hit",
        "cache_miss",
    )
    return {
        "name": name,
        "version": version,
        "last_inference": 0,
        "inference_count": inferences,
        "execution_count": executions,
        "inference_stats": {key: details.get(key, _NOTHING) for key in keys},
    }
