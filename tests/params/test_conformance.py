"""Lists what other parameter servers got wrong or promise, and the test that shows each here.

The lists are of ElasticDL's history: faults found in its design document and in its two servers,
and the behaviours that its own tests ask for. A behaviour that no other test looks at has its test
at the end. Left out on purpose: Adadelta, Adamax, Nadam and RMSprop (no rule for them here), tables
of slots (state lies beside its row), and places by a mixed hash (`id mod N`, as the document has
it: ids with a stride load shards unevenly, which `clipper params ps` and the metrics show).
"""

import ast
import threading
from functools import cache
from pathlib import Path

import pytest

from clipper.params import Client, TableSpec
from clipper.params.shard.durability.snapshots import sets_in
from tests.params.conftest import Shards, ones, zeros
from tests.params.test_snapshots import train_tables
from tests.threads import join

TESTS = Path(__file__).parents[1]

FAULTS = {
    "a row that was pulled is the same when it is pulled again": [
        "core/test_embedding.py::test_pulling_makes_no_rows_and_shards_agree",
        "core/test_initializer.py::test_a_row_depends_on_key_and_id_alone",
    ],
    "what a row begins as does not depend on shards, order or lives": [
        "params/test_shard.py::test_tables_on_shards_are_one_table",
        "core/test_initializer.py::test_what_is_drawn_never_changes",
    ],
    "state begins as its optimizer says, not as weights do": [
        "core/test_optimizer.py::test_repr_slots_and_initial_state",
        "core/test_embedding.py::test_it_does_what_a_dict_of_rows_would",
    ],
    "each optimizer is its paper's, for rows and for variables": [
        "core/test_optimizer.py::test_steps_are_those_of_the_papers",
        "core/test_embedding.py::test_it_does_what_a_dict_of_rows_would",
        "params/test_shard.py::test_a_step_of_the_model_is_atomic",
    ],
    "two threads that make one row make one": [
        "stress/test_embedding_threads.py::test_no_update_is_lost_between_threads"
    ],
    "an equal version sends nothing": [
        "params/test_shard.py::test_values_of_the_first_worker_are_kept"
    ],
    "ids and versions have 64 bits": [
        "core/test_embedding.py::test_ids_are_any_64_bits",
        "params/test_frames.py::test_negative_and_huge_ids_have_a_shard",
        "params/test_conformance.py::test_versions_have_64_bits",
    ],
    "a name has one place, in every process": [
        "params/test_frames.py::test_a_name_has_the_same_shard_in_every_process",
        "core/test_embedding.py::test_a_key_is_the_same_for_ever",
    ],
    "a replica that reads what has changed takes nothing from another": [
        "core/test_shard_loop.py::test_a_follower_too_far_behind_begins_anew",
        "core/test_shard_loop.py::test_what_python_changed_is_followed_too",
    ],
    "a replica has whole rows, becomes whole again, and hears no dead primary": [
        "params/test_replication.py::test_a_copy_equals_its_primary_over_a_lossy_connection",
        "params/test_replication.py::test_a_follower_refuses_a_lower_epoch",
        "params/test_replication.py::test_a_replaced_shard_that_still_runs_acknowledges_nothing",
    ],
    "what comes back has the version that it was of": [
        "params/test_snapshots.py::test_a_shard_is_restored_from_its_snapshot",
        "params/test_replication.py::test_recovery_uses_the_newer_of_replica_and_snapshot",
    ],
    "a torn snapshot is not believed": [
        "params/test_snapshots.py::test_a_damaged_snapshot_is_not_used",
        "params/test_snapshots.py::test_a_full_disk_keeps_earlier_snapshots",
    ],
    "a step is taken by all shards or by none": [
        "params/test_stepping.py::test_a_push_refused_by_one_shard_is_applied_by_none",
        "params/test_stepping.py::test_workers_that_race_agree_on_every_shard",
    ],
    "a set can have another number of shards": [
        "params/test_snapshots.py::test_a_set_is_restored_at_any_number_of_shards"
    ],
    "a push that is sent again counts once": [
        "core/test_shard_loop.py::test_a_repeated_push_counts_once_in_any_order",
        "params/test_replication.py::test_a_push_is_not_applied_again_after_a_kill",
    ],
}

BEHAVIOURS = {
    "tables: empty at first; what is written is read; no ids, no rows; repeated ids, equal "
    "rows; sizes": [
        "core/test_embedding.py::test_it_does_what_a_dict_of_rows_would",
        "core/test_embedding.py::test_ids_are_any_64_bits",
        "core/test_embedding.py::test_whole_rows_travel",
    ],
    "tables of other widths do not meet": [
        "params/test_conformance.py::test_tables_of_different_widths_do_not_affect_each_other"
    ],
    "a model before it is pushed; the first wins; tables told twice, and by many": [
        "params/test_shard.py::test_values_of_the_first_worker_are_kept",
        "params/test_shard.py::test_a_table_is_created_once",
        "params/test_conformance.py::test_workers_that_start_at_once_initialize_one_model",
    ],
    "gradients of no name, shape or number: refused, and nothing of them applied": [
        "params/test_shard.py::test_a_step_of_the_model_is_atomic",
        "core/test_shard_loop.py::test_what_is_refused_changes_nothing",
        "core/test_embedding.py::test_a_push_that_is_no_number_changes_nothing",
    ],
    "asynchronous: one version a push; what it does not name stays; duplicates are their sum": [
        "params/test_shard.py::test_values_of_the_first_worker_are_kept",
        "core/test_embedding.py::test_duplicates_are_summed_before_the_step",
        "core/test_shard_loop.py::test_pushes_do_what_the_table_would_do",
    ],
    "synchronous: the last of those waited for makes the step; older ones are refused, or tolerated": [  # noqa: E501
        "params/test_stepping.py::test_a_step_averages_dense_gradients_and_sums_rows",
        "params/test_stepping.py::test_lag_max_accepts_slightly_stale_pushes",
    ],
    "staleness: refused, or the rate divided; a rate of 0 is the server's": [
        "params/test_shard.py::test_stale_gradients_are_refused_or_slowed",
        "params/test_shard.py::test_a_stale_gradient_counts_for_less",
        "params/test_conformance.py::test_a_scale_of_0_uses_the_rate_of_the_server",
    ],
    "optimizers: a million steps are numbers; threads make some serial order; arguments are checked": [  # noqa: E501
        "core/test_optimizer.py::test_a_million_random_steps_leave_numbers",
        "core/test_optimizer.py::test_numbers_stay_finite_whatever_comes",
        "stress/test_embedding_threads.py::test_no_update_is_lost_between_threads",
        "core/test_optimizer.py::test_arguments_are_checked",
    ],
    "partition: each id on one shard, the order restored": [
        "params/test_frames.py::test_ids_are_split_by_shard_and_their_order_is_restored"
    ],
    "snapshots: the newest whole one; so many are kept; state and version in them; by the calendar": [  # noqa: E501
        "params/test_snapshots.py::test_old_snapshots_are_deleted_except_those_that_deltas_need",
        "params/test_snapshots.py::test_a_shard_is_restored_from_its_snapshot",
        "params/test_conformance.py::test_a_snapshot_that_lacks_a_shard_is_not_complete",
        "params/test_conformance.py::test_snapshots_are_taken_at_an_interval",
    ],
    "a worker's loop is the local loop; a shard that dies in the middle changes no weight": [
        "params/test_torch.py::test_training_through_shards_equals_local_training",
        "params/test_trained_through_a_kill.py::test_a_kill_during_training_changes_no_parameter",
    ],
    "embedding layers: combiners, padding, repeated ids, called twice": [
        "params/test_torch.py::test_bags_are_combined_and_padding_is_ignored",
        "params/test_torch.py::test_a_push_equals_a_step_of_a_local_table",
    ],
}


@cache
def functions_in(path: str) -> set[str]:
    tree = ast.parse((TESTS / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("behaviour", [*FAULTS, *BEHAVIOURS])
def test_each_behaviour_of_the_list_has_a_test(behaviour: str) -> None:
    for name in {**FAULTS, **BEHAVIOURS}[behaviour]:
        path, _, function = name.partition("::")
        assert function in functions_in(path), f"{behaviour}: no {name}"


def test_versions_have_64_bits(shards: Shards) -> None:
    client = shards.up(1).client()
    client.create(TableSpec("t", 2))
    client.push_model({"w": zeros(1)})
    shards.servers[0].shard.core.version = 1 << 41
    client.push("t", [1], ones((1, 2)))
    found = client.push_gradients({"w": ones(1)}, versions=[(1 << 41) + 1])
    assert found["accepted"]
    assert (found["versions"], found["why"]) == ([(1 << 41) + 2], [""])
    assert client.pull_variables([(1 << 41) + 1])[1].keys() == {"w"}
    assert client.pull_variables([(1 << 41) + 2])[1] == {}
    shards.down()
    shards.up(1)
    assert shards.servers[0].shard.core.version == (1 << 41) + 2


def test_tables_of_different_widths_do_not_affect_each_other(shards: Shards) -> None:
    client = shards.up(2).client()
    specs = [
        TableSpec("narrow", 1),
        TableSpec("wide", 70, optimizer="adam"),
        TableSpec("plain", 3, optimizer="sgd"),
    ]
    for spec in specs:
        client.create(spec)
    before = {spec.name: client.pull(spec.name, range(9)) for spec in specs}
    client.push("wide", range(5), ones((5, 70)))
    for spec in specs:
        changed = (client.pull(spec.name, range(9)) != before[spec.name]).any(axis=1)
        assert changed.tolist() == [spec.name == "wide" and i < 5 for i in range(9)]
    rows = [stats["tables"] for _, stats in client.call_all("stats")]
    assert [sum(shard[spec.name]["rows"] for shard in rows) for spec in specs] == [0, 5, 0]


def test_workers_that_start_at_once_initialize_one_model(shards: Shards) -> None:
    clients = [shards.client(worker=1 + k) for k in range(4) if k or shards.up(2)]
    specs = [TableSpec(f"t{i}", 2) for i in range(5)]
    barrier = threading.Barrier(4)

    def begin(client: Client, value: float) -> None:
        barrier.wait(20)
        client.push_model({f"w{i}": ones(2) * value for i in range(4)}, specs)

    threads = [threading.Thread(target=begin, args=(client, k)) for k, client in enumerate(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    for server in shards.servers.values():
        assert sorted(spec.name for spec in server.shard.parameters.specs) == [
            spec.name for spec in specs
        ]
        values = {
            float(one.value.reshape(-1)[0]) for one in server.shard.parameters.dense.variables
        }
        assert len(values) <= 1, "one worker's, of those on this shard"
    tables = [
        {spec.name: client.pull(spec.name, [1, 2]).tobytes() for spec in specs}
        for client in clients
    ]
    assert all(one == tables[0] for one in tables)


def test_a_scale_of_0_uses_the_rate_of_the_server(shards: Shards) -> None:
    client = shards.up(1).client()
    client.create(
        TableSpec("t", 1, optimizer="sgd", optimizer_settings={"rate": 0.5}, initializer="zeros")
    )
    client.push_model({"w": zeros(1)}, optimizer="sgd", optimizer_settings={"rate": 0.25})
    client.push_gradients({"w": ones(1)}, {"t": ([7], ones((1, 1)))}, scale=0.0)
    assert client.pull_variables()[1]["w"].tolist() == [-0.25]
    assert client.pull("t", [7]).tolist() == [[-0.5]]


def test_a_snapshot_that_lacks_a_shard_is_not_complete(shards: Shards) -> None:
    client = shards.up(2, deltas_max=0).client()
    train_tables(client, 1)
    for shard in range(2):
        client.call(shard, "snapshot", number=1)
    client.call(0, "snapshot", number=2)
    assert [one.complete for one in sets_in(shards.root / "snapshots")] == [True, False]


def test_snapshots_are_taken_at_an_interval(shards: Shards) -> None:
    client = shards.up(2, snapshot_s=1.0, snapshots_max=2, deltas_max=0).client()
    train_tables(client, 1, count=1)
    give_up = threading.Event()
    for _ in range(2000):
        found = [one.number for one in sets_in(shards.root / "snapshots") if one.complete]
        if len(found) >= 2 and found[-1] >= 3:
            break
        give_up.wait(0.01)
    assert found[-1] >= 3, "one number for all shards, one after the other"
