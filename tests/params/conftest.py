"""Sets of shards, each with its threads, in this process; and a client of them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper.params import Client
from clipper.params.shard.server import ShardServer, folder_of
from clipper.params.shard.shard import ShardConfig
from clipper.settings.params import ParamsSettings
from tests.memory_container import wait_until

TOKEN = "open sesame"
ones: Any = np.ones  # of any type: what is sent is converted
zeros: Any = np.zeros
full: Any = np.full


def until(true: Callable[[], bool]) -> None:
    """Wait until the condition holds; fail if it does not within the patience of a test."""
    wait_until(true, patience_s=60)


class Shards:
    """A parameter set in a folder. end(i) closes a shard; lose(i) closes it without a snapshot, as
    a kill would; begin(i) starts it again."""

    def __init__(self, root: Path) -> None:
        self.root, self.settings = root, ParamsSettings()
        self.addresses: tuple[str, ...] = ()
        self.servers: dict[int, ShardServer] = {}
        self._clients: list[Client] = []

    def up(self, shards: int, **settings: Any) -> "Shards":
        given = {"snapshot_s": 0.0, "recover_s": 1.0, **settings}
        self.settings = ParamsSettings(shards=shards, **given)
        self.addresses = tuple(f"unix:{self.root}/{i}.sock" for i in range(shards))
        for shard in range(shards):
            self.begin(shard)
        for server in self.servers.values():
            assert server.ready.wait(60)
        return self

    def begin(self, shard: int, folder: Path | None = None) -> ShardServer:
        place = ShardConfig(
            shard, self.addresses, self.settings, TOKEN, folder or folder_of(self.root, shard)
        )
        self.servers[shard] = ShardServer(place).start()
        return self.servers[shard]

    def end(self, shard: int, *, snapshot: bool = True) -> None:
        self.servers.pop(shard).close(snapshot=snapshot)

    def lose(self, shard: int) -> None:
        self.end(shard, snapshot=False)

    def wait_for_copies(self) -> None:
        """Wait until each running shard has a complete copy elsewhere, so that any one of them may
        be lost."""
        until(lambda: not any(server.shard.followers.exposed for server in self.servers.values()))

    def down(self, *, snapshot: bool = True) -> None:
        for shard in list(self.servers):
            self.end(shard, snapshot=snapshot)

    def client(self, **options: Any) -> Client:
        self._clients.append(
            Client(self.addresses, **{"token": TOKEN, "patience_s": 20.0, **options})
        )
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.down(snapshot=False)


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[Shards]:
    found = Shards(tmp_path)
    yield found
    found.close()
