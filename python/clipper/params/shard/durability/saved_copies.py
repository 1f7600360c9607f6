"""Copies of other shards on disk, from which a follower starts when its process is restarted.

A shard that ends in good order writes its copies to `copies/` in its own folder, in the format of
snapshots. After a kill there may be none; then the primary's newest snapshot is used, if both
shards have the same folder. Either is brought up to date by difference (replication).
"""

import logging
import shutil
from pathlib import Path

from clipper.errors import ClipperError
from clipper.params.shard.durability.snapshots import PartWriter, chain_of, parts_in, pieces_in
from clipper.params.shard.replication.followers import ReplicaFollower, ShardReplica

log = logging.getLogger("clipper.params")


def load_copy(
    folder: Path | None, of: int, shards: int, resync_ids_max: int
) -> ShardReplica | None:
    """Return the newest copy of shard `of` that is on disk; None if there is none.

    folder: of the shard that has the copy. Raises OSError, ClipperError.
    """
    if folder is None or not resync_ids_max:
        return None
    found = []
    for root in (folder / "copies", folder.parent / "snapshots"):
        parts = parts_in(root)
        mine = [one for one in parts if (one.shard, one.shards) == (of, shards)]
        found += [(one, chain_of(one, parts)) for one in mine if one.position >= 0]
    usable = [(part, chain) for part, chain in found if chain]
    if not usable:
        return None
    part, chain = max(usable, key=lambda pair: (pair[0].epoch, pair[0].position))
    return ShardReplica.loaded(of, part.epoch, pieces_in(chain), resync_ids_max)


def save_copy(folder: Path | None, follower: ReplicaFollower, shards: int) -> None:
    """Write a follower's copy, after its thread has ended. A failure is logged."""
    copy = follower.replica
    if folder is None or copy is None or copy.position < 0:
        return
    root = folder / "copies"
    older = [part for part in parts_in(root) if part.shard == copy.shard]
    try:
        number = max([part.number for part in older], default=0) + 1
        writer = PartWriter(root, number, copy.shard, shards)
        try:
            for piece in copy.saved():
                writer.add(piece)
            writer.finish(base=0, epoch=copy.epoch, version=copy.version, position=copy.position)
        except BaseException:
            writer.abandon()
            raise
    except (OSError, ClipperError) as error:
        log.warning("the copy of shard %d is not kept on disk: %s", copy.shard, error)
        return
    for part in older:
        shutil.rmtree(part.folder, ignore_errors=True)
