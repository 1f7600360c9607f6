"""Runs the objects that an export writes, as processes of this machine: a Kubernetes of one file.

A pod is a process in a network namespace with an address of its own, on a root of its own (an
overlay of this machine's), with the files, environment, user, command, probes, preStop hook and
grace period of the manifest. Names of Services resolve to the pods that are ready, by /etc/hosts. A
Deployment is updated one pod at a time, as maxSurge 1 and maxUnavailable 0 say.

Not as in Kubernetes: images are this machine's environment, times between probes are shorter
(`PACE`), limits of memory and CPU and network policies do not hold, and there is no proxy: clients
choose an address of a Service themselves.
"""

import base64
import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import clipper_core
from tests.memory_container import wait_until
from tests.threads import join

PACE = 10.0  # times between probes are divided by this
PATIENCE_S = 60.0
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
Object = dict[str, Any]
_MADE = itertools.count()  # clusters of this process

_START = """
set -e
umask 022
PATH=$PATH:/usr/sbin:/sbin
mount --make-rprivate /
mount -t tmpfs tmpfs "$DISK"
mkdir "$DISK/upper" "$DISK/work" "$DISK/merged"
mount -t overlay overlay -o "lowerdir=/,upperdir=$DISK/upper,workdir=$DISK/work" "$DISK/merged"
for place in proc dev; do mount --rbind "/$place" "$DISK/merged/$place"; done
case "$REPOSITORY" in /tmp/*) ;; *) mount -t tmpfs tmpfs "$DISK/merged/tmp" ;; esac
for place in $PLACES; do chmod a+rx "$DISK/merged$place"; done
for place in "$DISK/merged"/*; do
    test -d "$place" -a ! -L "$place" || continue
    case " $SEEN " in *" ${place##*/} "*) ;; *) mount -t tmpfs tmpfs "$place" ;; esac
done
cp -a "$FILES/." "$DISK/merged/"
mount --bind "$HOSTS" "$DISK/merged/etc/hosts"
exec chroot "$DISK/merged" setpriv --reuid "$USER_ID" --regid "$USER_ID" --clear-groups \
    --no-new-privs $READS sh -c 'cd /tmp; exec env -i "$@"' sh "$@"
"""


# Folders of this machine that a pod sees. What else lies in the root folder is hidden from pods:
# somebody's /state is none of theirs.
_SYSTEM = "bin boot dev etc home lib lib32 lib64 libx32 media mnt opt proc root run sbin srv sys"
_SEEN = frozenset((_SYSTEM + " tmp usr var").split())


# Where other users may not read the checkout, the user of a pod may read all that it sees.
_READS = "--inh-caps +dac_read_search --ambient-caps +dac_read_search"


def missing() -> str:
    """Return why pods cannot run here; empty if they can."""
    if os.getuid() != 0:
        return "only root can make namespaces"
    for tool in ("ip", "unshare", "nsenter", "setpriv"):
        if shutil.which(tool) is None:
            return f"no {tool}: apt-get install iproute2 util-linux"
    tried = subprocess.run(["unshare", "-mn", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "this machine allows no namespaces"


def _places() -> list[Path]:
    """Return the folders above what pods run, which the user of a pod must be able to enter."""
    ours = (ROOT / "x", Path(sys.executable).resolve(), Path(os.__file__))
    return sorted({parent for one in ours for parent in one.parents})


def _seen() -> list[str]:
    """Return the folders in the root folder that a pod sees."""
    return sorted(_SEEN | {place.parts[1] for place in _places() if len(place.parts) > 1})


def _is_open() -> bool:
    """Return whether other users may read what pods run: what umask 077 has closed they may not."""
    ours = [Path(__file__), Path(os.__file__), BIN, Path(np.__file__)]
    # those that were compiled last may have been so under another umask
    ours += Path(clipper_core.__file__).parent.rglob("*.so")
    if (fetched := BIN.parent / "system").exists():
        ours.append(fetched)
    return all(path.stat().st_mode & 0o004 for path in ours)


def run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


class Pod:
    """One pod of a Deployment. Threads: its own runs the probes."""

    def __init__(self, cluster: "Cluster", owner: str, number: int, template: Object) -> None:
        self.cluster, self.owner, self.node = cluster, owner, f"node-{number % 2}"
        self.name, self.labels = f"{owner}-{number}", template["metadata"]["labels"]
        self.spec = template["spec"]
        (self.container,) = self.spec["containers"]
        self.ports = {one["name"]: one["containerPort"] for one in self.container.get("ports", ())}
        self.started = self.ready = self.terminating = False
        self.restarts = -1
        self._link, self.address = cluster.make_link(number)
        self._over = threading.Event()
        self._start()
        self._watch = threading.Thread(target=self._probe)
        self._watch.start()

    # -- the process

    def _start(self) -> None:
        self.restarts += 1
        self.started = self.ready = False
        folder = self.cluster.folder / self.name / str(self.restarts)
        disk, files = folder / "disk", folder / "files"
        disk.mkdir(parents=True)
        entry, env = self.cluster.image(self.container["image"], files)
        user = self.spec["securityContext"]["runAsUser"]
        self._mount(files, user)
        self._environment = {**env, **self._env()}
        words = [f"{key}={value}" for key, value in self._environment.items()]
        self.log = folder / "log"
        log = self.log.open("wb")
        self.process = subprocess.Popen(
            [
                *("ip", "netns", "exec", self._link, "unshare", "--mount", "sh", "-c", _START),
                *("sh", *words, *entry, *map(self._filled, self.container.get("args", ()))),
            ],
            env={
                **os.environ,
                "DISK": str(disk),
                "FILES": str(files),
                "HOSTS": str(self.cluster.hosts),
                "USER_ID": str(user),
                "REPOSITORY": str(ROOT),
                "PLACES": " ".join(map(str, _places())),
                "SEEN": " ".join(_seen()),
                "READS": "" if _is_open() else _READS,
            },
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        log.close()

    def _mount(self, files: Path, user: int) -> None:
        volumes = {one["name"]: one for one in self.spec["volumes"]}
        for mount in self.container["volumeMounts"]:
            volume, place = volumes[mount["name"]], files / mount["mountPath"].lstrip("/")
            if mount["mountPath"] == "/tmp":
                continue
            place.mkdir(parents=True, exist_ok=True)
            for folder in (place, *place.parents):
                folder.chmod(0o755)  # as a kubelet makes them, whatever the umask is here
                if folder == files:
                    break
            for name, content in self.cluster.contents(volume).items():
                (place / name).write_bytes(content)
            for one in (place, *place.iterdir()):
                os.chown(one, user, user)

    def _env(self) -> dict[str, str]:
        found = {}
        for one in self.container.get("env", ()):
            source = one.get("valueFrom", {})
            if "secretKeyRef" in source:
                reference = source["secretKeyRef"]
                content = self.cluster.secret(reference["name"])[reference["key"]]
                found[one["name"]] = content.decode()
            elif "fieldRef" in source:
                fields = {"metadata.name": self.name, "status.podIP": self.address}
                found[one["name"]] = fields[source["fieldRef"]["fieldPath"]]
            else:
                found[one["name"]] = one["value"]
        return found

    def _filled(self, word: str) -> str:
        return re.sub(r"\$\((\w+)\)", lambda name: self._environment[name[1]], word)

    def execute(self, command: Sequence[str], timeout_s: float) -> bool:
        """Run a command in the pod; return whether it succeeded in time."""
        words = ["nsenter", "-t", str(self.process.pid), "-m", "-n", "-r", "env", "-i"]
        words += [f"{key}={value}" for key, value in self._environment.items()]
        try:
            done = subprocess.run(
                [*words, *command], capture_output=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    # -- its probes

    def _succeeds(self, probe: Object) -> bool:
        if "exec" in probe:
            return self.execute(probe["exec"]["command"], probe["timeoutSeconds"])
        if "tcpSocket" in probe:
            place = self.address, self.ports[probe["tcpSocket"]["port"]]
            limit_s = probe["timeoutSeconds"]
            with contextlib.suppress(OSError), socket.create_connection(place, limit_s):
                return True
            return False
        port, path = self.ports[probe["httpGet"]["port"]], probe["httpGet"]["path"]
        try:
            url = f"http://{self.address}:{port}{path}"
            with urllib.request.urlopen(url, timeout=probe["timeoutSeconds"]) as got:
                return bool(200 <= got.status < 400)
        except OSError:
            return False

    def _probe(self) -> None:
        failures: dict[str, int] = {}
        due_s: dict[str, float] = {}
        while not self._over.wait(0.02):
            if self.process.poll() is not None and not self.terminating:
                self.ready = False
                self.cluster.publish()
                if self._over.wait(min(self.restarts, 10) * 0.5):
                    return
                self._start()
                failures, due_s = {}, {}
                self.cluster.publish()
            kinds = ("readinessProbe", "livenessProbe") if self.started else ("startupProbe",)
            for kind in kinds:
                probe = self.container.get(kind)
                if probe is None:
                    self.started = True
                    continue
                if time.monotonic() < due_s.get(kind, 0.0) or self._over.is_set():
                    continue
                due_s[kind] = time.monotonic() + probe["periodSeconds"] / PACE
                good = self._succeeds(probe)
                failures[kind] = 0 if good else failures.get(kind, 0) + 1
                # a start may take as long as the manifest says, on a busy machine
                pace = PACE if kind == "startupProbe" else 1.0
                self._judge(kind, good, failures[kind] >= pace * probe["failureThreshold"])

    def _judge(self, kind: str, good: bool, over: bool) -> None:
        if kind == "startupProbe":
            self.started = good
        elif kind == "readinessProbe" and (good or over) and self.ready != good:
            self.ready = good
            self.cluster.publish()
        if kind != "readinessProbe" and over:
            self.process.kill()

    # -- its end

    def kill(self) -> None:
        """Kill its process; it is started again."""
        self.process.kill()

    def end(self) -> None:
        """End it as `kubectl delete pod` does: out of its Services, preStop, SIGTERM, SIGKILL."""
        self.terminating = True
        self.cluster.publish()
        until = time.monotonic() + self.spec["terminationGracePeriodSeconds"]
        hook = self.container.get("lifecycle", {}).get("preStop")
        if hook is not None:
            assert self.execute(hook["exec"]["command"], until - time.monotonic())
        self.process.terminate()
        self.returned = self.process.wait(until - time.monotonic())
        self._forget()

    def lose(self) -> None:
        """Cut off the pod's machine: its link goes down, then the pod is removed."""
        run("ip", "link", "set", f"{self._link}h", "down")
        self.terminating = True
        self._forget()

    def _forget(self) -> None:
        self._over.set()
        join(self._watch)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        run("ip", "link", "del", f"{self._link}h")  # its namespace may end later
        run("ip", "netns", "del", self._link)
        self.ready = False
        self.cluster.publish()


class Cluster:
    """Pods on a bridge of this machine. Threads: one; probes have their own.

    images: folders of the build contexts of models, by the name of the model.
    """

    def __init__(self, folder: Path, images: Path) -> None:
        self.folder, self._images = folder, images
        self.hosts = folder / "hosts"
        self.hosts.write_text("127.0.0.1 localhost\n")
        # for all users of the pods, whatever the umask is here
        self.hosts.chmod(0o644)
        self.pods: list[Pod] = []
        self._objects: dict[tuple[str, str], Object] = {}
        self._lock = threading.Lock()
        self._numbers = 1
        made = next(_MADE)
        self._bridge = f"clp{os.getpid() % 100_000}{'abcdefgh'[made]}"
        self._net = f"10.{100 + (os.getpid() + made) % 100}.{os.getpid() // 100 % 250}"
        run("ip", "link", "add", self._bridge, "type", "bridge")
        run("ip", "addr", "add", f"{self._net}.1/24", "dev", self._bridge)
        run("ip", "link", "set", self._bridge, "up")

    def make_link(self, number: int) -> tuple[str, str]:
        """Make a network namespace on the bridge; return its name and its address."""
        link, address = f"{self._bridge}n{number}", f"{self._net}.{number + 1}"
        run("ip", "netns", "add", link)
        run("ip", "link", "add", f"{link}h", "type", "veth", "peer", "name", "eth0", "netns", link)
        run("ip", "link", "set", f"{link}h", "master", self._bridge, "up")
        inside = ("ip", "-n", link)
        run(*inside, "addr", "add", f"{address}/24", "dev", "eth0")
        run(*inside, "link", "set", "eth0", "up")
        run(*inside, "link", "set", "lo", "up")
        return link, address

    # -- what pods are made of

    def image(self, name: str, files: Path) -> tuple[list[str], dict[str, str]]:
        """Write the files of an image; return its entry point and environment."""
        env = {"PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/tmp"}
        kind, _, what = name.partition("/")
        if not what:
            return [f"{kind.partition(':')[0]}-server", "--protected-mode", "no"], env
        if what.startswith("server:"):
            return ["clipper"], env
        context = self._images / what.partition(":")[0]
        text = (context / "Dockerfile").read_text()
        for source, target in re.findall(r"^COPY ([\w.-]+) (/\S+)$", text, re.M):
            shutil.copytree(context / source, files / target.lstrip("/"))
        for program in re.findall(r'^RUN chmod 755 ("[^"]+")$', text, re.M):
            (files / json.loads(program).lstrip("/")).chmod(0o755)
        for pairs in re.findall(r"^ENV (.*)$", text.replace("\\\n", " "), re.M):
            words = [word.partition("=") for word in shlex.split(pairs)]
            env |= {key: value for key, _, value in words if key != "PATH"}  # of the image's Python
        (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.M)
        return json.loads(entry), env

    def secret(self, name: str) -> dict[str, bytes]:
        found = self._objects["Secret", name]
        plain = {key: value.encode() for key, value in found.get("stringData", {}).items()}
        return plain | {
            key: base64.b64decode(value) for key, value in found.get("data", {}).items()
        }

    def contents(self, volume: Object) -> dict[str, bytes]:
        """Return the files of a volume of a pod."""
        if "configMap" in volume:
            texts = self._objects["ConfigMap", volume["configMap"]["name"]]["data"]
            return {name: text.encode() for name, text in texts.items()}
        if "secret" in volume:
            values = self.secret(volume["secret"]["secretName"])
            items = volume["secret"].get("items") or [{"key": key, "path": key} for key in values]
            return {one["path"]: values[one["key"]] for one in items}
        return {}  # an emptyDir, or a claim

    # -- Services

    def addresses(self, service: str) -> list[str]:
        """Return the addresses of the pods of a Service."""
        spec = self._objects["Service", service]["spec"]
        return [
            pod.address
            for pod in self.pods
            if spec["selector"].items() <= pod.labels.items()
            and (spec.get("publishNotReadyAddresses") or (pod.ready and not pod.terminating))
        ]

    def publish(self) -> None:
        """Write the addresses of all Services where the pods look names up."""
        with self._lock:
            names = [name for kind, name in self._objects if kind == "Service"]
            lines = [f"{one} {name}" for name in names for one in self.addresses(name)]
            text = "\n".join(["127.0.0.1 localhost", *lines, ""])
            with self.hosts.open("r+") as file:  # in place: it is mounted in the pods
                file.write(text)
                file.truncate()

    # -- Deployments

    def of(self, deployment: str) -> list[Pod]:
        """Return the pods of a Deployment that are not ending."""
        return [pod for pod in self.pods if pod.owner == deployment and not pod.terminating]

    def apply(self, objects: Sequence[Object]) -> None:
        """Take objects, start the pods of new Deployments, and wait until all are ready."""
        for one in objects:
            self._objects[one["kind"], one["metadata"]["name"]] = one
        self.publish()
        for (kind, name), one in self._objects.items():
            if kind == "Deployment" and not self.of(name):
                for _ in range(one["spec"].get("replicas", 1)):
                    self._add(name)
        self.wait_ready()

    def _add(self, deployment: str) -> Pod:
        self._numbers += 1
        template = self._objects["Deployment", deployment]["spec"]["template"]
        pod = Pod(self, deployment, self._numbers, template)
        self.pods.append(pod)
        self.publish()
        return pod

    def wait_ready(self, pods: Sequence[Pod] | None = None) -> None:
        """Wait until pods are ready: all, if none are named."""
        some = list(self.pods if pods is None else pods)
        try:
            wait_until(lambda: all(pod.ready for pod in some), "pods are ready", PATIENCE_S)
        except AssertionError:
            late = [pod for pod in some if not pod.ready]
            logs = [f"{pod.name}: {pod.log.read_text()[-2000:]}" for pod in late]
            raise AssertionError("\n".join(logs)) from None

    def restart(self, deployment: str) -> None:
        """Replace all pods, as `kubectl rollout restart` does: one more first, then one less."""
        how = self._objects["Deployment", deployment]["spec"]["strategy"]["rollingUpdate"]
        assert how == {"maxUnavailable": 0, "maxSurge": 1}
        for old in self.of(deployment):
            self.wait_ready([self._add(deployment)])
            self._end(old)

    def scale(self, deployment: str, count: int) -> None:
        """Add or end pods."""
        while len(self.of(deployment)) < count:
            self._add(deployment)
        for pod in self.of(deployment)[count:]:
            self._end(pod)
        self.wait_ready(self.of(deployment))

    def lose(self, node: str, but: Sequence[str] = ()) -> None:
        """Cut off a machine with its pods; their Deployments start others. but: names of
        Deployments whose pods stay, as if they were on another machine."""
        lost_pods = [pod for pod in self.pods if pod.node == node and pod.owner not in but]
        for pod in lost_pods:
            pod.lose()
            self.pods.remove(pod)
        self.wait_ready([self._add(pod.owner) for pod in lost_pods])

    def _end(self, pod: Pod) -> None:
        pod.end()
        self.pods.remove(pod)
        self.publish()

    def close(self) -> None:
        """End everything."""
        for pod in self.pods:
            if not pod.terminating:
                with contextlib.suppress(subprocess.CalledProcessError):
                    pod.lose()
        run("ip", "link", "del", self._bridge)
