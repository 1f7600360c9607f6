"""Every error has its status of HTTP and gRPC, and takes one string, as the core calls it."""

import concurrent.futures
import copy
import inspect
import pickle

import pytest

from clipper import errors
from clipper.errors import ClipperError, Overloaded, UnknownModel, UnknownVersion, did_you_mean

TREE = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, ClipperError)
]
GRPC_CODES = {
    "CANCELLED",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "INTERNAL",
    "UNAVAILABLE",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
}


@pytest.mark.parametrize("kind", TREE)
def test_each_error_is_complete(kind: type[ClipperError]) -> None:
    error = kind("model 'svm' is gone.")
    assert 400 <= error.rest_status <= 599
    assert error.grpc_code in GRPC_CODES
    assert str(error) == error.message == "model 'svm' is gone."
    assert error.hint == ""
    assert kind.__doc__
    assert kind is ClipperError or kind.__doc__ != ClipperError.__doc__


@pytest.mark.parametrize("kind", TREE)
def test_errors_survive_copying_and_pickling(kind: type[ClipperError]) -> None:
    error = kind("what", hint="Do this.")
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is kind
        assert (str(again), again.hint, again.__dict__) == (
            "what Do this.",
            "Do this.",
            error.__dict__,
        )


def test_problem_types_are_unique() -> None:
    named = [kind for kind in TREE if kind is not ClipperError]
    assert len({kind.slug for kind in named}) == len(named)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("InvalidInput", 400),
        ("TooLarge", 413),
        ("UnknownModel", 404),
        ("UnknownApplication", 404),
        ("UnknownVersion", 404),
        ("AlreadyExists", 409),
        ("TypeConflict", 409),
        ("Overloaded", 429),
        ("DeadlineExceeded", 504),
        ("NoReplica", 503),
        ("ReplicaLost", 503),
        ("ModelFailed", 500),
        ("BadOutput", 500),
        ("Cancelled", 499),
        ("ShuttingDown", 503),
        ("ForkedProcess", 500),
        ("ConfigError", 400),
        ("FrameError", 400),
        ("StoreError", 503),
        ("StoreConflict", 409),
        ("LeaseLost", 409),
        ("DeployFailed", 500),
        ("PackagingError", 400),
    ],
)
def test_rest_statuses(kind: str, status: int) -> None:
    assert getattr(errors, kind).rest_status == status


def test_the_builtin_that_a_user_would_catch() -> None:
    assert issubclass(errors.DeadlineExceeded, TimeoutError)
    assert issubclass(errors.InvalidInput, ValueError)
    assert issubclass(errors.UnknownModel, LookupError)
    assert issubclass(errors.AddressInUse, OSError)
    assert issubclass(errors.Cancelled, concurrent.futures.CancelledError)
    assert issubclass(errors.ReplicaLost, ConnectionError)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    assert (
        str(UnknownModel.named("svn", ["svm", "logreg"]))
        == "no model 'svn' - did you mean 'svm'? Loaded: logreg, svm."
    )
    assert str(UnknownModel.named("zzz", ["svm"])) == "no model 'zzz'. Loaded: svm."
    assert str(UnknownModel.named("zzz", [])) == "no model 'zzz'. Loaded: none yet."
    many = str(UnknownVersion.named("m:99", [f"m:{i}" for i in range(10, 60)]))
    assert many.endswith("m:29 and 30 more.")


def test_did_you_mean_stays_silent_when_nothing_is_close() -> None:
    assert did_you_mean("slo", ["slo_ms", "models"]) == " - did you mean 'slo_ms'?"
    assert did_you_mean("SVM", ["svm"]) == " - did you mean 'svm'?"
    assert did_you_mean("qqq", ["slo_ms"]) == ""
    assert did_you_mean("qqq", []) == ""


def test_overload_names_a_time_to_retry() -> None:
    assert Overloaded("full").retry_after_s == 1.0
    assert Overloaded("full", retry_after_s=0.25).retry_after_s == 0.25


def test_a_failed_model_carries_the_users_traceback() -> None:
    trace = 'Traceback (most recent call last):\n  File "mine.py", line 3, in predict\nKeyError: 7'
    assert errors.ModelFailed(f"model 'svm:1' raised KeyError: 7\n{trace}").traceback == trace
    assert errors.ModelFailed("model 'svm:1' raised", traceback="T").traceback == "T"
    assert errors.ModelFailed("model 'svm:1' raised").traceback == ""
