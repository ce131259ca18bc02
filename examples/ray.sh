#!/bin/bash
# NODES="node-2 node-3" bash examples/ray.sh run.yaml run.gpus=16 rollout.replicas=8
# Ray on this machine and, by ssh, on NODES, then the run, then their end. All see this folder under the same path.
# On a cluster that is there already, `saccade rl run.yaml run.gpus=16 run.launcher=ray` is enough.
address=$(hostname -i | cut -d' ' -f1):${RAY_PORT:-6379}
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')}
RAY_TMPDIR=$(mktemp -d /tmp/ray-XXXXXX)  # else others would look for this cluster when it has gone
export RAY_TMPDIR
start="$(command -v ray) start --block --disable-usage-stats"
$start --head --port="${address##*:}" --include-dashboard=false & started=$!
trap 'kill $started; wait $started; rm -rf "$RAY_TMPDIR"' EXIT
export RAY_ADDRESS=$address  # not that of another cluster on this machine
until (: < "/dev/tcp/${address%:*}/${address##*:}") 2>/dev/null; do kill -0 "$started" || exit 1; sleep 1; done
for node in $NODES; do
  ssh "$node" bash -s <<< "cd '$PWD' && RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$RAY_AUTH_TOKEN exec $start --address=$address" &
  started="$started $!"
done
saccade rl "$@" run.launcher=ray run.resume=auto
