"""What `mpidp bench` measures and how: cases, exact inputs, timing, reports.

`driver.measure` runs a sweep on any communicator with the API of `mpidp.Communicator`; the modules
below it need no MPI and are tested without.
"""
