"""The fields of a model's record, made from what a person states of it: checks and defaults, for
each deployment and for its dry run."""

from collections.abc import Mapping, Sequence
from typing import cast

from clipper.config import Config, merge_batching
from clipper.deploy.declared_variables import declared_variables
from clipper.deploy.deployers import placing
from clipper.deploy.packages.artifact import trusting
from clipper.deploy.packages.environments import lines_of
from clipper.deploy.packages.pulling import url_of
from clipper.deploy.processes.command import check_combination, warmup_variable
from clipper.deploy.warmup import warmup_of
from clipper.errors import InvalidInput
from clipper.options import types_of
from clipper.serving.models.batch_cost import check_batching, storable
from clipper.serving.models.reads import declaration_of
from clipper.serving.models.scaling import replica_bounds
from clipper.serving.query.model_calls import parse_target
from clipper.spec.field import specified
from clipper.spec.keywords import ModelKeywords
from clipper.spec.model import ModelSpec
from clipper.types import CONCURRENCY_DEFAULT, CONCURRENCY_MAX, InputType, UserValue


def model_spec(name: str, keywords: ModelKeywords) -> ModelSpec:
    """Return the specification that keywords of Python state: functions are replaced by names,
    files of requirements by their lines, and types by their texts.

    `command` is left out: what runs is not part of it. Raises InvalidInput.
    """
    given = {key: value for key, value in keywords.items() if value is not None}
    given.pop("command", None)
    input_type, output_type = types_of(
        keywords.get("input") or None,
        keywords.get("output") or "any",
        keywords.get("inputs"),
        keywords.get("outputs"),
        keywords.get("schema") or None,
    )
    for replaced in ("inputs", "outputs", "schema"):
        given.pop(replaced, None)
    given["input"] = str(InputType.parse(input_type)) if input_type else ""
    given["output"] = str(InputType.parse(output_type))
    code = keywords.get("code", ())
    given["code"] = (code,) if isinstance(code, str) else tuple(code)
    given["requirements"] = lines_of(keywords.get("requirements", ()))
    given["batching"] = storable(keywords.get("batching"))
    if isinstance(given.get("similar"), Mapping):
        given["similar"] = specified(ModelSpec, {"similar": given["similar"]}, "python").similar
    if "reads" in given:
        given["reads"] = declaration_of(name, given["reads"])
    return ModelSpec(**cast("dict[str, UserValue]", given))


def to_run(thing: object, spec: ModelSpec) -> object:
    """Return what a deployment runs: a URL with the SHA-256 that its content must have, a .skops
    file with the types that it may use, or `thing` as it is.

    Raises PullFailed for a URL that cannot be pulled, InvalidInput for what is neither.
    """
    found = url_of(thing, spec.sha256) or thing
    return trusting(found, spec.trusted) if spec.trusted else found


def input_of(spec: ModelSpec) -> str:
    """Return the type of one input that a specification states; empty if it states none.

    Raises InvalidInput when two fields state the same.
    """
    found, _ = _types(spec)
    return str(InputType.parse(found)) if found else ""


def record_fields(
    name: str, spec: ModelSpec, config: Config, *, is_program: bool = False
) -> dict[str, UserValue]:
    """Return the fields of a model's record that its specification states, with the defaults of the
    server; the input is left out, since it may come from the model.

    is_program: whether a command is the container. Raises InvalidInput, ConfigError.
    """
    _, output = _types(spec)
    warmup = warmup_of(name, config.server.warmup if spec.warmup is None else spec.warmup)
    deployer = spec.deployer or config.server.deployer
    if is_program:
        check_combination(
            name,
            {
                "row_by_row": spec.row_by_row,
                "max_concurrency": spec.max_concurrency != CONCURRENCY_DEFAULT,
                "calls": spec.calls,
                "requirements": spec.requirements,
                "python": spec.python,
                "code": spec.code,
                "tables": spec.tables,
                "deployer": spec.deployer not in ("", "process"),
            },
        )
        deployer = "process"
        warmup_variable(warmup, input_of(spec) or "any", name)
    least, most = replica_bounds(name, spec.bounds, config.limits.replicas_max)
    batching = merge_batching(config.batching, spec.batching)
    return {
        "output": str(InputType.parse(output)),
        "replicas": least,
        "replicas_max": most,
        "batching": check_batching(f"model {name!r}", batching),
        "cache": spec.cache,
        "similar": spec.similar,
        "finite": spec.finite,
        "retry_singly": spec.retry_singly,
        "row_by_row": spec.row_by_row,
        "max_concurrency": _concurrency(name, spec.max_concurrency),
        "calls": _calls(spec.calls),
        "warmup": warmup,
        "requirements": lines_of(spec.requirements),
        "python": spec.python,
        "env": declared_variables(name, spec.env),
        "tables": dict(spec.tables),
        "reads": declaration_of(name, spec.reads) if spec.reads else {},
        "tolerance": float(spec.tolerance),
        **placing(deployer, spec.memory_mib, spec.cpus, spec.gpus),
    }


def _calls(targets: Sequence[str]) -> tuple[str, ...]:
    """Return what a model may call. Raises InvalidInput."""
    for target in targets:
        parse_target(target)
    return tuple(targets)


def _concurrency(name: str, number: UserValue) -> int:
    """Return how many rows or batches a container works at. Raises InvalidInput."""
    is_number = isinstance(number, int) and not isinstance(number, bool)
    if not is_number or not 1 <= number <= CONCURRENCY_MAX:
        raise InvalidInput(
            f"model {name!r}: max_concurrency={number!r:.100}: a number from 1 to"
            f" {CONCURRENCY_MAX}."
        )
    return int(number)


def _types(
    spec: ModelSpec,
) -> tuple[str | InputType | Mapping[str, str] | None, str | Mapping[str, str]]:
    return types_of(
        spec.input or None,
        spec.output or "any",
        spec.inputs or None,
        spec.outputs or None,
        spec.schema or None,
    )
