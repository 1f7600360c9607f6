"""Runs a shard of which one thread fails at its entry: `python -m tests.params.failing_shard NAME
KIND FOLDER`. KIND: of thread_faults.ERRORS."""

import sys
from pathlib import Path

from clipper.params.shard.server import folder_of, run
from clipper.params.shard.shard import ShardConfig
from clipper.settings.params import ParamsSettings
from tests.thread_faults import injected


def main(name: str, kind: str, root: Path) -> int:
    settings = ParamsSettings(shards=1, durability="disk")
    config = ShardConfig(0, (f"unix:{root}/0.sock",), settings, "token", folder_of(root, 0))
    with injected(name, kind):
        return run(config, serves=lambda: print("it serves", flush=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
