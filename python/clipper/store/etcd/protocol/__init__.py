"""The messages that etcd understands, made from `etcd.binpb`: the compiled form of etcd.proto.

They live in a descriptor pool of their own, for a process may hold another client of etcd that
defines the same names. `python tests/store/test_etcd_protocol.py` compiles the file anew; a test
fails while it has not been.
"""

import functools
from pathlib import Path
from typing import cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message as Message

FOLDER = Path(__file__).parent
COMPILED = FOLDER / "etcd.binpb"
_PACKAGE = "etcdserverpb"


@functools.cache
def pool() -> descriptor_pool.DescriptorPool:
    """Return the descriptor pool with etcd's messages."""
    files = descriptor_pb2.FileDescriptorSet.FromString(COMPILED.read_bytes())
    found = descriptor_pool.DescriptorPool()
    for file in files.file:
        found.Add(file)
    return found


@functools.cache
def message(name: str) -> type[Message]:
    """Return the class of a message, as `RangeRequest`."""
    return cast(
        "type[Message]",
        message_factory.GetMessageClass(pool().FindMessageTypeByName(f"{_PACKAGE}.{name}")),
    )


@functools.cache
def method(name: str) -> tuple[str, type[Message], type[Message]]:
    """Return (path, class of requests, class of responses) of a method, as `KV.Range`."""
    service, _, short = name.partition(".")
    found = pool().FindServiceByName(f"{_PACKAGE}.{service}").FindMethodByName(short)
    return (
        f"/{_PACKAGE}.{service}/{short}",
        message(found.input_type.name),
        message(found.output_type.name),
    )
