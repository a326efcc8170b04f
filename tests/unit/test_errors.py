"""The exception tree: who is whose child, and that `ranks` survives."""

import pickle

import pytest

import mpidp
from mpidp import errors

TREE = {
    errors.InvalidBufferError: ValueError,
    errors.InvalidArgumentError: ValueError,
    errors.MismatchError: Exception,
    errors.CollectiveTimeoutError: TimeoutError,
    errors.RankFailedError: Exception,
    errors.ClosedError: Exception,
    errors.MpiError: Exception,
    errors.CudaError: Exception,
    errors.BuildMismatchError: ImportError,
}


@pytest.mark.parametrize(("kind", "builtin"), TREE.items(), ids=lambda k: k.__name__)
def test_error_is_an_mpidp_error_and_its_builtin(kind, builtin):
    assert issubclass(kind, errors.MpidpError)
    assert issubclass(kind, builtin)
    assert getattr(mpidp, kind.__name__) is kind


@pytest.mark.parametrize("kind", TREE, ids=lambda k: k.__name__)
def test_ranks_are_empty_settable_and_pickled(kind):
    error = kind("what happened")
    assert error.ranks == []
    assert str(error) == "what happened"
    error.ranks = [1, 3]
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), copy.ranks) == ("what happened", [1, 3])


def test_ranks_of_one_error_are_not_those_of_another():
    first, second = errors.MismatchError("a"), errors.MismatchError("b")
    first.ranks.append(2)
    assert second.ranks == []
