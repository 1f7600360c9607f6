"""Settings of models from object stores and web servers: `[artifacts]`."""

from pathlib import Path
from typing import Annotated

import msgspec

from clipper.settings.setting import about


class ArtifactSettings(msgspec.Struct, frozen=True):
    """Limits of pulls, and the cache of what was pulled. Credentials are no settings: they are in
    the environment.
    """

    folder: Annotated[
        str,
        about(
            "cache, which several servers and nodes of a host may share; empty: `artifacts` in the"
            " folder of the state, or without one in the folder of temporary files"
        ),
    ] = ""
    cache_mib: Annotated[
        int,
        about(
            "size of the cache; the least recently used models are removed first, none that is in"
            " use",
            "MiB",
            ge=1,
            le=1 << 30,
        ),
    ] = 10_240
    mib_max: Annotated[
        int, about("size of one model, all of its files together", "MiB", ge=1, le=1 << 30)
    ] = 10_240
    files_max: Annotated[int, about("files of one model", "files", ge=1, le=100_000)] = 1000
    pull_s: Annotated[float, about("time of one pull, with all tries", "s", ge=0.1, le=86_400)] = (
        600.0
    )
    tries: Annotated[
        int,
        about("tries of one pull; one in which bytes came does not count", "tries", ge=1, le=100),
    ] = 5

    def environment(self, state: Path | None) -> dict[str, str]:
        """Return these settings as variables, from which a process that pulls reads them.

        state: folder of the server's state.
        """
        folder = self.folder or (str(state / "artifacts") if state is not None else "")
        return {
            f"CLIPPER_ARTIFACTS__{name.upper()}": str(value)
            for name, value in {**msgspec.structs.asdict(self), "folder": folder}.items()
            if value != ""
        }
