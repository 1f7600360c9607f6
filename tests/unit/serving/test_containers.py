"""Admission of containers: HELLOs handed to an engine without sockets."""

import msgpack
import pytest

from clipper.credentials.container_tokens import ContainerTokens, made_by_hand
from clipper.errors import UnknownModel
from clipper.serving.models.containers import Containers, Hello, Seat
from clipper.types import Batching, InputType, VersionedModel
from clipper_container.wire import frames as wire
from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model
from tests.memory_container import wait_until


class Node:
    """An engine stepped by the test, and the Containers above it."""

    def __init__(self, batching=Batching()):  # noqa: B008
        self.engine = Engine(manual_clock=True, cache_bytes_max=1 << 20, tasks_max=1024)
        self.model = Model(self.engine, "m:1", 1, "f64", (4,))
        self.batching, self.changes = batching, []
        self.tokens = ContainerTokens("secret")
        self.containers = Containers(
            [self.engine], self.tokens, 500, 1 << 20, self.find, self.changes.append
        )
        self.containers.start()

    def find(self, hello, holder):
        if hello.name != "m":
            raise UnknownModel.named(hello.name, ["m"])
        return Seat(self.model, InputType.parse("f64[4]"), InputType.parse("f64"), self.batching)

    def send(self, conn, **fields):
        hello = {
            "name": "m",
            "version": 1,
            "input": "f64[4]",
            "output": "any",
            "token": "secret",
            **fields,
        }
        hello = {key: value for key, value in hello.items() if value is not None}
        frame = b"".join(wire.control_frame(wire.Kind.HELLO, wire.pack_map(hello)))
        assert self.engine.receive(conn, frame, self.engine.now_us())

    def next_frame(self, conn):
        """Return the next frame that the server sends to a connection: its kind and payload."""
        data = bytearray()

        def more():
            self.engine.step(self.engine.now_us())
            data.extend(self.engine.outgoing(conn, self.engine.now_us()))
            return len(data) >= wire.HEADER_BYTES

        wait_until(more)
        header = wire.decode_header(bytes(data[: wire.HEADER_BYTES]))
        return wire.Kind(header.kind), bytes(data[wire.HEADER_BYTES :])

    def greet(self, **fields):
        conn = self.engine.open(self.engine.now_us())
        self.send(conn, **fields)
        return conn, *self.next_frame(conn)


@pytest.fixture
def node():
    made = Node()
    yield made
    made.containers.stop()


M = VersionedModel("m", 1)


def test_a_container_is_welcomed_attached_and_disconnected(node):
    conn, kind, payload = node.greet(replica=3, pid=77)
    assert kind is wire.Kind.WELCOME
    welcome = {
        "conn": conn,
        "heartbeat_ms": 500,
        "payload_bytes_max": 1 << 20,
        "accuracy": True,
        "qualifiers": True,
        "partial": True,
        "parts_ahead": 32,
        "crc": False,
        "shared": False,
    }
    assert msgpack.unpackb(payload) == welcome
    assert node.containers.wait_for(M, 1, 20)
    (replica,) = node.containers.of(M)
    assert (replica.conn, replica.hello.replica, replica.hello.pid) == (conn, 3, 77)
    assert node.engine.replica(conn)["number"] == 3
    assert node.changes == [M]
    node.engine.lost(conn, node.engine.now_us())
    wait_until(lambda: node.containers.of(M) == [] and node.changes == [M, M])


@pytest.mark.parametrize("requested", [False, True])
def test_payloads_are_checked_where_the_container_requests_it(node, requested):
    conn, kind, payload = node.greet(crc=requested)
    assert (kind, msgpack.unpackb(payload)["crc"]) == (wire.Kind.WELCOME, requested)
    assert node.containers.wait_for(M, 1, 20)
    assert node.engine.replica(conn)["number"] == 0


def test_a_hello_that_the_server_fails_on_is_answered(node):
    def fail(hello, holder):
        raise RuntimeError("broken")

    node.containers._find = fail
    _, kind, payload = node.greet()
    assert kind is wire.Kind.REFUSE
    assert "the server failed on this HELLO" in payload.decode()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"token": "wrong"}, "the token is missing or wrong"),
        ({"token": None}, "the token is missing or wrong"),
        ({"token": "sécret"}, "the token is missing or wrong"),
        ({"protocol": 4}, "supports protocols 1 and 2, not 4; install a matching"),
        ({"name": "other"}, "no model 'other'"),
        ({"name": "A"}, "bad model name"),
        ({"name": None}, "cannot be read"),
        ({"version": "1"}, "cannot be read"),
        ({"input": "f64[5]"}, "'m:1' is registered with input f64[4], this container takes f64[5]"),
        ({"output": "str"}, "'m:1' is registered with output f64, this container gives str"),
        ({"input": "?"}, "bad input type"),
        ({"protocol": 1, "input": "any"}, "protocol 1 must state an input type"),
        ({"protocol": 1, "input": '{"x": "u8[8]"}'}, "protocol 1 has no named tensors"),
        ({"input": '{"x": "u9[8]"}'}, "tensor 'x': 'u9[8]' is not a type"),
        ({"replica": "x" * 60_000}, "cannot be read"),
        ({"replica": -5}, "replica is -5: replica is a whole number from 0"),
        ({"replica": 1 << 40}, "replica is 1099511627776"),
        ({"batch_max": -1}, "batch_max is -1"),
        ({"version": -1}, "version is -1"),
    ],
)
def test_a_container_is_refused_with_the_reason(node, fields, why):
    conn, kind, payload = node.greet(**fields)
    assert kind is wire.Kind.REFUSE
    assert why in payload.decode()
    assert node.engine.wants_close(conn)
    assert node.containers.of(M) == []


TOKENS = {
    "of another version": lambda node: node.tokens.of_replica(VersionedModel("m", 2), 0),
    "of another replica": lambda node: node.tokens.of_replica(M, 1),
    "of another model's copy": lambda node: node.tokens.of_copy("other", "a"),
    "of another model's box": lambda _: made_by_hand("secret", "box", "other"),
}


@pytest.mark.parametrize("what", TOKENS)
def test_a_token_is_for_its_model_alone(node, what):
    conn, kind, payload = node.greet(token=TOKENS[what](node))
    assert kind is wire.Kind.REFUSE
    assert b"the token is not for 'm:1' as replica 0, but for " in payload
    assert node.engine.wants_close(conn)


def forged(node):
    said, _, code = node.tokens.of_replica(VersionedModel("m", 2), 0).rpartition(".")
    mine = node.tokens.of_replica(M, 0).rpartition(".")[0]
    assert mine != said
    return f"{mine}.{code}"


@pytest.mark.parametrize(
    "token",
    [
        forged,
        lambda node: node.tokens.of_replica(M, 0)[:-3],
        lambda node: node.tokens.of_replica(M, 0) + "x" * 2000,
        lambda _: ContainerTokens("secret").of_replica(M, 0),
        lambda _: made_by_hand("Secret", "box", "m"),
        lambda _: "ct_",
        lambda _: "ct_e30.",
        lambda _: "",
    ],
)
def test_a_token_that_was_not_made_here_is_refused(node, token):
    _, kind, payload = node.greet(token=token(node))
    assert kind is wire.Kind.REFUSE
    assert b"the token is missing or wrong" in payload


@pytest.mark.parametrize(
    "token",
    [
        lambda node: node.tokens.of_replica(M, 0),
        lambda node: node.tokens.of_copy("m", "a"),
        lambda _: made_by_hand("secret", "box", "m"),
        lambda _: made_by_hand("secret", "box", "m", 1),
    ],
)
def test_a_token_is_good_for_one_connection(node, token):
    first, kind, _ = node.greet(token=token(node))
    assert kind is wire.Kind.WELCOME
    other, _, _ = node.greet(token=made_by_hand("secret", "other", "m"))
    operators, _, _ = node.greet()
    assert node.containers.wait_for(M, 3, 20)
    again, kind, _ = node.greet(token=token(node))
    assert kind is wire.Kind.WELCOME
    assert node.next_frame(first)[0] is wire.Kind.GOODBYE
    node.engine.lost(first, node.engine.now_us())
    wait_until(lambda: {one.conn for one in node.containers.of(M)} == {other, operators, again})


def test_the_models_batches_are_bounded_by_both_sides():
    for requested, given in ((0, 8), (3, 3), (100, 8)):
        node = Node(Batching(mode="static", size_max=8))
        conn, kind, _ = node.greet(batch_max=requested)
        assert kind is wire.Kind.WELCOME
        wait_until(lambda node=node, conn=conn: node.engine.replica(conn) is not None)
        assert node.engine.replica(conn)["limit"] == given
        node.containers.stop()


def test_waiting_for_replicas(node):
    assert not node.containers.wait_for(M, 1, 0.01)
    assert node.containers.wait_for(M, 0, 0.01)
    node.greet()
    node.greet(replica=1)
    assert node.containers.wait_for(M, 2, 20)
    assert not node.containers.wait_for(M, 3, 60, hopeless=lambda: True)


def test_drained_it_gets_a_goodbye(node):
    conn, _, _ = node.greet(replica=0)
    other, _, _ = node.greet(replica=1)
    assert node.containers.wait_for(M, 2, 20)
    node.containers.drain(M, 0)
    assert node.next_frame(conn)[0] is wire.Kind.GOODBYE
    node.engine.step(node.engine.now_us())
    assert node.engine.outgoing(other, node.engine.now_us()) == b""


def test_hello_has_defaults():
    hello = Hello("m")
    assert (hello.id, hello.protocol, hello.input, hello.batch_max) == (M, 2, "any", 0)
