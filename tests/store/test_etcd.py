"""Properties of etcd alone: kills, hangs, compaction, members, TLS, users."""

import base64
import contextlib
import random
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import ConfigError, ForkedProcess, LeaseLost, StoreError
from clipper.store import Event, Lease, Mirror, Put, Store, open_store
from clipper.store.etcd import channel as etcd_channel
from clipper.store.etcd import watch as etcd_watch
from clipper.store.etcd.address import parse_url
from clipper.store.etcd.store import EtcdStore
from tests.memory_container import wait_until
from tests.store.etcd_server import EtcdServer, started
from tests.threads import join


@pytest.fixture
def etcd_store(etcd_server: EtcdServer, tmp_path: Path) -> Iterator[Store]:
    with open_store(f"{etcd_server.url}/{tmp_path.name}") as store:
        yield store


@pytest.fixture
def lose_patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what makes the time short in which etcd has to answer: for when it does not."""

    def shorten() -> None:
        monkeypatch.setattr(etcd_channel, "PATIENCE_S", 0.5)
        monkeypatch.setattr(etcd_watch, "SILENCE_S", 0.2)
        monkeypatch.setattr(etcd_watch, "WATCHDOG_S", 0.6)

    return shorten


def put_surely(store: Store, key: str, value: bytes) -> None:
    """Put a key; repeat until it succeeds."""

    def tried() -> bool:
        with contextlib.suppress(StoreError):
            store.put(key, value)
            return True
        return False

    wait_until(tried, "etcd takes a write")


# -- what lies there


def test_records_are_etcds_own(etcd_server: EtcdServer, etcd_store: Store, tmp_path: Path) -> None:
    record = etcd_store.put("app/digits", b"hello")
    raw = base64.b64encode(f"{tmp_path.name}/app/digits".encode()).decode()
    (found,) = etcd_server.ask("kv/range", key=raw)["kvs"]
    assert base64.b64decode(found["value"]) == b"hello"
    assert int(found["mod_revision"]) == record.revision


def test_prefixes_are_stores_of_their_own(etcd_server: EtcdServer, tmp_path: Path) -> None:
    url = f"{etcd_server.url}/{tmp_path.name}"
    with (
        open_store(f"{url}/one") as one,
        open_store(f"{url}/two") as two,
        open_store(f"{url}/on") as on,
    ):
        watch = two.watch("")
        one.put("a", b"1")
        two.put("b", b"1")
        events = [watch.next(20), watch.next(20)]
        assert {event.key for event in events if event} == {"b", ""}
        assert two.get("a") is None
        assert two.revision >= one.revision
        assert on.range("") == ([], on.revision)


def test_a_range_of_several_answers_is_one_snapshot(
    etcd_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipper.store.etcd.store._PAGE", 7)
    keys = [f"k{i:03}" for i in range(50)]
    etcd_store.txn((), [Put(key, b"1") for key in keys])
    ask = etcd_store._channel.call  # type: ignore[attr-defined]

    def ask_and_write(*args: object, **named: object) -> object:
        answer = ask(*args, **named)
        monkeypatch.setattr(etcd_store._channel, "call", ask)  # type: ignore[attr-defined]
        etcd_store.txn((), [Put(key, b"2") for key in keys])
        return answer

    monkeypatch.setattr(etcd_store._channel, "call", ask_and_write)  # type: ignore[attr-defined]
    records, revision = etcd_store.range("k")
    assert [(record.key, record.value) for record in records] == [(key, b"1") for key in keys]
    assert {record.revision for record in records} == {revision}


# -- kill and hang


def test_a_watch_and_a_mirror_lose_nothing_when_etcd_is_killed(own_etcd: EtcdServer) -> None:
    """etcd is killed twice while a client writes: the watch reports every acknowledged write in
    order, once."""
    draw, seen, acknowledged = random.Random(1), list[Event](), list[int]()
    stop = threading.Event()
    with open_store(own_etcd.url) as store, Mirror(store, "n", int) as mirror:
        watch = store.watch("n")

        def read() -> None:
            while not watch.closed:
                with contextlib.suppress(StoreError):
                    if (event := watch.next(0.2)) is not None and event.kind != "SYNC":
                        seen.append(event)

        def write() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                with contextlib.suppress(StoreError):
                    acknowledged.append(store.put("n", b"%d" % number).revision)

        threads = [threading.Thread(target=read), threading.Thread(target=write)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            count = len(acknowledged)
            wait_until(lambda: len(acknowledged) > count + 20)  # noqa: B023
            assert not threading.Event().wait(draw.uniform(0, 0.05))
            own_etcd.kill()
            own_etcd.start()
        stop.set()
        join(threads[1])
        put_surely(store, "n", b"-1")
        wait_until(
            lambda: seen and seen[-1].record and seen[-1].record.value == b"-1",
            "the last write is seen",
        )
        assert mirror.wait_for(lambda m: m.get("") == -1, 20)
        watch.close()
        join(threads[0])
    revisions = [event.revision for event in seen]
    assert {event.kind for event in seen} == {"PUT"}
    assert revisions == sorted(set(revisions)), "in order, once"
    assert set(acknowledged) <= set(revisions)


def test_a_hung_etcd_raises_an_error_and_is_used_again_later(
    own_etcd: EtcdServer, lose_patience: Callable[[], None]
) -> None:
    """After SIGSTOP calls end by their deadline, and the watch by its watchdog; after SIGCONT no
    change is missing."""
    with open_store(own_etcd.url) as store:
        store.put("a", b"1")
        watch = store.watch("")
        assert watch.next(20) == Event("SYNC", store.revision)
        own_etcd.send(signal.SIGSTOP)
        lose_patience()
        with pytest.raises(StoreError, match=r"did not answer within 0\.5 s|cannot be reached"):
            store.get("a")
        with pytest.raises(
            StoreError, match=r"has not answered for 0\.6 s|did not answer|cannot be reached"
        ):
            watch.next(20)
        own_etcd.send(signal.SIGCONT)
        put_surely(store, "b", b"2")
        found: list[str] = []
        while "b" not in found:
            with contextlib.suppress(StoreError):
                event = watch.next(20)
                assert event is not None
                found.append(event.key)
        assert found == ["b"]


def test_a_quiet_watch_stays_open(etcd_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is requested and answered; the stream stays the same one."""
    monkeypatch.setattr(etcd_watch, "SILENCE_S", 0.02)
    watch = etcd_store.watch("")
    assert watch.next(20) is not None
    contacts: list[float] = []
    wait_until(
        lambda: (watch.next(0.03), contacts.append(watch.contact_s))[1] or len(set(contacts)) > 5
    )  # type: ignore[attr-defined]
    call = watch._call  # type: ignore[attr-defined]
    etcd_store.put("a", b"1")
    event = watch.next(20)
    assert event is not None
    assert event.key == "a"
    assert watch._call is call  # type: ignore[attr-defined]


def test_a_lease_is_lost_here_while_etcd_cannot_be_reached_and_its_keys_go_when_it_can(
    own_etcd: EtcdServer, lose_patience: Callable[[], None]
) -> None:
    with open_store(own_etcd.url) as store, Mirror(store, "", bytes) as mirror:
        lease = store.lease(1).renew_in_background()
        store.put("me", b"1", lease.id)
        own_etcd.kill()
        lose_patience()
        began_s = monotonic()
        assert lease.lost.wait(20)
        assert monotonic() - began_s < 10
        assert mirror.get("me") == b"1" or mirror.get("me") is None
        wait_until(lambda: mirror.trouble)
        own_etcd.start()
        with pytest.raises(LeaseLost):
            lease.keep()
        wait_until(
            lambda: not mirror.trouble and "me" not in mirror, "etcd ends the lease once it is back"
        )


def test_a_compaction_resets_a_watch_and_a_mirror_misses_no_change(
    own_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes made while the watch had no stream were compacted away; their deletions are reported
    too."""
    with open_store(own_etcd.url) as store:
        first = store.put("gone", b"0").revision
        for number in range(20):
            store.put(f"k{number % 5}", b"%d" % number)
        store.delete("gone")
        own_etcd.compact(store.revision)
        late = store.watch("", first)
        reset, sync = late.next(20), late.next(20)
        assert (reset.kind, sync.kind) == ("RESET", "SYNC") if reset and sync else False
        store.put("after", b"1")
        event = late.next(20)
        assert event is not None
        assert (event.kind, event.key) == ("PUT", "after")


def test_a_mirror_is_complete_after_a_compaction_that_it_missed(own_etcd: EtcdServer) -> None:
    with open_store(own_etcd.url) as store, open_store(own_etcd.url) as other:
        store.txn((), [Put("gone", b"0"), Put("kept", b"0")])
        seen: dict[str, bytes | None] = {}
        with Mirror(store, "", bytes) as mirror:
            mirror.on_change(
                lambda changes: seen.update({change.key: change.after for change in changes})
            )
            wait_until(lambda: mirror._follower._watch._call is not None)  # type: ignore[union-attr]
            follow = mirror._follower._watch._follow  # type: ignore[union-attr]
            asleep = threading.Event()
            mirror._follower._watch._follow = lambda at: asleep.wait(20) and follow(at)  # type: ignore[union-attr]
            mirror._follower._watch._cancel()  # type: ignore[union-attr]
            wait_until(lambda: mirror.trouble)
            other.delete("gone")
            other.put("new", b"1")
            own_etcd.compact(other.revision)
            asleep.set()
            assert mirror.wait_for(lambda m: "new" in m and "gone" not in m, 20)
            wait_until(lambda: seen == {"gone": None, "new": b"1"})


def test_a_store_that_went_back_in_time_resets_its_watches(own_etcd: EtcdServer) -> None:
    with open_store(own_etcd.url) as store:
        for _ in range(30):
            store.put("a", b"1")
        watch = store.watch("")
        assert watch.next(20) is not None
        own_etcd.kill()
        own_etcd.empty()
        own_etcd.start()
        kinds = []
        while "RESET" not in kinds:
            with contextlib.suppress(StoreError):
                event = watch.next(20)
                assert event is not None
                kinds.append(event.kind)


def test_watch_is_reset_by_an_emptied_server_that_has_more_changes_than_it_has_seen(
    own_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has the id of the cluster before, since its addresses are the same."""
    with open_store(own_etcd.url) as store:
        store.put("gone", b"1")
        watch = store.watch("")
        assert watch.next(20) == Event("SYNC", store.revision)
        follow, filled = watch._follow, threading.Event()  # type: ignore[attr-defined]
        monkeypatch.setattr(watch, "_follow", lambda at: filled.wait(20) and follow(at))
        own_etcd.kill()
        own_etcd.empty()
        own_etcd.start()
        with open_store(own_etcd.url) as other:
            for _ in range(9):
                other.put("new", b"1")
            filled.set()
            event = None
            while event is None:
                with contextlib.suppress(StoreError):
                    event = watch.next(20)
            assert event == Event("RESET", other.revision)


def test_a_record_of_a_revision_that_the_cluster_has_not_reached_is_of_another_history(
    etcd_store: Store,
) -> None:
    """etcd answers with an error, and a watch that took it for an outage tried again for ever."""
    etcd_store.put("a", b"1")
    watch = etcd_store.watch("")
    assert watch.next(20) is not None
    seen = watch._seen  # type: ignore[attr-defined]
    assert watch._is_there(seen)  # type: ignore[attr-defined]
    seen.mod_revision += 1_000_000
    assert not watch._is_there(seen)  # type: ignore[attr-defined]
    watch.close()


# -- endpoints


def test_dead_and_hung_endpoints_are_skipped(etcd_server: EtcdServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hung, socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        hosts = f"127.0.0.1:{dead.getsockname()[1]},127.0.0.1:{hung.getsockname()[1]},{etcd_server.address}"  # noqa: E501
        with open_store(f"etcd://{hosts}/{tmp_path.name}") as store:
            store.put("a", b"1")
            watch = store.watch("a", 0)
            with store.lease(5) as lease:
                lease.keep()
            for _ in range(2):
                store._channel._at = 0  # type: ignore[attr-defined]
                assert store.get("a") is not None
            found = wait_until(lambda: next_event(watch))
            assert found.kind in ("PUT", "RESET"), "a watch finds its way, too"


def next_event(watch: etcd_watch.EtcdWatch) -> Event | None:
    with contextlib.suppress(StoreError):
        return watch.next(1)
    return None


def test_a_cluster_continues_without_one_of_three_members(
    lose_patience: Callable[[], None],
) -> None:
    for servers in started(count=3):
        with open_store("etcd://" + ",".join(server.address for server in servers)) as store:
            lease = store.lease(10).renew_in_background()
            store.put("me", b"1", lease.id)
            with Mirror(store, "n/", int) as mirror:
                put_surely(store, "n/1", b"1")
                assert mirror.wait_for(lambda m: m.get("1") == 1, 20)
                servers[store._channel.at].kill()  # type: ignore[attr-defined]
                lose_patience()
                put_surely(store, "n/2", b"2")
                assert mirror.wait_for(lambda m: m.get("2") == 2, 20)
                assert lease.alive
                wait_until(lambda: is_kept(lease))  # noqa: B023
                assert wait_until(lambda: value_of(store, "me")) == b"1"
            lease.revoke()


def is_kept(lease: Lease) -> bool:
    """Renew a lease; return whether etcd has answered."""
    try:
        lease.keep()
    except LeaseLost:
        raise
    except StoreError:
        return False
    return True


def value_of(store: Store, key: str) -> bytes:
    """Return the value of a key; nothing if it is not there, or etcd does not answer."""
    with contextlib.suppress(StoreError):
        if (record := store.get(key)) is not None:
            return record.value
    return b""


def test_a_transaction_of_unknown_fate_is_not_sent_twice(
    own_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two endpoints lead to the same hung server: a read tries both, a transaction only one."""
    with open_store(f"etcd://{own_etcd.address},localhost:{own_etcd.port}") as store:
        store.put("a", b"1")
        calls: list[str] = []
        line: Any = store._channel  # type: ignore[attr-defined]
        call = line._call
        monkeypatch.setattr(
            line,
            "_call",
            lambda at, name, *rest: (calls.append(f"{name} {at}"), call(at, name, *rest))[1],
        )
        own_etcd.send(signal.SIGSTOP)
        monkeypatch.setattr(etcd_channel, "PATIENCE_S", 0.3)
        with pytest.raises(StoreError):
            store.put("a", b"2")
        assert len(calls) == 1
        with pytest.raises(StoreError):
            store.get("a")
        assert len(calls) == 3
        own_etcd.send(signal.SIGCONT)


# -- being let in


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a self-signed certificate for 127.0.0.1; return (certificate, key)."""
    from ipaddress import ip_address

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "etcd")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(True, None), True)
        .sign(key, hashes.SHA256())
    )
    cert, secret = folder / "etcd.pem", folder / "etcd.key"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    secret.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    )
    return cert, secret


def test_tls_with_a_certificate_of_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path)
    secured = [
        "--cert-file",
        str(cert),
        "--key-file",
        str(key),
        "--trusted-ca-file",
        str(cert),
        "--client-cert-auth",
    ]
    for servers in started(*secured, scheme="https"):
        with open_store(f"{servers[0].url}?ca={cert}&cert={cert}&key={key}") as store:
            watch = store.watch("", store.put("a", b"1").revision - 1)
            event = watch.next(20)
            assert event is not None
            assert event.key == "a"
        monkeypatch.setattr(etcd_channel, "PATIENCE_S", 1.0)
        for options in (f"?ca={cert}", ""):
            with pytest.raises(StoreError, match=r"cannot be reached|did not answer"):
                open_store(servers[0].url + options)


def test_a_missing_certificate_file_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"cannot read none\.pem"):
        open_store("etcds://127.0.0.1:1?ca=none.pem")


def test_a_user_and_password_are_accepted_and_not_shown(own_etcd: EtcdServer) -> None:
    own_etcd.ask("auth/user/add", name="root", password="s3cret")
    own_etcd.ask("auth/user/grant", user="root", role="root")
    own_etcd.ask("auth/enable")
    host = own_etcd.address
    for url in (f"etcd://root:s3cret@{host}", f"etcd://{host}?user=root&password=s3cret"):
        with open_store(url) as store, store.lease(5) as lease:
            assert "s3cret" not in store.name
            before = store.put("a", b"1", lease.id).revision
            lease.keep()
            store._channel._token = "forged.1"  # type: ignore[attr-defined]
            store.put("a", b"2")
            store._channel._token = "forged.2"  # type: ignore[attr-defined]
            watch = store.watch("", before)
            event = wait_until(lambda: next_event(watch))  # noqa: B023
            assert event.key == "a"
    for url in (f"etcd://root:wrong@{host}", f"etcd://{host}"):
        with pytest.raises(StoreError, match=r"refused the user: .*Check user and password"):
            open_store(url)


def test_a_full_etcd_refuses_writes_and_keeps_its_records() -> None:
    for servers in started("--quota-backend-bytes", "65536"):
        with open_store(servers[0].url) as store:
            store.put("a", b"1")
            with pytest.raises(StoreError, match=r"is full: .*alarm disarm"):
                deque(
                    (store.put(f"big/{number % 2}", bytes(20_000)) for number in range(1000)),
                    maxlen=0,
                )
            assert store.get("a") is not None


def test_an_unreachable_etcd_is_named_without_its_password() -> None:
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        with pytest.raises(
            StoreError,
            match=r"store etcd://me:\*\*\*@.* cannot be reached: .*etcd is running there",
        ) as caught:
            open_store(f"etcd://me:secret@127.0.0.1:{dead.getsockname()[1]}")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "endpoints", "prefix", "secure", "user"),
    [
        ("etcd://a", ("a:2379",), "clipper/", False, ""),
        ("etcd://a:1,b,[::1]:3/x/y/", ("a:1", "b:2379", "[::1]:3"), "x/y/", False, ""),
        ("etcd://[::1]", ("[::1]:2379",), "clipper/", False, ""),
        ("etcd://[::1],a", ("[::1]:2379", "a:2379"), "clipper/", False, ""),
        ("etcds://u:p%40q@a", ("a:2379",), "clipper/", True, "u"),
        ("etcd://a?ca=f&user=u&password=p", ("a:2379",), "clipper/", True, "u"),
    ],
)
def test_urls_are_parsed(
    url: str, endpoints: tuple[str, ...], prefix: str, secure: bool, user: str
) -> None:
    address = parse_url(url)
    assert (address.endpoints, address.prefix, address.secure, address.user) == (
        endpoints,
        prefix,
        secure,
        user,
    )


def test_invalid_urls_are_refused() -> None:
    assert parse_url("etcd://u:p%40q@a").password == "p@q"
    assert (
        parse_url("etcd://u:p@a/x?user=v&password=w").shown
        == "etcd://u:***@a/x?user=v&password=***"
    )
    for url, why in (("etcd:///x", "names no host"), ("etcd://a?c=1", "unknown 'c'")):
        with pytest.raises(ConfigError, match=why):
            open_store(url)


def test_a_forked_child_cannot_use_its_parents_store(etcd_server: EtcdServer) -> None:
    with open_store(etcd_server.url) as store:
        assert isinstance(store, EtcdStore)
        store._pid += 1
        with pytest.raises(ForkedProcess, match="Open it again in this process"):
            store.get("a")
        store._pid -= 1


def test_etcd_is_installed() -> None:
    """`make test` installs etcd."""
    assert (
        b"etcd Version: 3"
        in subprocess.run(["etcd", "--version"], capture_output=True, check=True).stdout
    )


# -- servers on it


def total(xs: Any) -> Any:
    return xs.sum(axis=1)


def test_a_server_restores_its_state_from_etcd(etcd_server: EtcdServer, tmp_path: Path) -> None:
    settings = {"state": f"{etcd_server.url}/{tmp_path.name}", "folder": str(tmp_path)}
    with clipper.start(**settings) as server:
        server.deploy("m", total, input="f64[2]")
        app = server.app("a", models=["m"], policy="exp4", slo_ms=60_000)
        assert app.feedback(app.predict(np.ones(2)).result(60), label=2.0)
    with clipper.start(**settings) as server:
        app = server.app("a")
        assert server.model("m").predict(np.ones(2), slo_ms=60_000).result(60) == 2.0
        assert app._resolve("a").learner.state(None).seen == 1


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_feedback_continues_without_etcd_and_is_written_later(
    own_etcd: EtcdServer, tmp_path: Path, how: str
) -> None:
    settings: dict[str, Any] = {
        "state": own_etcd.url,
        "folder": str(tmp_path),
        "feedback": {"write_ms": 5},
    }
    with clipper.start(**settings) as server:
        server.deploy("m", total, input="f64[2]")
        app = server.app("a", models=["m"], policy="kl_ucb", slo_ms=60_000, default=-1.0)
        assert app.feedback(app.predict(np.ones(2), user="u").result(60), label=2.0)
        if how == "stopped":
            own_etcd.send(signal.SIGSTOP)
        else:
            own_etcd.kill()
        for user in ("u", "v", ""):
            answer = app.predict(np.ones(2), user=user).result(60)
            assert (answer.output, answer.is_default) == (2.0, False)
            assert app.feedback(answer, label=2.0)
        if how == "stopped":
            own_etcd.send(signal.SIGCONT)
        else:
            own_etcd.start()
    with clipper.start(**settings) as server:
        learner = server.app("a")._resolve("a").learner
        assert {user: learner.state(user).seen for user in ("u", "v", "")} == {
            "u": 2,
            "v": 1,
            "": 4,
        }
