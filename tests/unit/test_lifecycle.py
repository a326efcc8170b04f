"""What is checked before the extension is used."""

import pytest

from mpidp.errors import BuildMismatchError
from mpidp.lifecycle import check_build, first_line

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: some day\n\0"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI built somewhere"


@pytest.mark.parametrize(
    ("library", "built_against", "vendor"),
    [
        (MPICH, "MPICH 5.0.2", "MPICH"),
        (OPEN_MPI, "Open MPI 5.0.11", "Open MPI"),
        ("Intel(R) MPI Library 2021.18", "MPICH 5.0.2", "Intel MPI"),
        (MPICH, "Intel MPI 2021.18", "MPICH"),
    ],
)
def test_matching_builds_pass(library, built_against, vendor):
    check_build(library, library, built_against, vendor)
    # Some libraries pad the text, and the two readers trim it differently.
    check_build(library, library + "\n\0", built_against, vendor)


def test_two_libraries_in_one_process_are_refused():
    with pytest.raises(BuildMismatchError, match=r"MPICH Version: 5\.0\.2 and mpi4py on Open MPI"):
        check_build(MPICH, OPEN_MPI, "MPICH 5.0.2", "Open MPI")


def test_another_vendors_header_is_refused_with_advice():
    with pytest.raises(BuildMismatchError, match=r"built against Open MPI 4\.1.*MPICC"):
        check_build(MPICH, MPICH, "Open MPI 4.1", "MPICH")


def test_first_line():
    assert first_line(MPICH) == "MPICH Version: 5.0.2"
    assert first_line("\0") == "an unknown MPI"
