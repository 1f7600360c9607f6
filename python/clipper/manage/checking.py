"""Checks of a configuration: what a server would refuse, found without starting one."""

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from clipper.config import Config
from clipper.deploy.packages.artifact import artifact_of, is_data
from clipper.deploy.packages.package import check_found, pack
from clipper.deploy.packages.pulling import url_of
from clipper.errors import ClipperError, ConfigError, UnknownModel, did_you_mean
from clipper.frontend.auth.credential_files import CredentialFiles, tls_of_listeners
from clipper.frontend.http.listeners import bind_listener
from clipper.frontend.influx_push import InfluxPush
from clipper.frontend.tracing.exporter import SpanExporter
from clipper.frontend.tracing.spans import Batch
from clipper.manage.declared import declared, declared_model
from clipper.manage.model_record import input_of
from clipper.manage.running import running
from clipper.metrics import TlsCounts
from clipper.metrics.samples import Samples
from clipper.selection import create_policy, default_policy, with_coverage
from clipper.serving.models.address import listen
from clipper.serving.query.missing_outputs import check_missing
from clipper.serving.query.speculation import check_decider, check_times
from clipper.serving.rollout.roles import check_roles
from clipper.settings.grpc import own_address
from clipper.settings.params import shard_tls, with_absolute_paths
from clipper.settings.tracing import export_settings
from clipper.spec.application import ApplicationSpec, roles_of
from clipper.spec.model import ModelSpec
from clipper.store import check_kind
from clipper.tls import Certificate
from clipper.types import VERSION, VersionedModel


def check_declared(config: Config, folder: str = "") -> list[str]:
    """Check the models and applications that a file declares as a server does when it starts: files
    and modules, policies, deciders, links, roles. folder: of the file.

    Returns notes on what only the server can know. Raises: ClipperError that names the model or
    application, and the line.
    """
    notes: list[str] = []
    for name, model in config.models.items():
        with declared(config, "models", name):
            _check_model(name, model, config.server.no_pickle, folder)
    for name, app in config.apps.items():
        with declared(config, "apps", name):
            notes += _check_application(name, app, config)
    return notes


def check_start(config: Config) -> list[str]:
    """Check what a server of this configuration needs of this host: its addresses are free, and the
    certificates, keys and tokens that it names can be read.

    Returns notes: addresses that a running server of the same file has are not tried. Raises
    ConfigError, AddressInUse, with the line.
    """
    http, grpc = config.http, config.grpc
    with _named(config, "server.state"):
        check_kind(config.server.state)
    _check_exports(config)
    counts = {listener: TlsCounts(listener) for listener in tls_of_listeners(http, grpc)}
    CredentialFiles().read(http, grpc, counts)
    with _named(config, "params.tls_cert"):
        files = shard_tls(with_absolute_paths(config.params))
        if files is not None:
            Certificate(files, "params.tls")
    own = [one for one in running() if config.file and one.file == config.file]
    if own:
        return [f"the addresses were not tried: a server of this file runs, process {own[0].pid}"]
    with contextlib.ExitStack() as bound:
        for setting, address in (
            ("http.address", http.address),
            ("http.admin", http.admin),
            ("grpc.address", own_address(grpc, http)),
        ):
            if address and setting not in config.may_move:
                with _named(config, setting):
                    bound.enter_context(bind_listener(setting, address, http.backlog))
    with _named(config, "server.address"), tempfile.TemporaryDirectory() as place:
        listener = listen(config.server.address, Path(place))
        os.close(listener.fd)
        listener.remove()
    return []


def _no_batches(ids: Iterable[int]) -> Mapping[int, Batch]:
    """Return no batch: no span is made."""
    return {}


def _check_exports(config: Config) -> None:
    """Check the addresses to which spans and metrics are sent. Raises ConfigError."""
    with _named(config, "tracing.endpoint"):
        try:
            spans = export_settings(config.tracing, os.environ)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if spans.url:
            SpanExporter(config.tracing, spans, VERSION, _no_batches)
    if config.influx.url:
        with _named(config, "influx.url"):
            InfluxPush(config.influx, Samples, VERSION)


@contextlib.contextmanager
def _named(config: Config, setting: str) -> Iterator[None]:
    """Add to errors where a setting is given."""
    try:
        yield
    except ClipperError as error:
        if where := config.origins.get(setting):
            error.args = (f"{where}: {error.message}", *error.args[1:])
        raise


def _check_model(name: str, wanted: ModelSpec, no_pickle: bool, folder: str) -> None:
    input_of(wanted)
    thing = declared_model(name, wanted)
    if not isinstance(thing, str) or not thing or url_of(thing):
        return
    if is_data(thing):
        artifact_of(thing)
        return
    with tempfile.TemporaryDirectory(prefix="clipper-check-") as place:
        pack(thing, name, wanted.version or 1, place, wanted.code, no_pickle)
    elsewhere = wanted.requirements or wanted.python or wanted.deployer not in ("", "process")
    if not elsewhere:
        check_found(thing, wanted.code, folder)


def _check_application(name: str, app: ApplicationSpec, config: Config) -> list[str]:
    links = [VersionedModel.parse(link) for link in app.models]
    roles = roles_of(app.roles)
    create_policy(with_coverage(app.policy or default_policy(links, roles), app.coverage))
    check_missing(app.missing)
    if roles:
        check_roles(name, links, roles)
    check_times(name, check_decider(name, app.decider, links), app.slo_ms)
    unknown = [link for link in links if link.name not in config.models]
    if not unknown or config.mesh.enabled:
        return []
    if config.server.state in ("", "memory"):
        wanted = unknown[0].name
        raise UnknownModel(
            f"no model {wanted!r} is declared{did_you_mean(wanted, config.models) or '.'}",
            hint=f"Declare it, [models.{wanted}], or keep a state that has it (server.state).",
        )
    return [
        f"application {name!r} links {link.name!r}, which is not declared here: it must be in the"
        " state of the server"
        for link in unknown
    ]
