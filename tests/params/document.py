"""The design document's appendix for a stock gRPC client: its messages, written by hand, and a
worker that uses nothing else."""

import functools
from typing import Any

import grpc
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PATIENCE_S = 20.0
_KINDS = {"bool": 8, "string": 9, "bytes": 12, "int32": 5, "int64": 3}
_MESSAGES = {
    "Tensor": [
        "string name",
        "DataType data_type",
        "repeated int64 dim",
        "bytes content",
        "repeated int64 indices",
    ],
    "EmbeddingTableInfo": ["string name", "repeated int64 dim", "string initializer"],
    "Model": [
        "int64 version",
        "repeated Tensor variables",
        "repeated EmbeddingTableInfo embedding_table_info",
    ],
    "PullVariableRequest": ["int64 version"],
    "PullVariableResponse": ["bool model_init_status", "Model model"],
    "PushGradientRequest": ["int32 model_version", "repeated Tensor gradients"],
    "PushGradientResponse": ["bool accepted", "int32 model_version"],
    "PullEmbeddingVectorRequest": ["string name", "repeated int64 ids"],
    "SynchronizeEmbeddingRequest": ["int32 replica_index"],
    "SynchronizeEmbeddingResponse": ["repeated Tensor embedding_vectors"],
    "Empty": [],
}
DATA_TYPES = ("BOOL", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64")
CALLS = {
    "pull_variable": ("PullVariableRequest", "PullVariableResponse"),
    "pull_embedding_vector": ("PullEmbeddingVectorRequest", "Tensor"),
    "push_model": ("Model", "Empty"),
    "push_gradient": ("PushGradientRequest", "PushGradientResponse"),
    "get_replica": ("SynchronizeEmbeddingRequest", "SynchronizeEmbeddingResponse"),
    "synchronize_embedding": ("SynchronizeEmbeddingRequest", "SynchronizeEmbeddingResponse"),
    "GetReplica": ("SynchronizeEmbeddingRequest", "SynchronizeEmbeddingResponse"),
    "SynchronizeEmbedding": ("SynchronizeEmbeddingRequest", "SynchronizeEmbeddingResponse"),
}


@functools.cache
def document() -> dict[str, Any]:
    """Return the classes of the document's messages by their names."""
    file = descriptor_pb2.FileDescriptorProto(name="elasticdl.proto", syntax="proto3")
    for name, fields in _MESSAGES.items():
        made = file.message_type.add(name=name)
        if name == "Tensor":
            kinds = made.enum_type.add(name="DataType")
            for number, word in enumerate(DATA_TYPES):
                kinds.value.add(name=word, number=number)
        for number, field in enumerate(fields, 1):
            *repeated, kind, word = field.split()
            one = made.field.add(name=word, number=number, label=3 if repeated else 1)  # type: ignore[arg-type]
            if kind in _KINDS:
                one.type = _KINDS[kind]  # type: ignore[assignment]
            else:
                one.type, one.type_name = (
                    (14, ".Tensor.DataType") if kind == "DataType" else (11, f".{kind}")
                )  # type: ignore[assignment]
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # type: ignore[no-untyped-call]
    found = {name: pool.FindMessageTypeByName(name) for name in _MESSAGES}  # type: ignore[no-untyped-call]
    return {name: message_factory.GetMessageClass(one) for name, one in found.items()}


def tensor(name: str, values: Any, ids: Any = (), dtype: str = "float32") -> Any:
    array = np.array(values, dtype, order="C")
    kind = {"float16": 4, "float32": 5, "float64": 6}[dtype]
    return document()["Tensor"](
        name=name, data_type=kind, dim=array.shape, content=array.tobytes(), indices=list(ids)
    )


def array(tensor: Any) -> Any:
    kind = {"FP16": "float16", "FP32": "float32"}[DATA_TYPES[tensor.data_type]]
    return np.frombuffer(tensor.content, kind).reshape(tensor.dim)


class Shard:
    """A client of one shard's service: shard.push_model(version=..., variables=[...],
    metadata={...}) returns the response."""

    def __init__(self, address: str, token: str, credentials: Any = None, **more: Any) -> None:
        options = [("grpc.max_receive_message_length", -1), *more.items()]
        insecure = credentials is None
        self.channel = (
            grpc.insecure_channel(address, options)
            if insecure
            else grpc.secure_channel(address, credentials, options)
        )
        self._token = token
        self.trailing: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        request, response = (document()[one] for one in CALLS[name])
        call = self.channel.unary_unary(
            f"/PServer/{name}", request.SerializeToString, response.FromString
        )

        def ask(metadata: dict[str, Any] | None = None, **fields: Any) -> Any:
            headers = {"authorization": f"Bearer {self._token}", **(metadata or {})}
            pairs = [(key, str(value)) for key, value in headers.items()]
            answer, about = call.with_call(request(**fields), timeout=PATIENCE_S, metadata=pairs)
            self.trailing = dict(about.trailing_metadata())
            return answer

        return ask

    def refused(self, name: str, /, **fields: Any) -> tuple[str, str, dict[str, Any]]:
        """Return (code, text, trailing metadata) of the error of a call."""
        try:
            getattr(self, name)(**fields)
        except grpc.RpcError as error:
            return error.code().name, error.details(), dict(error.trailing_metadata())
        raise AssertionError(f"{name} was not refused")

    def close(self) -> None:
        self.channel.close()
