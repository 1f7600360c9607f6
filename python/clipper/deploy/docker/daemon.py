"""Docker and podman, through the API that both implement (package `docker`, an optional extra).

A container gets minimal rights: no capabilities, no new privileges, a read-only file system except
/tmp, and, if the server listens on a unix socket, no network: the socket is mounted. Shared memory
works, because it is passed over that socket. The container runs as the user of the server; for a
server run by root it runs as an unprivileged user who is given access to the socket and the token,
both in a folder that only root can enter.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clipper.deploy.deployer import ContainerSpec
from clipper.deploy.docker.image import TOKEN_FILE, USER, Image, image_of
from clipper.errors import DeployFailed
from clipper.settings.docker import DockerSettings
from clipper.state_dir import is_alive
from clipper.types import VERSION

if TYPE_CHECKING:
    import docker.types.daemon

INSTALL: Final = 'pip install "clipper-serving[docker]".'
SOCKET: Final = "/run/clipper.sock"
TAIL_LINES: Final = 20
_STARTS: Final = {
    "docker": "Start it: systemctl start docker.",
    "podman": (
        "Start it: systemctl start podman.socket (of your own: systemctl --user start"
        " podman.socket)."
    ),
}
_JOIN: Final = (
    "Join its group: sudo usermod -aG docker $USER, then log in again. Or use podman, as yourself."
)
_ANOTHER: Final = 'Name another with docker.socket, or serve the model with deployer = "process".'
_LABEL: Final = "clipper.run"
_CHECK_S: Final = 0.05  # how often a build is looked at


@dataclass(frozen=True, slots=True)
class Owner:
    """Identity of a server on its containers' labels. run: its runtime folder. folder: its state
    folder, which it holds locked, or empty.
    """

    run: Path
    folder: str = ""

    def labels(self) -> dict[str, str]:
        """Return the labels that mark containers of this server."""
        return {_LABEL: str(self.run), "clipper.folder": self.folder, "clipper.host": _host()}

    def owns_or_outlived(self, labels: dict[str, str]) -> bool:
        """Return True if a container is left over: its server used our state folder, or ran on
        this host and has ended.
        """
        run = labels.get(_LABEL, "")
        if run == str(self.run):
            return False
        if self.folder and labels.get("clipper.folder") == self.folder:
            return True
        return bool(run) and labels.get("clipper.host") == _host() and not is_alive(Path(run))


def _host() -> str:
    """Return an id of this host and its view of the file system; folders of other hosts must not
    be judged.
    """
    return f"{socket.gethostname()}/{os.stat('/proc/self/ns/mnt').st_ino}"


class EngineAway(DeployFailed):
    """An engine is unreachable for now."""


class Daemon:
    """One engine. kind: "docker" or "podman".

    Threads: any. Every call raises DeployFailed, with the next step, when the engine refuses, and
    EngineAway when it is unreachable.
    """

    def __init__(self, kind: str, settings: DockerSettings, owner: Owner) -> None:
        self.kind, self._settings, self._owner = kind, settings, owner
        self._client: docker.APIClient | None = None
        # held for as long as an engine takes to answer: close() does without it
        self._connecting = threading.Lock()
        self._building: dict[str, threading.Lock] = {}
        self._user: str | None = None

    def close(self) -> None:
        """Close the client, without a wait for the engine; a later call connects anew."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    @property
    def _api(self) -> docker.APIClient:
        """Return the connected client. One that connects removes containers left by killed
        servers first, so that this is done again if it fails.
        """
        with self._connecting:
            client = self._client
            if client is None:
                client = self._connected()
                self._user = self._user_of(client)
                self._sweep(client)
                self._client = client
            return client

    # -- connecting

    def _connected(self) -> docker.APIClient:
        import docker

        where = self._where()
        self._probe(where)
        try:
            return docker.APIClient(where, version="auto", timeout=self._settings.answer_s)
        except docker.errors.DockerException as error:
            raise EngineAway(
                f"{self.kind} does not answer at {where}: {error}.", hint=_ANOTHER
            ) from None

    def _where(self) -> str:
        if self._settings.socket:
            return self._settings.socket
        if url := os.environ.get("DOCKER_HOST" if self.kind == "docker" else "CONTAINER_HOST"):
            return url
        mine = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
        if self.kind == "docker":
            usual = ["/var/run/docker.sock", f"{mine}/docker.sock"]
        else:
            usual = ["/run/podman/podman.sock", f"{mine}/podman/podman.sock"][
                :: 1 if os.getuid() == 0 else -1
            ]
        return "unix://" + next((path for path in usual if os.path.exists(path)), usual[0])

    def _probe(self, where: str) -> None:
        """Raise an error with the next step if nothing answers at a unix socket."""
        if not where.startswith("unix:"):
            return
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(self._settings.answer_s)
                probe.connect("/" + where.removeprefix("unix:").lstrip("/"))
        except PermissionError:
            why, hint = "no permission", _JOIN
        except FileNotFoundError:
            why, hint = "there is no such socket", _STARTS[self.kind]
        except ConnectionRefusedError:
            why, hint = "no process listens there", _STARTS[self.kind]
        except OSError as error:
            why, hint = error.strerror or str(error), _ANOTHER
        else:
            return
        raise EngineAway(f"{self.kind} does not answer at {where}: {why}.", hint=hint)

    def refused(self, error: Exception, doing: str) -> DeployFailed:
        """Convert an error of the package to DeployFailed."""
        why = getattr(error, "explanation", None) or str(error)
        return DeployFailed(
            f"{self.kind} could not {doing}: {str(why).strip().rstrip('.')}.",
            hint=f"See: {self.kind} info.",
        )

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[docker.APIClient]:
        """Return the client; errors become DeployFailed."""
        try:
            import docker
            import requests
        except ImportError:
            raise DeployFailed(
                f"deployer {self.kind!r} needs the package docker.", hint=INSTALL
            ) from None
        try:
            yield self._api
        except (requests.ConnectionError, requests.Timeout) as error:
            raise EngineAway(f"{self.kind} does not answer: {error}.", hint=_ANOTHER) from None
        except (docker.errors.DockerException, requests.RequestException) as error:
            raise self.refused(error, what) from None

    def _user_of(self, api: docker.APIClient) -> str | None:
        """Return the user for a container so that it can use the server's socket; None: the
        image's user.
        """
        if any("rootless" in option for option in api.info().get("SecurityOptions") or ()):
            return "0:0"  # rootless: root in the container is the user who runs the engine
        return None if os.getuid() == 0 else f"{os.getuid()}:{os.getgid()}"

    def _sweep(self, api: docker.APIClient) -> None:
        for found in api.containers(all=True, filters={"label": _LABEL}):
            if self._owner.owns_or_outlived(found.get("Labels") or {}):
                import docker

                with contextlib.suppress(docker.errors.APIError):
                    api.remove_container(found["Id"], force=True)

    # -- images

    def image(
        self, spec: ContainerSpec, on_progress: Callable[[str], None], is_over: Callable[[], bool]
    ) -> str:
        """Return the name of the model's image, building it if needed. on_progress: receives the
        builder's lines.
        """
        assert spec.needs is not None
        image = image_of(spec, spec.needs, self._settings.base)
        with self._building.setdefault(image.name, threading.Lock()):
            with self.doing("search for an image") as api:
                if api.images(image.name, quiet=True):
                    return image.name
            on_progress(f"building image {image.name}")
            self._build(image, spec, on_progress, is_over)
            return image.name

    def _build(
        self,
        image: Image,
        spec: ContainerSpec,
        on_progress: Callable[[str], None],
        is_over: Callable[[], bool],
    ) -> None:
        until, last = time.monotonic() + self._settings.build_s, deque[str](maxlen=TAIL_LINES)
        with self.doing(f"build the image of '{spec.name}:{spec.version}'") as api:
            stream, followed = _opened(api, image, self._settings), threading.Event()
            watch = threading.Thread(
                target=close_when,
                args=(stream, followed, is_over, until),
                name="clipper-build",
                daemon=True,
            )
            watch.start()
            try:
                error = _follow_build(stream, last, on_progress)
            finally:
                followed.set()
                watch.join()
                stream._response.close()
            if error or not api.images(image.name, quiet=True):
                late = time.monotonic() >= until
                why = (
                    f"it was not ready in {self._settings.build_s:g} s"
                    if late
                    else error or "the builder was cut off"
                )
                lines, id_ = "\n".join(last), f"{spec.name}:{spec.version}"
                text = (
                    f"the image of model '{id_}' was not built: {why.strip().rstrip('.')}. Its last"
                    f" lines:\n{lines}\n"
                )
                hint = (
                    "Is it the base? Set docker.base. Is it a package? See the model's"
                    " requirements, and docker.build_network."
                )
                raise DeployFailed(text, hint=hint)

    # -- containers

    def create(self, image: str, spec: ContainerSpec, replica: int) -> str:
        """Create a container without starting it; return its id."""
        settings = self._settings
        connect, mounts, network = self._way_in(spec)
        words = ["--connect", connect, "--replica", str(replica), "--threads", str(spec.threads)]
        labels = {
            **self._owner.labels(),
            "clipper.model": f"{spec.name}:{spec.version}",
            "clipper.replica": str(replica),
        }
        name = f"clipper-{spec.name}-{spec.version}-{replica}-{self._owner.run.name.rpartition('-')[2]}"  # noqa: E501
        with self.doing(f"make a container of {image}") as api:
            from docker.types import DeviceRequest, LogConfig

            memory = spec.memory_mib << 20 or None
            gpus = (
                [DeviceRequest(capabilities=[["gpu"]], **_gpus(spec.gpus))] if spec.gpus else None
            )
            size = {"max-size": f"{settings.log_mib}m", "max-file": "1"}
            host = api.create_host_config(
                mounts=mounts,
                network_mode=network,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges"],
                read_only=True,
                tmpfs={"/tmp": f"rw,nosuid,nodev,mode=1777,size={settings.tmp_mib}m"},
                pids_limit=settings.processes_max,
                mem_limit=memory,
                memswap_limit=memory,
                nano_cpus=int(spec.cpus * 1e9) or None,
                device_requests=gpus,
                log_config=LogConfig(type="json-file", config=size)
                if self.kind == "docker"
                else None,
            )
            with contextlib.suppress(Exception):  # left by an earlier start of this replica
                api.remove_container(name, force=True)
            environment = {"HOME": "/tmp", "CLIPPER_VERSION": VERSION, **spec.env}
            made = api.create_container(
                image,
                words,
                name=name,
                labels=labels,
                host_config=host,
                user=self._user,
                environment=environment,
            )
            return str(made["Id"])

    def _way_in(self, spec: ContainerSpec) -> tuple[str, list[docker.types.Mount], str]:
        """Return the address that the container connects to, its mounts and its network."""
        from docker.types import Mount

        mounts: list[docker.types.Mount] = []
        opened: list[Path] = []
        for place, text in {TOKEN_FILE: spec.token, **spec.secrets}.items():
            file = self._owner.run / f"secret-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
            _write(file, text)
            mounts.append(Mount(place, str(file), type="bind", read_only=True))
            opened.append(file)
        if not spec.connect.startswith("unix:"):
            self._open_to_it(opened)
            network = self._settings.network or "host"
            return spec.connect.replace("tcp:0.0.0.0:", "tcp:127.0.0.1:"), mounts, network
        path = Path(spec.connect.removeprefix("unix:"))
        mounts.append(Mount(SOCKET, str(path), type="bind"))
        self._open_to_it(opened, path)
        return f"unix:{SOCKET}", mounts, self._settings.network or "none"

    def _open_to_it(self, files: Sequence[Path], socket: Path | None = None) -> None:
        """Give the group of the containers' user access to files that belong to this user."""
        if os.getuid() == 0 and self._user is None:
            for file in (*files, *([socket] if socket else ())):
                os.chown(file, -1, USER)
                os.chmod(file, file.stat().st_mode | (0o060 if file == socket else 0o040))

    def output(self, container: str, all_of_it: bool) -> Iterator[bytes]:
        """Yield the output of a container, all of it or from now on, until it ends."""
        with self.doing("follow a container") as api:
            stream = api.logs(container, stream=True, follow=True, tail="all" if all_of_it else 0)
        try:
            yield from stream
        finally:
            with contextlib.suppress(Exception):  # the connection may be gone
                stream.close()

    def start(self, container: str) -> None:
        """Start a container."""
        with self.doing("start a container") as api:
            api.start(container)

    def kill(self, container: str, number: signal.Signals) -> None:
        """Send a signal to a container; one that has ended is ignored."""
        with contextlib.suppress(DeployFailed), self.doing("signal a container") as api:
            api.kill(container, int(number))

    def remove(self, container: str) -> None:
        """Remove a container."""
        with contextlib.suppress(DeployFailed), self.doing("remove a container") as api:
            api.remove_container(container, force=True)

    def state(self, container: str) -> dict[str, object]:
        """Return the engine's state of a container: Running, ExitCode, OOMKilled."""
        with self.doing("inspect a container") as api:
            return dict(api.inspect_container(container)["State"])


def _write(path: Path, text: str) -> None:
    with (
        contextlib.suppress(FileExistsError),
        open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file,
    ):
        file.write(text)


def _gpus(text: str) -> dict[str, object]:
    """Convert "all", a number or ids to the engine's device request."""
    if text == "all":
        return {"count": -1}
    return (
        {"count": int(text)}
        if text.isdecimal()
        else {"device_ids": [one.strip() for one in text.split(",")]}
    )


# -- following a build


def _opened(
    api: docker.APIClient, image: Image, settings: DockerSettings
) -> docker.types.daemon.CancellableStream:
    """Open a builder's output that another thread can close; the package's build() does not
    allow that.
    """
    from docker.types.daemon import CancellableStream

    what = {"t": image.name, "rm": "1", "forcerm": "1"}
    what |= {"networkmode": settings.build_network} if settings.build_network else {}
    where, headers = (
        f"{api.base_url}/v{api.api_version}/build",
        {"Content-Type": "application/x-tar"},
    )
    response = api.post(
        where, data=image.context(), params=what, headers=headers, stream=True, timeout=None
    )
    if not response.ok:
        lines = iter(
            [json.dumps({"error": response.json().get("message", response.text)}).encode()]
        )
        return CancellableStream(lines, response)
    return CancellableStream(response.iter_lines(), response)


def close_when(
    stream: docker.types.daemon.CancellableStream,
    followed: threading.Event,
    is_over: Callable[[], bool],
    until: float,
) -> None:
    """Close a builder's output once the build is not wanted any more or `until` has come (seconds
    of the monotonic clock), unless it was followed to its end before."""
    while not followed.wait(_CHECK_S):
        if is_over() or time.monotonic() >= until:
            with contextlib.suppress(Exception):  # the build may have ended
                stream.close()
            return


def _follow_build(
    stream: docker.types.daemon.CancellableStream,
    last: deque[str],
    on_progress: Callable[[str], None],
) -> str:
    """Report each line of a build; return the error, if any."""
    for line in stream:
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if "error" in message:
            return str(message["error"])
        text = str(
            message.get("stream")
            or " ".join(str(message[key]) for key in ("status", "id") if message.get(key))
        )
        if text.strip() and not message.get("progressDetail"):
            last.append(text.rstrip())
            on_progress(text.rstrip())
    return ""
