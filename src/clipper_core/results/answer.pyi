from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, final

from clipper.types import Qualifiers, UserValue, VersionedModel

@final
class Answer:
    """Answer to one query. Immutable. Threads: any."""

    __match_args__: ClassVar[tuple[str, ...]]
    __dataclass_fields__: ClassVar[dict[str, Any]]
    def __init__(
        self,
        output: UserValue,
        confidence: float = 1.0,
        is_default: bool = False,
        reason: str = "",
        models: tuple[VersionedModel, ...] = (),
        missing: tuple[VersionedModel, ...] = (),
        latency_us: int = 0,
        id: str = "",
        agreement: float = 1.0,
        decided_by: str = "all",
        set: tuple[UserValue, ...] = (),
        request_id: str = "",
        qualifiers: dict[VersionedModel, Qualifiers] | None = None,
    ) -> None: ...
    @property
    def output(self) -> UserValue: ...
    @property
    def confidence(self) -> float: ...
    @property
    def is_default(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    @property
    def models(self) -> tuple[VersionedModel, ...]: ...
    @property
    def missing(self) -> tuple[VersionedModel, ...]: ...
    @property
    def latency_us(self) -> int: ...
    @property
    def id(self) -> str: ...
    @property
    def agreement(self) -> float: ...
    @property
    def decided_by(self) -> str: ...
    @property
    def set(self) -> tuple[UserValue, ...]: ...
    @property
    def request_id(self) -> str: ...
    @property
    def qualifiers(self) -> dict[VersionedModel, Qualifiers]: ...
    def __copy__(self) -> Self: ...
    def __replace__(self, **changes: Any) -> Self: ...

def answer_of(
    output: UserValue,
    combined: object,
    reason: str,
    missing: Sequence[VersionedModel],
    latency_us: int,
    node: str,
    number: int,
    decided_by: str,
    request_id: str,
    arrived: Mapping[VersionedModel, Any],
) -> Answer: ...

NUMBER_OF: object  # for `AnswerWindow(numbers=)`
