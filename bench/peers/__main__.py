"""python -m bench.peers [NAME...]: install them, each in an environment of its own below
.venv/peers."""

import subprocess
import sys

from bench.peers import PEERS


def main(names: list[str]) -> int:
    failed = 0
    for name in names or list(PEERS):
        if name not in PEERS:
            print(f"no peer {name!r}: {', '.join(PEERS)}", file=sys.stderr)
            return 2
        if PEERS[name].installed:
            continue
        print(f"installing {name}", flush=True)
        try:
            PEERS[name].install()
        except subprocess.CalledProcessError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
