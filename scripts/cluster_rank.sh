#!/bin/sh
# cluster_rank.sh COMMAND...: runs COMMAND as one rank on an emulated host. All hosts share one
# kernel, so the node is named by the host's number, which cluster_enter.sh put in its name.
MPIDP_NODE_ID=$(uname -n)
export MPIDP_NODE_ID="${MPIDP_NODE_ID#host}"
exec "$@"
