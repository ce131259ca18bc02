#!/bin/bash
#SBATCH --job-name=saccade --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8
#SBATCH --signal=B:TERM@300 --requeue
# sbatch examples/slurm.sh run.yaml run.name=two-machines
# REPLICAS=4 sbatch …: so many of the GPUs generate, the others train.
# The run itself is on the first machine, beside its ranks. It saves before the time is up, and goes on when it is requeued.
SACCADE_TOKEN=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
export SACCADE_TOKEN SACCADE_PORT=$((28400 + ${SLURM_JOB_ID:-0} % 1000))  # jobs may share a machine
gpus=("run.gpus=$((SLURM_NTASKS - ${REPLICAS:-0}))" "rollout.replicas=${REPLICAS:-0}")
saccade rl "$@" "${gpus[@]}" run.launcher=join run.resume=auto & run=$!
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # which srun does not take from sbatch
trap 'kill -TERM $run' TERM
# A process that dies is started again: for a replica that died, or all of them with run.restarts=3.
# shellcheck disable=SC2016
srun bash -c 'until saccade rank "$0"; do sleep 1; done' "$(hostname):$SACCADE_PORT" & ranks=$!
wait $run
wait $run  # the first ends with a signal, too
code=$?
kill $ranks 2>/dev/null  # where the run could not begin, nobody answers them
exit $code
