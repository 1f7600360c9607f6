"""The messages that gRPC carries, made from `protocols.binpb`: the compiled form of the .proto
files here.

They live in a descriptor pool of their own. In protobuf's default pool, a process that also imports
tritonclient or kserve would define `inference.ModelInferRequest` twice, and protobuf would refuse
the second. That is why there is no generated Python code: it knows the default pool only, and it
needs a protobuf at least as new as the compiler that wrote it. `python
tests/frontend/test_protocols.py` compiles the files anew; the test of the same name fails while it
has not been.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FOLDER = Path(__file__).parent
COMPILED = FOLDER / "protocols.binpb"


@functools.cache
def pool() -> Any:
    """The descriptors of every file, those it imports included."""
    files = descriptor_pb2.FileDescriptorSet.FromString(COMPILED.read_bytes())
    found = descriptor_pool.DescriptorPool()
    for file in files.file:
        found.Add(file)
    return found


@functools.cache
def message(name: str) -> Any:
    """The class of a message by its full name, as `inference.ModelInferRequest`."""
    return message_factory.GetMessageClass(pool().FindMessageTypeByName(name))


def methods_of(service: str) -> Iterator[Any]:
    """The descriptors of a service's methods."""
    yield from pool().FindServiceByName(service).methods
