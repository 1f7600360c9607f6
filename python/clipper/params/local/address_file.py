"""The address file of a set: shards.json, in the folder that all shards and clients see.

`LocalSet` writes it once. When another engine runs the shards (Ray, Kubernetes), an address may
change with each life of a shard: then a shard that has begun to listen writes its own address, and
shards and clients read the file again whenever they connect. The lock in a shard's folder tells
whether it runs. It is held by the shard's process, on any machine, so a share must support locks
(NFS 4 does).
"""

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from clipper.errors import AlreadyExists, ConfigError, DoesNotFit, InvalidInput
from clipper.params.shard.durability.recovery import write_atomically
from clipper.params.shard.resharding.decision import noted_move
from clipper.settings.params import ParamsSettings, with_absolute_paths
from clipper.state_dir import is_locked
from clipper_container.params.connection import SHARDS_FILE, addresses_in

UNKNOWN_ADDRESS = "tcp:not-yet.invalid:1"  # never resolves, so clients retry
FORMER_MAX = 16
FRESH_S = 0.2  # age at which the cached addresses are read again


class ShardAddresses(TypedDict, total=False):
    """The contents of shards.json. pid: of the supervisor. grpc: addresses, if
    they serve gRPC. engine: `ray` or `kubernetes`, if it runs the shards. generation: the number
    of this set, above those of sets that were resharded to it. before: that of the set before this
    one; -1: it was resharded while it was stopped. fills: the set before still has the rows.
    former: where shard 0 was in the sets before; it listens there too, for clients that have a copy
    of this file from then.
    """

    addresses: list[str]
    token: str
    pid: int
    grpc: list[str]
    engine: str
    generation: int
    before: int
    fills: bool
    former: list[str]
    settings: dict[str, Any]


def read_address_file(folder: Path) -> ShardAddresses:
    """Return the contents of shards.json; {} if there is none. Raises InvalidInput."""
    try:
        content: ShardAddresses = json.loads((folder / SHARDS_FILE).read_text())
        return content
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{folder / SHARDS_FILE}: {error}.") from None


def former_of(before: ShardAddresses, addresses: list[str]) -> list[str]:
    """Return where shard 0 was, after a set has got other addresses: over TCP only."""
    was = [*before.get("former", []), *before.get("addresses", [])[:1]]
    each = (one for one in was if one.startswith("tcp:") and one not in addresses)
    return list(dict.fromkeys(each))[-FORMER_MAX:]


def has_moved(folder: Path, content: ShardAddresses) -> bool:
    """Return whether the address file in the folder of a set is that of the set that its rows have
    moved to, so that a shard that starts in this folder is of an old set. The note of the move goes
    when the old shards have ended."""
    to = noted_move(folder)
    return to is not None and to.name == f"set-{content.get('generation')}"


def write_address_file(folder: Path, content: ShardAddresses) -> None:
    """Replace shards.json. Raises OSError."""
    write_atomically(folder / SHARDS_FILE, json.dumps(content, indent=1).encode())
    os.chmod(folder / SHARDS_FILE, 0o600)


def running_shards(folder: Path) -> list[int]:
    """Return the numbers of the shards that run."""
    found = []
    for path in folder.glob("shard-*/lock"):
        number = path.parent.name.removeprefix("shard-")
        if number.isdecimal() and is_locked(path):
            found.append(int(number))
    return sorted(found)


def content_for(settings: ParamsSettings, folder: Path, before: ShardAddresses) -> ShardAddresses:
    """Return the contents of shards.json of the set in a folder, without the addresses. A token
    that was generated earlier is kept. before: what the file has.

    Raises ConfigError; DoesNotFit for another number of shards than there are.
    """
    if settings.replicas >= settings.shards:
        raise ConfigError(
            f"params.replicas = {settings.replicas}: fewer than params.shards = {settings.shards}."
        )
    there = len(before.get("addresses", [])) or settings.shards
    if there != settings.shards:
        hint = f"clipper params reshard --folder {folder} --shards {settings.shards}"
        raise DoesNotFit(
            f"the set in {folder} has {there} shards, not {settings.shards}.", hint=hint
        )
    public = msgspec.structs.replace(settings, token="", folder=str(folder))
    return {
        "token": settings.token or str(before.get("token", "")) or secrets.token_urlsafe(24),
        "settings": msgspec.to_builtins(public),
        "generation": before.get("generation", 0),
        "before": before.get("before", 0),
    }


def prepare(settings: ParamsSettings, engine: str) -> Path:
    """Write shards.json for shards that `engine` runs or will run. Returns the folder.

    Raises ConfigError, DoesNotFit, AlreadyExists.
    """
    settings, folder = with_absolute_paths(settings), Path(settings.folder).absolute()
    if settings.tls_cert:
        raise ConfigError(
            f"params.tls_cert is set, and shards on {engine} have no TLS of their own."
        )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    before = read_address_file(folder)
    content = content_for(settings, folder, before)
    same = before.get("engine") == engine
    if not same and running_shards(folder):
        raise AlreadyExists(
            f"a set of shards runs in {folder}.", hint="clipper params down, or another folder."
        )
    content["addresses"] = before["addresses"] if same else [UNKNOWN_ADDRESS] * settings.shards
    content["engine"] = engine
    write_address_file(folder, content)
    return folder


def publish_address(folder: Path, number: int, address: str) -> None:
    """Write the address of one shard, unless its set has moved. Raises OSError, InvalidInput."""
    with addresses_locked(folder):
        content = read_address_file(folder)
        if has_moved(folder, content):
            return
        content["addresses"][number] = address
        write_address_file(folder, content)
        above = read_address_file(folder.parent)  # of a set that was resharded to this one
        if above and f"set-{above.get('generation')}" == folder.name:
            above["addresses"][number] = address
            write_address_file(folder.parent, above)


@contextlib.contextmanager
def addresses_locked(folder: Path) -> Iterator[None]:
    """Keep the addresses of a set from being written by others. Raises OSError."""
    fd = os.open(folder / "places.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


class AddressFile:
    """Cached reader of the addresses; the file is read again after FRESH_S. Threads: any."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: tuple[float, list[str]] = (float("-inf"), [])

    def address(self, shard: int) -> str:
        """Return the address of a shard. Raises InvalidInput."""
        at_s, addresses = self._found
        if time.monotonic() - at_s > FRESH_S:
            addresses, _ = addresses_in(self._folder)
            self._found = time.monotonic(), addresses
        return addresses[shard]
