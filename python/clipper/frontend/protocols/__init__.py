"""The protobuf messages of gRPC, from `protocols.binpb`, the compiled form of the .proto files
here.

They are in a descriptor pool of their own. In protobuf's default pool, a process that also imports
tritonclient or kserve would define `inference.ModelInferRequest` twice, which protobuf rejects.
Generated Python code is not used: it requires the default pool, and a protobuf at least as new as
its compiler. `python tests/frontend/test_protocols.py` compiles the files; the test of the same
name fails if that was forgotten.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

FOLDER = Path(__file__).parent
COMPILED = FOLDER / "protocols.binpb"


@functools.cache
def pool() -> descriptor_pool.DescriptorPool:
    """Return the descriptor pool with all files."""
    files = descriptor_pb2.FileDescriptorSet.FromString(COMPILED.read_bytes())
    found = descriptor_pool.DescriptorPool()
    for file in files.file:
        found.Add(file)
    return found


@functools.cache
def message(name: str) -> type[Message]:
    """Return the class of a message by its full name, such as `inference.ModelInferRequest`."""
    found: type[Message] = message_factory.GetMessageClass(pool().FindMessageTypeByName(name))
    return found


def methods_of(service: str) -> Iterator[MethodDescriptor]:
    """Yield the descriptors of a service's methods."""
    yield from pool().FindServiceByName(service).methods
