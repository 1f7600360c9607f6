"""Running models for operators: `ps`, and the log lines of containers."""

import re
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from clipper.catalog.catalog import Catalog
from clipper.deploy.deployer import LogTail
from clipper.errors import InvalidInput, UnknownModel
from clipper.metrics.stats import ModelStats, ReplicaStats, ServerStats
from clipper.serving.models.batch_cost import padding_of
from clipper.types import Application, Model, VersionedModel
from clipper_container.machine import proportional_bytes, resident_bytes

FIRST_LINES = 20  # of each container, when somebody begins to follow
_ERROR_LINE = re.compile(r"\w[\w.]*(Error|Exception|Interrupt|Exit)\b.*")
_ERROR_MAX = 200
NOT_WARM: Final = "warm-up failed"  # until it has answered


class InspectedServer(Protocol):
    """Interface of a server that can be inspected: see ClipperServer."""

    catalog: Catalog

    def logs(self, name: str | VersionedModel, replica: int = 0) -> Sequence[str]:
        """Return the last lines of a replica's log."""

    def stats(self) -> ServerStats:
        """Return the stats of the server."""


def processes(server: InspectedServer) -> list[dict[str, object]]:
    """Return a row for each version in service: name, version, latest, roles (by application),
    state, ready and wanted replicas, rss_bytes, pss_bytes (a page that n processes share counts
    1/n), starts (by replica: "forked", or "plain: " and why; then its limits), queued, batch (the
    largest that a replica takes now), why, error and next (the command that helps), both perhaps
    empty.
    """
    view, stats = server.catalog.view, server.stats()["models"]
    return [
        _row(server, model, stats.get(str(model.id), {}), view.linking(model))
        for model in server.catalog.models()
    ]


def troubles(
    server: InspectedServer, stats: Mapping[str, ModelStats]
) -> dict[str, tuple[str, str, str]]:
    """Return by `name:version` its state, its trouble, and the command that helps; the latter two
    may be empty. stats: those of models.
    """
    view, found = server.catalog.view, {}
    for model in view.models():
        row = stats.get(str(model.id), {})
        state = _state(row)
        found[str(model.id)] = (state, *_trouble(server, model, row, view.linking(model), state))
    return found


def _row(
    server: InspectedServer, model: Model, row: ModelStats, apps: Sequence[Application]
) -> dict[str, object]:
    replicas: Sequence[ReplicaStats] = row.get("replicas", [])
    is_latest = server.catalog.view.model(model.name).id == model.id
    state = _state(row)
    error, command = _trouble(server, model, row, apps, state)
    return {
        "name": model.name,
        "version": model.version,
        "latest": is_latest,
        "roles": {app.name: _role(app, model) for app in apps},
        "state": state,
        "ready": row.get("has", 0),
        "wanted": row.get("wanted", 0),
        "rss_bytes": sum(map(_rss, replicas)),
        "pss_bytes": sum(proportional_bytes(pid) for pid in map(_pid_here, replicas) if pid),
        "starts": {str(one["number"]): one["start"] for one in replicas if "start" in one},
        "queued": row.get("queued", 0),
        "batch": max((one.get("limit", 0) for one in replicas), default=0),
        "why": _why(model, row, apps),
        "error": error,
        "next": command,
    }


def _role(app: Application, model: Model) -> str:
    return next(
        (app.roles[key] for key in (str(model.id), model.name) if key in app.roles), "primary"
    )


def _state(row: ModelStats) -> str:
    """Return the state of a version in a word or two."""
    replicas: Sequence[ReplicaStats] = row.get("replicas", [])
    has = row.get("has", 0)
    wanted = row.get("wanted", 0)
    stage = row.get("stage", "")
    states = {
        "suspect" if one.get("suspect") else "ejected" if one.get("ejected") else str(one["state"])
        for one in replicas
    }
    named = (
        ("failed", "failed"),
        ("held", "held"),
        ("backoff", "failing"),
        ("short", "waiting"),
        ("suspect", "not responding"),
        ("ejected", "failing"),
    )
    for state, text in named:
        if state in states:
            return text
    if stage == "failed":
        return "failed"
    if has >= wanted and has and row.get("warmup_error") and not row.get("evaluated"):
        return NOT_WARM
    if has >= wanted:
        return "ready" if has else "stopped"
    return "loading" if not has else "partly ready"


def _pid_here(replica: ReplicaStats) -> int:
    """Return the process id, if the process was started here; 0 for one elsewhere, and for one in a
    container with numbers of its own (1), where it means another.
    """
    pid = int(replica.get("pid", 0)) if "restart_count" in replica else 0
    return pid if pid > 1 else 0


def _rss(replica: ReplicaStats) -> int:
    pid = _pid_here(replica)
    return resident_bytes(pid) if pid else 0


def _why(model: Model, row: ModelStats, apps: Sequence[Application]) -> str:
    parts: list[str] = [model.batching.mode]
    if model.batching.cost:
        parts.append(f"cost {model.batching.cost.rpartition(':')[2]}")
    padding = padding_of(row) if model.batching.padded else None
    if padding is not None:
        parts.append(f"{padding:.0%} padding")
    if apps:
        parts.append(f"SLO {min(app.slo_ms for app in apps):g} ms")
    latency = row.get("latency_us")
    if latency is not None and latency.count:
        parts.append(f"p99 {latency.quantile(0.99) / 1000:.3g}")
    return ", ".join(parts)


def _trouble(
    server: InspectedServer, model: Model, row: ModelStats, apps: Sequence[Application], state: str
) -> tuple[str, str]:
    """Return the problem of a model, and the command that helps."""
    error, command = _own_trouble(server, model, row, apps, state)
    if instead := row.get("instead"):
        waits = f"queries get {instead} here until it is up"
        error = f"{error}; {waits}" if error else waits
        command = command or f"clipper logs {model.id}"
    return error, command


def _own_trouble(
    server: InspectedServer, model: Model, row: ModelStats, apps: Sequence[Application], state: str
) -> tuple[str, str]:
    replicas = row.get("replicas", [])
    broken = [
        one
        for one in replicas
        if one["state"] in ("failed", "held", "backoff", "short") or one.get("restart_count")
    ]
    if broken:
        worst = max(
            broken,
            key=lambda one: (
                one["state"] in ("failed", "held"),
                one["state"] in ("backoff", "short"),
                one.get("restart_count", 0),
            ),
        )
        last_line = _last_log_line(server, model, int(worst["number"]))
        exits = worst.get("detail") or f"restarted {worst.get('restart_count', 0)} times"
        if again_s := worst.get("again_s"):
            exits = f"{exits}, tried again in {again_s:.0f} s"
        return f"{last_line} ({exits})" if last_line else str(exits), f"clipper logs {model.id}"
    if state == "failed":
        return _last_log_line(server, model, 0) or "it did not come up", f"clipper logs {model.id}"
    ejected = [one for one in replicas if one.get("ejected")]
    if ejected:
        worst = max(ejected, key=lambda one: int(one["failures"]))
        last_line = _last_log_line(server, model, int(worst["number"]), errors_only=True)
        why = f"replica {worst['number']} is ejected: its model failed {worst['failures']} batches"
        return (
            f"{why}{': ' + last_line if last_line else ''}",
            f"clipper logs {model.id} --replica {worst['number']}",
        )
    failed = sum(row.get("ended", {}).get(kind, 0) for kind in ("MODEL_ERROR", "BAD_OUTPUT"))
    if failed:
        numbers = [int(one["number"]) for one in replicas if "restart_count" in one]
        last_line = next(
            (
                text
                for number in numbers
                if (text := _last_log_line(server, model, number, errors_only=True))
            ),
            "",
        )
        return (
            f"{failed} queries failed{': ' + last_line if last_line else ''}",
            f"clipper logs {model.id}",
        )
    if state == NOT_WARM:
        return str(row.get("warmup_error", ""))[:_ERROR_MAX], f"clipper logs {model.id}"
    one_us = one_row_us(replicas)
    tight = [app for app in apps if one_us > app.slo_ms * 1000]
    if tight:
        app = min(tight, key=lambda app: app.slo_ms)
        return (
            f"one row takes {_in_ms(one_us)} ms, the SLO of {app.name} is {app.slo_ms:g} ms",
            f"clipper profile {model.id}",
        )
    if not replicas and not model.target:
        return "", "clipper-container serve"
    return "", ""


def _in_ms(us: float) -> str:
    """Return a time in milliseconds, without an exponent. us: microseconds."""
    ms = us / 1000
    return f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"


def one_row_us(replicas: Sequence[ReplicaStats]) -> float:
    """Return the duration of the smallest batch of the fastest replica; 0 when there was none."""
    return min((float(one["profile"][0][1]) for one in replicas if one.get("profile")), default=0.0)


def _last_log_line(
    server: InspectedServer, model: Model, number: int, errors_only: bool = False
) -> str:
    """Return the last line that looks like an error, else the last one."""
    try:
        lines = [line.strip() for line in server.logs(model.id, number) if line.strip()]
    except UnknownModel:
        return ""
    found = next((found[0] for line in reversed(lines) if (found := _ERROR_LINE.search(line))), "")
    return (found or ("" if errors_only or not lines else lines[-1]))[:_ERROR_MAX]


# -- following


def followed(server: InspectedServer, model: str, after: str) -> dict[str, object]:
    """Return the lines that the containers of a model wrote after `after`.

    after: as the previous call returned it, or empty. The result has `replicas` (number, lines,
    lost lines) and the next `after`. Counting continues over a container's restart.
    """
    id_ = server.catalog.view.model(model).id
    known = _read_after(after)
    row = server.stats()["models"].get(str(id_), {})
    rows, marks = [], []
    for number in sorted(
        {int(one["number"]) for one in row.get("replicas", []) if "restart_count" in one}
    ):
        try:
            lines = server.logs(id_, number)
        except UnknownModel:
            continue
        total = lines.total if isinstance(lines, LogTail) else len(lines)
        seen = known.get(f"{id_.version}.{number}", max(total - FIRST_LINES, 0))
        seen = seen if seen <= total else 0  # another server counts from nought
        fresh = list(lines[len(lines) - min(total - seen, len(lines)) :])
        rows.append({"replica": number, "lines": fresh, "lost": total - seen - len(fresh)})
        marks.append(f"{id_.version}.{number}:{total}")
    return {"model": str(id_), "replicas": rows, "after": ",".join(marks)}


def _read_after(after: str) -> dict[str, int]:
    try:
        pairs = [mark.split(":") for mark in after.split(",") if mark]
        return {key: int(total) for key, total in pairs}
    except ValueError:
        raise InvalidInput(
            f"after={after[:60]!r} is not a position that the server has returned.",
            hint="Leave it out.",
        ) from None
