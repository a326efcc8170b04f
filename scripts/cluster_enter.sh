#!/bin/sh
# In place of ssh for mpiexec: cluster_enter.sh [OPTION...] HOST COMMAND... runs COMMAND on an
# emulated host, that is in its network namespace and under its own host name.
# MPIDP_CLUSTER_PREFIX is the prefix of the namespaces; HOST is the address 10.99.0.(k + 1).
while [ "${1#-}" != "$1" ]; do shift; done
k=$((${1##*.} - 1))
shift
# Once in the namespace, $0 is the new host name and $1 the command line.
# shellcheck disable=SC2016
exec ip netns exec "$MPIDP_CLUSTER_PREFIX$k" unshare --uts \
  sh -c 'hostname "$0" && exec sh -c "$1"' "host$k" "$*"
