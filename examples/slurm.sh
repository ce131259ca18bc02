#!/bin/bash
#SBATCH --job-name=saccade --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8
# sbatch examples/slurm.sh run.yaml run.name=two-machines
# The run itself is on the first machine, beside its ranks. Jobs that share a machine need different ports.
export SACCADE_TOKEN=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
export SACCADE_PORT=$((28400 + ${SLURM_JOB_ID:-0} % 1000))
saccade rl "$@" run.gpus="$SLURM_NTASKS" run.launcher=join &
run=$!
srun saccade rank "$(hostname):$SACCADE_PORT" &
wait $run
code=$?
kill %2 2>/dev/null  # where the run could not begin, nobody answers the ranks
exit $code
