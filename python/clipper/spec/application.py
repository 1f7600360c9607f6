"""The specification of an application: its settings, each declared once."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from clipper.errors import InvalidInput
from clipper.spec.field import field
from clipper.types import UserValue, VersionedModel

Links = str | VersionedModel | Sequence[str | VersionedModel]


class ApplicationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An application as it is asked for: `[apps.NAME]` of a file, the body of a change, the
    keywords of ClipperServer.app(). What is stored is `clipper.types.Application`; a change leaves
    what it does not state as it is."""

    models: Annotated[
        tuple[str, ...],
        field(
            "candidate models: `svm` (the latest version) or `svm:3`",
            python="Links | None",
            names={"command": "--model"},
        ),
    ] = ()
    slo_ms: Annotated[
        float,
        field(
            "time from a query to its answer; then the default is returned",
            "ms",
            ge=0.001,
            le=86_400_000,
        ),
    ] = 20.0
    default: Annotated[
        UserValue,
        field("answer when no prediction arrives in time: a number, a text, or a list of them"),
    ] = None
    input: Annotated[
        str,
        field(
            "type of one input, as `f64[64]`; empty: that of the first model",
            python="str | InputType",
        ),
    ] = ""
    policy: Annotated[
        str,
        field(
            "selection policy, as `squarecb`, `exp3(eta=0.05)` or `package.module:Class`; empty:"
            " `mixture` for several models, `ensemble` for one"
        ),
    ] = ""
    confidence_min: Annotated[
        float, field("confidence below which the default is returned", "share", ge=0, le=1)
    ] = 0.0
    roles: Annotated[
        dict[str, str],
        field(
            "roles of models that are not primaries, by model: `shadow`, `canary`,"
            " `challenger(share=0.1)`, or `decoy` of what is none; also as lines `svm:2 = shadow`",
            wire=dict[str, str] | tuple[str, ...],
            python="Mapping[str, str] | Sequence[str] | None",
            names={"command": "--role"},
        ),
    ] = {}
    missing: Annotated[
        Literal["mean", "skip"],
        field("a number that is missing at the deadline: its model's `mean`, or left out (`skip`)"),
    ] = "mean"
    decider: Annotated[
        str, field("rule that decides when to answer, as `majority within 12 ms, else floor(fast)`")
    ] = "all"
    coverage: Annotated[
        float | None,
        field(
            "share of answers whose set of labels, or interval, contains the truth",
            "share",
            ge=0.5,
            le=0.999,
        ),
    ] = None
    context_table: Annotated[
        str,
        field(
            "parameter table (server.params) whose row of the user is the context of a query"
            " without one; empty: none"
        ),
    ] = ""
    output: Annotated[
        str,
        field(
            "of models with named outputs the one that the policy combines; empty: all",
            names={"command": "--output-tensor"},
        ),
    ] = ""
    priority: Annotated[
        int,
        field(
            "priority of queries that name none, and whose key has none: 1, the highest, to 3",
            ge=1,
            le=3,
        ),
    ] = 2


def roles_of(stated: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """Return the roles by model, also of lines such as `svm:2 = shadow`. Raises InvalidInput for
    a line of another form."""
    if isinstance(stated, Mapping):
        return dict(stated)
    lines = [stated] if isinstance(stated, str) else stated
    found = {}
    for line in lines:
        model, equals, role = str(line).partition("=")
        if not (equals and model.strip() and role.strip()):
            raise InvalidInput(f"{line[:100]!r}: write 'MODEL = ROLE', as 'svm:2 = shadow'.")
        found[model.strip()] = role.strip()
    return found
