"""The service `PServer` of the parameter server's design document. See docs/params-reference.md.

A shard answers for its own ids and names only; for others it names their shard, in the error and in
the trailing metadata `shard`. Values without a field in the messages are metadata: `worker` and
`sequence` of a push (they identify a repetition), `scale`, `step` and `check`; `cursor` of answers
that need several messages; `follower` and `serial` of clients that follow rows.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import msgspec
import numpy as np
from google.protobuf.message import Message

from clipper.errors import InvalidInput, ShardAway, StateLost, TooLarge, TypeConflict, UnknownTable
from clipper.frontend.grpc.call_context import CallContext
from clipper.frontend.params_grpc.followers import RowFollowers, weights
from clipper.frontend.params_grpc.shard_client import LocalShardConnection
from clipper.frontend.params_grpc.tensors import (
    F32,
    Ids,
    ids_in,
    tensor_of,
    tensor_of_bytes,
    values_in,
)
from clipper.frontend.protocols import message
from clipper.params.partition import shard_of_name
from clipper.params.shard.parameters import Parameters
from clipper.params.shard.shard import Shard
from clipper.params.tables import checked, optimizer_in
from clipper.spec.table import TableSpec
from clipper_container.params.frames import TABLES_MAX
from clipper_container.params.rows import shards_of_ids

SERVICE: Final = "PServer"
# names in the document's text
ALIASES: Final = {
    "SynchronizeEmbedding": "synchronize_embedding",
    "GetReplica": "get_replica",
}
FOLLOWER_NAME_MAX: Final = 100
_START: Final = "0,0"
_BY_PIECES: Final = "Request it in parts: metadata cursor, from 0,0 on."
_DTYPES: Final = {"f32": "FP32", "f16": "FP16"}
# names of initializers that Keras workers send
_KERAS: Final[dict[str, tuple[str, dict[str, float]]]] = {
    "": ("uniform", {}),
    "ones": ("constant", {"value": 1.0}),
    "random_uniform": ("uniform", {}),
    "random_normal": ("normal", {}),
    "glorot_uniform": ("glorot", {}),
}


class WrongShard(InvalidInput):
    """The id or name belongs to another shard. shard: its number."""

    slug = "other-shard"

    def __init__(self, what: str, mine: int, shard: int, shards: int) -> None:
        super().__init__(f"{what} is not shard {mine}'s of {shards}.", hint=f"Use shard {shard}.")
        self.shard = shard


class _LongAnswer(TooLarge):
    """The answer does not fit into one message."""

    grpc_code = "RESOURCE_EXHAUSTED"
    slug = "long-answer"


class ShardCall:
    """One call. metadata: by name; of repeated names the last value. trailing: metadata of the
    reply."""

    __slots__ = ("metadata", "trailing")

    def __init__(self, context: CallContext) -> None:
        self.metadata: dict[str, str | bytes] = dict(context.invocation_metadata() or ())
        self.trailing: dict[str, str] = {}

    def whole(self, name: str) -> int | None:
        """Return an integer of the metadata, or None if it is missing. Raises InvalidInput."""
        text = self.metadata.get(name)
        if text is None:
            return None
        if not (
            isinstance(text, str)
            and text.isascii()
            and text.isdecimal()
            and len(text) <= 20
            and int(text) < 1 << 64
        ):
            raise InvalidInput(f"metadata {name}: {text!r} is not an integer from 0 to 2^64 - 1.")
        return int(text)

    def number(self, name: str) -> float | None:
        """Return a number of the metadata, or None if it is missing. Raises InvalidInput."""
        text = self.metadata.get(name)
        try:
            return None if text is None else float(text)
        except ValueError:
            raise InvalidInput(f"metadata {name}: {text!r} is not a number.") from None


class ParamsService:
    """The methods of the service. Threads: the event loop's. Each raises the errors of the
    shard's calls."""

    def __init__(self, shard: Shard, core: LocalShardConnection) -> None:
        self._shard, self._connection = shard, core
        self._number, self._shards = shard.config.number, shard.config.shards
        self._bytes_max = shard.config.settings.grpc_message_bytes_max
        self.followers = RowFollowers(shard)
        self._optimizer, self._optimizer_settings = optimizer_in(
            shard.config.settings.grpc_optimizer
        )
        self.methods: dict[str, Callable[[Message, ShardCall], Awaitable[Message]]] = {
            "pull_variable": self.pull_variable,
            "pull_embedding_vector": self.pull_embedding_vector,
            "push_model": self.push_model,
            "push_gradient": self.push_gradient,
            "get_replica": self.get_replica,
            "synchronize_embedding": self.synchronize_embedding,
        }

    # -- a worker's

    async def pull_variable(self, request: Message, call: ShardCall) -> Message:
        """Return the variables that changed since the request's version."""
        if self._shard.core.state_lost:
            # the worker then pushes its model, which reinitializes the shard
            return message("PullVariableResponse")(model_init_status=False)
        reply = await self._connection.call("pull_variables", since=request.version)
        answer = message("PullVariableResponse")(model_init_status=bool(reply["initialized"]))
        answer.model.version = reply["version"]
        self._check_fits(sum(value.nbytes for value in reply["variables"].values()))
        answer.model.variables.extend(
            tensor_of(name, value) for name, value in reply["variables"].items()
        )
        return answer

    async def pull_embedding_vector(self, request: Message, call: ShardCall) -> Message:
        """Return rows of a table. Metadata `dtype`: f32, f16."""
        parameters, dtype = self._ready(), str(call.metadata.get("dtype", "f32"))
        if dtype not in _DTYPES:
            raise InvalidInput(
                f"metadata dtype: {dtype!r}, where {', '.join(_DTYPES)} are possible."
            )
        place, ids = parameters.place(request.name), ids_in(request.ids)
        number, table = parameters.table_numbers[place], parameters.tables[place]
        self._check_mine(request.name, ids)
        self._check_fits(ids.size * table.dim * 4)
        rows = await self._connection.pull(number, ids, dtype)
        return tensor_of_bytes(request.name, _DTYPES[dtype], (ids.size, table.dim), rows)

    async def push_model(self, request: Message, call: ShardCall) -> Message:
        """Set initial values. Trailing metadata `accepted`: true if these values are the first."""
        variables: dict[str, F32] = {}
        for each in request.variables:
            self._take_variable(each, variables)
        specs = [self._spec(info) for info in request.embedding_table_info]
        if self._shard.core.state_lost:
            await self._connection.call("begin_anew")
        numbers = self._ready().numbers()
        if len({spec.name for spec in specs}) < len(specs):
            raise InvalidInput("a table comes twice.")
        for spec in specs:
            place = numbers.get(spec.name, 0) % TABLES_MAX
            there = self._ready().specs[place] if spec.name in numbers else spec
            if there.dim != spec.dim:
                raise TypeConflict(
                    f"table {spec.name!r} is there, with rows of {there.dim} floats, not"
                    f" {spec.dim}."
                )
        for spec in specs:
            if spec.name not in numbers:
                await self._connection.call("create", spec=msgspec.to_builtins(spec))
        how = {"optimizer": self._optimizer, "optimizer_settings": self._optimizer_settings}
        reply = await self._connection.call(
            "push_model", variables=variables, version=max(0, request.version), **how
        )
        call.trailing |= {"accepted": _yes(reply["accepted"]), "version": str(reply["version"])}
        return message("google.protobuf.Empty")()

    async def push_gradient(self, request: Message, call: ShardCall) -> Message:
        """Apply gradients.

        Trailing metadata: `why` they were not accepted, `repeated`, and the `step` in synchronous
        training.
        """
        variables, rows = self._gradients(request.gradients)
        fields: dict[str, object] = {
            "variables": variables,
            "rows": rows,
            "version": request.model_version,
        }
        fields |= {key: call.whole(key) or 0 for key in ("worker", "sequence")} | {
            "scale": call.number("scale") or 0.0
        }
        if (step := call.whole("step")) is not None:
            fields["step"] = step
        if call.metadata.get("check") == "true":
            fields["check"] = True
        found = await self._connection.call("push_gradients", **fields)
        call.trailing |= {
            key: _yes(found[key]) for key in ("why", "repeated", "step") if key in found
        }
        return message("PushGradientResponse")(
            accepted=bool(found["accepted"]), model_version=found["version"]
        )

    # -- of replicas

    async def get_replica(self, request: Message, call: ShardCall) -> Message:
        """Return a replica of another shard, even before this shard is ready: others recover
        from it."""
        of, copies = request.replica_index, self._shard.copies
        if of not in copies:
            at = ", ".join(
                str((of + 1 + k) % self._shards) for k in range(self._shard.config.replicas)
            )
            hint = f"Those of shard {of} are in {at}." if at and 0 <= of < self._shards else ""
            raise InvalidInput(
                f"shard {self._number} of {self._shards} has no replica of shard {of}.", hint=hint
            )
        copy = copies[of].replica
        if copy is None:
            raise ShardAway(
                f"shard {self._number} has no whole replica of shard {of} yet.",
                hint="Try again soon.",
            )
        call.trailing |= {"epoch": str(copy.epoch), "version": str(copy.version)}
        return self._rows_of(copy.parameters, call)

    async def synchronize_embedding(self, request: Message, call: ShardCall) -> Message:
        """Return the rows that changed for a follower.

        Metadata: `follower`, its name; `serial`, of the last reply that it has received; `cursor`,
        as in `get_replica`, for a full sync. Trailing metadata: `serial`; `anew`, a full sync that
        replaces all rows; `more`, call again at once.
        """
        parameters, of = self._ready(), request.replica_index
        if of != self._number:
            hint = f"Use shard {of}." if 0 <= of < self._shards else ""
            raise InvalidInput(
                f"these are the rows of shard {self._number}, not of {of}.", hint=hint
            )
        name, cursor = (
            str(call.metadata.get("follower", ""))[:FOLLOWER_NAME_MAX],
            call.metadata.get("cursor"),
        )
        if cursor not in (None, _START):
            return self._rows_of(parameters, call)
        follower = self.followers.of(name, call.whole("serial")) if cursor is None else None
        if follower is None:
            self._check_fits(0 if cursor else _weights_bytes(parameters), _BY_PIECES)
            self.followers.start_sync(name)
            call.trailing |= {"anew": "true", "serial": "0"}
            return self._rows_of(parameters, call)
        answer = message("SynchronizeEmbeddingResponse")()
        answer.embedding_vectors.extend(follower.news(parameters, self._bytes_max))
        call.trailing |= {
            "serial": str(follower.serial),
            **({"more": "true"} if follower.count else {}),
        }
        return answer

    def _rows_of(self, parameters: Parameters, call: ShardCall) -> Message:
        """Return all rows, or with `cursor` as many as fit into a message, and the next cursor."""
        answer, size = message("SynchronizeEmbeddingResponse")(), 0
        cursor, by_pieces = _cursor(call.metadata.get("cursor")), "cursor" in call.metadata
        while cursor is not None and cursor[0] < len(parameters.tables):
            piece, following = parameters.piece(cursor)
            for part in piece.get("rows", ()):
                if not parameters.specs[part["table"] % TABLES_MAX].name:
                    continue  # it was dropped
                dim = parameters.specs[part["table"] % TABLES_MAX].dim
                nbytes = part["ids"].size * (4 * dim + 8)
                if size and by_pieces and size + nbytes > self._bytes_max:
                    call.trailing["cursor"] = f"{cursor[0]},{cursor[1]}"
                    return answer
                size += nbytes
                self._check_fits(0 if by_pieces else size, _BY_PIECES)
                answer.embedding_vectors.append(weights(parameters, part))
            cursor = following
        return answer

    # -- what is sound, and this shard's

    def _ready(self) -> Parameters:
        if self._shard.core.state_lost:
            hint = (
                "Push the model again: pull_variable reports that it is not initialized. Or restore"
                " a snapshot."
            )
            raise StateLost(f"shard {self._number} came back without what it had.", hint=hint)
        if not self._shard.core.ready:
            raise ShardAway(f"shard {self._number} recovers.", hint="Try again soon.")
        return self._shard.parameters

    def _check_mine(self, table: str, ids: Ids) -> None:
        whose = shards_of_ids(ids, self._shards)
        if (wrong := np.flatnonzero(whose != self._number)).size:
            at = int(wrong[0])
            raise WrongShard(
                f"id {ids[at]} of table {table!r}", self._number, int(whose[at]), self._shards
            )

    def _check_fits(
        self, nbytes: int, hint: str = "Request fewer, or raise params.grpc_message_bytes_max."
    ) -> None:
        if nbytes > self._bytes_max:
            raise _LongAnswer(
                f"the answer would have {nbytes} bytes, and {self._bytes_max} are the most.",
                hint=hint,
            )

    def _take_variable(self, tensor: Message, into: dict[str, F32]) -> None:
        whose = shard_of_name(tensor.name, self._shards)
        if whose != self._number:
            raise WrongShard(f"variable {tensor.name!r}", self._number, whose, self._shards)
        if tensor.name in into:
            raise InvalidInput(f"variable {tensor.name!r} comes twice.")
        into[tensor.name] = values_in(tensor)

    def _spec(self, info: Message) -> TableSpec:
        if not 1 <= len(info.dim) <= 2:
            raise InvalidInput(
                f"table {info.name!r}: dim is {list(info.dim)[:8]}, where [width] or [rows, width]"
                " is meant."
            )
        name, settings = _KERAS.get(info.initializer, (info.initializer, {}))
        dim, how = int(info.dim[-1]), (self._optimizer, self._optimizer_settings)
        return checked(
            TableSpec(info.name, dim, *how, initializer=name, initializer_settings=settings)
        )

    def _gradients(
        self, tensors: Iterable[Message]
    ) -> tuple[dict[str, F32], dict[str, dict[str, Ids | F32]]]:
        """Return gradients of variables by name, and of rows by table, for `push_gradients`."""
        parameters = self._ready()
        variables: dict[str, F32] = {}
        rows: dict[str, list[tuple[Ids, F32]]] = {}
        for each in tensors:
            if each.name in parameters.numbers():
                if part := self._rows(each):
                    rows.setdefault(each.name, []).append(part)
            elif len(each.indices):
                self._check_once(each.name, variables)
                variables[each.name] = _scattered(each, _shape_of(parameters, each.name))
            else:
                self._take_variable(each, variables)
        return variables, {name: _joined(name, parts) for name, parts in rows.items()}

    def _rows(self, tensor: Message) -> tuple[Ids, F32] | None:
        if not len(tensor.indices) and not tensor.content:
            return None  # the batch had no ids of this shard
        ids, values = ids_in(tensor.indices), values_in(tensor)
        if values.ndim != 2 or len(values) != ids.size:
            raise InvalidInput(
                f"table {tensor.name!r}: {ids.size} indices, and gradients {list(values.shape)}."
            )
        self._check_mine(tensor.name, ids)
        return ids, values

    def _check_once(self, name: str, variables: dict[str, F32]) -> None:
        if name in variables:
            raise InvalidInput(f"variable {name!r} comes twice.")


def _yes(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cursor(text: str | bytes | None) -> list[int] | None:
    if text is None:
        return [0, 0]
    parts = str(text).split(",")
    if len(parts) != 2 or not all(
        part.isascii() and part.isdecimal() and len(part) < 19 for part in parts
    ):
        raise InvalidInput(
            f"metadata cursor: {text!r}.",
            hint="Begin with 0,0, and go on with the cursor of each answer.",
        )
    return [int(part) for part in parts]


def _weights_bytes(parameters: Parameters) -> int:
    """Return the size of all rows in messages."""
    return sum(len(table) * (4 * table.dim + 8) for table in parameters.tables)


def _shape_of(parameters: Parameters, name: str) -> tuple[int, ...]:
    for one in tuple(parameters.dense.variables):
        if one.name == name:
            return one.value.shape
    raise UnknownTable.named(name, parameters.numbers())


def _scattered(tensor: Message, shape: tuple[int, ...]) -> F32:
    """Return the dense gradient of a variable of which only some rows were sent."""
    ids, values = ids_in(tensor.indices), values_in(tensor)
    if values.shape != (ids.size, *shape[1:]) or not shape:
        gave = f"{ids.size} rows of its gradient are not {list(values.shape)}"
        raise InvalidInput(f"variable {tensor.name!r} is {list(shape)}: {gave}.")
    if ids.size and (ids.min() < 0 or ids.max() >= shape[0]):
        raise InvalidInput(
            f"variable {tensor.name!r} has rows 0 to {shape[0] - 1}: {ids.min()} to {ids.max()}"
            " came."
        )
    found = np.zeros(shape, np.float32)
    np.add.at(found, ids, values)
    return found


def _joined(table: str, parts: list[tuple[Ids, F32]]) -> dict[str, Ids | F32]:
    widths = {values.shape[1] for _, values in parts}
    if len(widths) > 1:
        raise InvalidInput(
            f"table {table!r}: gradients of {' and '.join(map(str, sorted(widths)))} floats a row."
        )
    if len(parts) == 1:
        return {"ids": parts[0][0], "gradients": parts[0][1]}
    return {
        "ids": np.concatenate([ids for ids, _ in parts]),
        "gradients": np.concatenate([values for _, values in parts]),
    }
