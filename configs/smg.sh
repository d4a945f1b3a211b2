#!/bin/sh
# smg 1.13 in front of engines that run with the plugin:
#
#   sh configs/smg.sh POLICY http://engine-1:30001 http://engine-2:30002
#
# HOST and PORT are its own address, PYTHON the interpreter that has it, SMG_ARGS whatever else it is to be told.
set -eu
[ $# -ge 2 ] || { echo "usage: $0 manual|consistent_hashing|sticky|round_robin ENGINE_URL..." >&2; exit 2; }
policy=$1
shift
case $policy in
    # A session keeps its engine by a table; it goes to another one while that is down, and back afterwards.
    manual) set -- "$@" --policy manual --assignment-mode min_load ;;
    # A session keeps its engine by a hash: no table, so that several routers agree.
    consistent_hashing) set -- "$@" --policy consistent_hashing ;;
    # New sessions go where load is least, and stay there.
    sticky) set -- "$@" --policy power_of_two --sticky-sessions ;;
    # Every turn goes elsewhere; its KV comes after it.
    round_robin) set -- "$@" --policy round_robin ;;
    *) echo "$0: no policy $policy" >&2; exit 2 ;;
esac
# The plugin's routes are among what --enable-rl relays, so only a trainer may reach this address.
# shellcheck disable=SC2086
exec "${PYTHON:-python3}" -m smg.launch_router --host "${HOST:-127.0.0.1}" --port "${PORT:-30000}" \
    --enable-rl --health-check-interval-secs 5 ${SMG_ARGS:-} --worker-urls "$@"
