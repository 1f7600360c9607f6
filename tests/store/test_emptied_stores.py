"""A store that comes back empty, older or as another: what is known is served on, nothing is
dropped and nothing is written until an operator decides. Real servers and files."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clipper.catalog.catalog import Catalog
from clipper.errors import StoreError
from clipper.store import CatalogCopy, MemoryStore, SqliteStore, Store, open_store
from clipper.store.history import audit_context, entries
from clipper.types import InputType, Model
from tests.memory_container import wait_until
from tests.store.conftest import RedisServer
from tests.store.etcd_server import EtcdServer

PATIENCE_S = 30.0


class Place:
    """A store that can be emptied, and set back to what it was at `save`."""

    def __init__(self, url: str, save: Callable[[], None], back: Callable[[], None]) -> None:
        self.url = url
        self.save = save
        self.back = back


def of_redis(server: RedisServer, folder: Path) -> Place:
    kept = folder / "kept"

    def save() -> None:
        server.kill()
        shutil.copytree(server.folder / "appendonlydir", kept)
        server.start()

    def back() -> None:
        server.kill()
        shutil.rmtree(server.folder / "appendonlydir")
        if kept.exists():
            shutil.copytree(kept, server.folder / "appendonlydir")
        server.start()

    return Place(server.url, save, back)


def of_etcd(server: EtcdServer, folder: Path) -> Place:
    kept, data = folder / "kept", server._folder / server._name

    def save() -> None:
        server.kill()
        shutil.copytree(data, kept)
        server.start()

    def back() -> None:
        server.kill()
        server.empty()
        if kept.exists():
            shutil.copytree(kept, data)
        server.start()

    return Place(f"{server.url}/tests", save, back)


@pytest.fixture(params=["redis", "etcd"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "redis":
        return of_redis(request.getfixturevalue("own_redis"), tmp_path)
    return of_etcd(request.getfixturevalue("own_etcd"), tmp_path)


class Node:
    """The catalog of one server, with its copy."""

    def __init__(self, url: str, folder: Path) -> None:
        self.store: Store = open_store(url)
        self.copy = CatalogCopy(folder / "catalog.copy", self.store.name)
        self.catalog = Catalog(self.store, copy=self.copy)

    @property
    def names(self) -> set[str]:
        return {*self.catalog.view.applications, *map(str, self.models)}

    @property
    def models(self) -> list[object]:
        return [model.id for model in self.catalog.view.models()]

    @property
    def is_refused(self) -> bool:
        return bool(self.catalog.continuity.trouble)

    def close(self) -> None:
        self.catalog.close()
        self.store.close()


@pytest.fixture
def start(place: Place, tmp_path: Path) -> Iterator[Callable[[str], Node]]:
    nodes: list[Node] = []

    def make(name: str) -> Node:
        nodes.append(Node(place.url, tmp_path / name))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def filled(catalog: Catalog, models: int = 3) -> None:
    for version in range(1, models + 1):
        catalog.register(Model("m", version, InputType.parse("f64[2]")))
    catalog.register_application("a", ["m"], slo_ms=50)
    catalog.register_application("b", ["m:1"], slo_ms=50)


def answers(node: Node) -> bool:
    try:
        node.catalog.refresh()
    except StoreError:
        return False
    return True


ALL = {"a", "b", "m:1", "m:2", "m:3"}


def test_a_store_that_comes_back_empty_takes_nothing_away(
    place: Place, start: Callable[[str], Node], tmp_path: Path
) -> None:
    node = start("one")
    filled(node.catalog)
    assert node.names == ALL
    copy = (tmp_path / "one/catalog.copy").read_bytes()
    place.back()
    wait_until(lambda: node.is_refused, "it is noticed", PATIENCE_S)
    assert "has lost the catalog" in node.catalog.continuity.trouble
    assert node.names == ALL
    with pytest.raises(StoreError, match="has lost the catalog") as caught:
        node.catalog.register_application("c", ["m"])
    assert "clipper store accept" in caught.value.hint
    assert node.store.range("catalog/")[0] == [], "nothing is written"
    assert (tmp_path / "one/catalog.copy").read_bytes() == copy
    node.close()
    again = start("one")
    assert again.is_refused
    assert again.names == ALL, "a restart serves on, too"
    assert (tmp_path / "one/catalog.copy").read_bytes() == copy


def test_an_older_store_takes_nothing_away(place: Place, start: Callable[[str], Node]) -> None:
    node = start("one")
    filled(node.catalog, 1)
    node.catalog.unregister_application("b")
    place.save()
    wait_until(lambda: answers(node), "it is back", PATIENCE_S)
    node.catalog.register_application("late", ["m"])
    node.catalog.unregister_application("a")
    place.back()
    wait_until(lambda: node.is_refused, "it is noticed", PATIENCE_S)
    assert "has an older catalog" in node.catalog.continuity.trouble
    assert node.names == {"late", "m:1"}
    assert node.catalog.accept_store(restore=True) == 2, "one is written, one is deleted again"
    assert not node.is_refused
    assert node.names == {"late", "m:1"}
    other = start("other")
    assert other.names == {"late", "m:1"}


@pytest.mark.parametrize("restore", [True, False])
def test_one_word_settles_it_for_all_servers(
    place: Place, start: Callable[[str], Node], restore: bool, tmp_path: Path
) -> None:
    one, other = start("one"), start("other")
    filled(one.catalog)
    wait_until(lambda: other.names == ALL, "the other follows", PATIENCE_S)
    place.back()
    wait_until(lambda: one.is_refused and other.is_refused, "both notice it", PATIENCE_S)
    # the copy is written after the names are known, and before the store is refused
    copy = (tmp_path / "other/catalog.copy").read_bytes()
    with audit_context("ann", "store accept", dry=True):
        one.catalog.accept_store(restore=restore)
    assert one.store.range("catalog/")[0] == [], "a dry run writes nothing"
    with audit_context("ann", "store accept"):
        one.catalog.accept_store(restore=restore)
    wait_until(lambda: not other.is_refused, "the other follows", PATIENCE_S)
    wait_until(lambda: other.names == (ALL if restore else set()), "the other follows", PATIENCE_S)
    assert one.names == other.names
    assert [entry.actor for entry in entries(one.store)] == ["ann"]
    before = tmp_path / "other/catalog.copy.before"
    wait_until(before.exists, "it keeps its copy, after it trusts the store", PATIENCE_S)
    assert before.read_bytes() == copy
    one.catalog.register_application("c")
    wait_until(lambda: "c" in other.names, "changes are possible again", PATIENCE_S)
    one.close()
    assert "c" in start("one").names, "and after a restart"


def test_what_others_made_in_an_emptied_store_stays_with_what_is_restored(
    place: Place, start: Callable[[str], Node]
) -> None:
    node = start("one")
    filled(node.catalog, 1)
    place.back()
    wait_until(lambda: node.is_refused, "it is noticed", PATIENCE_S)
    late = start("late")
    late.catalog.register_application("new")
    wait_until(
        lambda: "has another catalog" in node.catalog.continuity.trouble, "that, too", PATIENCE_S
    )
    node.catalog.accept_store(restore=True)
    assert node.names == {"a", "b", "m:1", "new"}
    wait_until(lambda: late.is_refused or late.names == node.names, "all agree", PATIENCE_S)
    assert late.names == node.names


def test_everything_may_be_deleted_by_the_verbs(place: Place, start: Callable[[str], Node]) -> None:
    one, other = start("one"), start("other")
    filled(one.catalog)
    wait_until(lambda: other.names == ALL, "the other follows", PATIENCE_S)
    for name in ("a", "b"):
        one.catalog.unregister_application(name)
    for _ in range(3):
        one.catalog.retire_model("m")
    wait_until(lambda: other.names == set(), "the other follows", PATIENCE_S)
    assert not one.is_refused
    assert not other.is_refused


@pytest.mark.parametrize("damage", ["wal", "all", "older"])
def test_a_damaged_file_takes_nothing_away(tmp_path: Path, damage: str) -> None:
    file, folder = tmp_path / "state.db", tmp_path / "folder"
    node = Node(f"sqlite:{file}", folder)
    filled(node.catalog, 1)
    older = tmp_path / "older.db"
    node.close()
    shutil.copy(file, older)
    node = Node(f"sqlite:{file}", folder)
    node.catalog.register_application("late", ["m"])
    node.close()
    if damage == "all":
        file.unlink()
    else:
        shutil.copy(older, file)
    for log in ("state.db-wal", "state.db-shm"):
        (tmp_path / log).unlink(missing_ok=True)
    node = Node(f"sqlite:{file}", folder)
    assert node.is_refused
    assert node.names == {"a", "b", "m:1", "late"}
    node.catalog.accept_store(restore=True)
    assert not node.is_refused
    node.close()
    with open_store(f"sqlite:{file}") as store, Catalog(store, follow=False) as catalog:
        assert {*catalog.view.applications} == {"a", "b", "late"}


def test_a_store_of_an_older_version_is_followed_as_before(tmp_path: Path) -> None:
    """Its guard has no history; the first write gives it one."""
    with SqliteStore(tmp_path / "state.db") as store:
        with Catalog(store, follow=False) as catalog:
            filled(catalog, 1)
        store.put("catalog/guard", b"")
        copy = CatalogCopy(tmp_path / "catalog.copy", store.name)
        with Catalog(store, follow=False, copy=copy) as known:
            assert not known.continuity.trouble
            with Catalog(store, follow=False) as writer:
                writer.register_application("c")
            assert "c" in known.refresh().applications
            store.put("catalog/guard", b"")
            assert known.refresh()
            assert not known.continuity.trouble


def test_a_copy_of_another_store_says_nothing_about_this_one(tmp_path: Path) -> None:
    copy = tmp_path / "catalog.copy"
    with MemoryStore() as store, Catalog(store, copy=CatalogCopy(copy, "redis://one")) as catalog:
        filled(catalog, 1)
    with MemoryStore() as store, Catalog(store, copy=CatalogCopy(copy, "redis://two")) as catalog:
        assert not catalog.continuity.trouble
        assert catalog.models() == []


def test_more_records_than_a_transaction_takes_are_written_back(tmp_path: Path) -> None:
    copy = CatalogCopy(tmp_path / "catalog.copy", "memory")
    with MemoryStore() as store, Catalog(store, copy=copy, follow=False) as catalog:
        for number in range(150):
            catalog.register_application(f"a{number}")
    with MemoryStore() as store, Catalog(store, copy=copy, follow=False) as catalog:
        assert catalog.continuity.trouble
        assert len(catalog.view.applications) == 150
        assert catalog.accept_store(restore=True) == 150
        assert not catalog.continuity.trouble
        assert len(store.range("catalog/application/")[0]) == 150
        assert catalog.accept_store(restore=True) == 0, "there is nothing to decide any more"
