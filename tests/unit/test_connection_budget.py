"""Limits of connections within a process's limit of files."""

import msgspec
import pytest

from clipper import load_config
from clipper.settings.connection_budget import KEPT_MIN
from clipper.settings.connection_budget import within_files as settings_within


def within_files(config, files_max):
    http, grpc, limits = settings_within(config.http, config.grpc, config.limits, files_max)
    return msgspec.structs.replace(config, http=http, grpc=grpc, limits=limits)


def served(**more: object):
    return load_config(http="127.0.0.1:0", grpc="127.0.0.1:0", **more)


def test_where_files_are_many_nothing_changes():
    config = served()
    assert within_files(config, 20_000) == config


def test_what_is_not_served_takes_nothing():
    config = load_config()
    assert within_files(config, 2048) == config


@pytest.mark.parametrize("files_max", [128, 200, 256, 1024, 4096, 10_000])
def test_all_connections_leave_descriptors_free(files_max):
    config = within_files(served(), files_max)
    kinds = (config.http, config.grpc, config.limits)
    assert sum(one.connections_max for one in kinds) <= files_max - KEPT_MIN + 12
    assert min(one.connections_max for one in kinds) >= 4
    others = served()
    same = msgspec.structs.replace(config, http=others.http, grpc=others.grpc, limits=others.limits)
    assert same == others


def test_the_address_of_management_takes_as_many_as_that_of_queries():
    both = {"address": "127.0.0.1:0", "admin": "127.0.0.1:0"}
    config = within_files(load_config(http=both, grpc="127.0.0.1:0"), 1024)
    kinds = (config.http, config.http, config.grpc, config.limits)
    assert sum(one.connections_max for one in kinds) <= 1024 - KEPT_MIN
