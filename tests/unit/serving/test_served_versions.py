"""Names of models: the version that each means on a server while a new one comes up there."""

from collections.abc import Mapping

from clipper.catalog.view import Promoted, View
from clipper.errors import UnknownVersion
from clipper.serving.models.served_versions import ServedVersions
from clipper.types import ANY, Application, Model, VersionedModel

NAME = VersionedModel("m", None)
ONE = VersionedModel("m", 1)
TWO = VersionedModel("m", 2)


class Containers:
    """Counts of the connected containers of each version, as a test sets them."""

    def __init__(self) -> None:
        self.counts: dict[VersionedModel, int] = {}

    def answering(self, model: VersionedModel) -> int:
        return self.counts.get(model, 0)


def model(version: int, replicas: int = 1, *, retired_us: int = 0, target: str = "t") -> Model:
    return Model("m", version, ANY, target=target, replicas=replicas, retired_us=retired_us)


def view(*models: Model, links: tuple[VersionedModel, ...] = (), promoted: int = 0) -> View:
    applications = {"a": Application("a", links)} if links else {}
    made: Mapping[str, Promoted] = {"m": Promoted(promoted, 9)} if promoted else {}
    return View(1, {"m": models} if models else {}, applications, {}, made)


def served(first: View, **counts: int) -> tuple[ServedVersions, Containers]:
    containers = Containers()
    containers.counts = {VersionedModel("m", int(key[1:])): many for key, many in counts.items()}
    made = ServedVersions(containers)
    made.follow(first)
    return made, containers


def test_a_new_version_is_used_once_as_many_of_it_are_up() -> None:
    found, containers = served(view(model(1, 2)), v1=2)
    now = view(model(1, 2), model(2, 3))
    found.follow(now)
    assert found.model(now, NAME).id == ONE
    assert found.waiting == {TWO: ONE}
    containers.counts[TWO] = 1
    assert not found.has_news(now)
    containers.counts[TWO] = 2
    assert found.has_news(now)
    found.follow(now)
    assert found.model(now, NAME).id == TWO
    assert found.waiting == {}
    containers.counts[TWO] = 0  # a crash of the new one is no reason to go back
    found.follow(now)
    assert found.model(now, NAME).id == TWO


def test_fewer_replicas_than_before_are_enough_if_no_more_are_wanted() -> None:
    found, containers = served(view(model(1, 4)), v1=4)
    now = view(model(1, 4), model(2, 1))
    containers.counts[TWO] = 1
    found.follow(now)
    assert found.model(now, NAME).id == TWO


def test_a_version_that_is_named_is_used_as_it_is() -> None:
    found, _ = served(view(model(1)), v1=1)
    now = view(model(1), model(2))
    found.follow(now)
    assert found.model(now, TWO).id == TWO


def test_a_retired_version_serves_until_the_next_is_up() -> None:
    found, containers = served(view(model(1)), v1=1)
    now = view(model(1, 0, retired_us=1), model(2))
    found.follow(now)
    assert found.model(now, NAME).id == ONE
    assert ONE in found.in_use
    containers.counts[TWO] = 1
    found.follow(now)
    assert found.in_use == {TWO}


def test_nothing_is_gained_by_waiting() -> None:
    found, containers = served(view(model(1)), v1=1)
    stopped = view(model(1), model(2, 0))  # none of the new one is wanted
    found.follow(stopped)
    assert found.model(stopped, NAME).id == TWO
    found, containers = served(view(model(1)), v1=1)
    del containers.counts[ONE]
    gone = view(model(1, 0, retired_us=1), model(2))  # none of the old one is left
    found.follow(gone)
    assert found.model(gone, NAME).id == TWO


def test_a_crash_of_the_old_one_meanwhile_changes_nothing() -> None:
    found, containers = served(view(model(1)), v1=1)
    now = view(model(1), model(2))
    del containers.counts[ONE]
    found.follow(now)
    assert found.model(now, NAME).id == ONE


def test_containers_that_are_started_elsewhere_are_waited_for() -> None:
    found, containers = served(view(model(1, 0, target="")), v1=1)
    now = view(model(1, 0, target=""), model(2, 0, target=""))
    found.follow(now)
    assert found.model(now, NAME).id == ONE
    containers.counts[TWO] = 1
    found.follow(now)
    assert found.model(now, NAME).id == TWO


def test_a_rollback_holds_at_once_and_one_to_a_version_that_is_not_up_waits() -> None:
    both = view(model(1), model(2))
    found, containers = served(both, v1=1, v2=1)
    back = view(model(1), model(2), promoted=1)
    found.follow(back)
    assert found.model(back, NAME).id == ONE
    del containers.counts[TWO]
    found.follow(both)
    assert found.model(both, NAME).id == ONE


def test_a_link_that_names_another_version_than_before_is_followed_alike() -> None:
    first = view(model(1), model(2), links=(ONE,))
    found, containers = served(first, v1=1)
    now = view(model(1), model(2), links=(TWO,))
    found.follow(now)
    assert found.model(now, TWO, "a").id == ONE
    assert found.model(now, TWO).id == TWO
    containers.counts[TWO] = 1
    found.follow(now)
    assert found.model(now, TWO, "a").id == TWO


def test_links_of_two_versions_are_both_used_as_they_are() -> None:
    first = view(model(1), links=(NAME,))
    found, _ = served(first, v1=1)
    now = view(model(1), model(2), links=(ONE, TWO))
    found.follow(now)
    assert {found.model(now, link, "a").id for link in (ONE, TWO)} == {ONE}
    both = view(model(1), model(2), links=(ONE, TWO))
    fresh, _ = served(both, v1=1)
    assert [fresh.model(both, link, "a").id for link in (ONE, TWO)] == [ONE, TWO]


def test_what_is_out_of_service_is_unknown() -> None:
    found, _ = served(view(model(1, 0, retired_us=1), model(2)), v2=1)
    try:
        found.model(view(model(1, 0, retired_us=1), model(2)), ONE)
    except UnknownVersion:
        return
    raise AssertionError("a retired version is found")
