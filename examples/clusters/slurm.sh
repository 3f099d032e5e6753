#!/bin/bash
# Your own script on two nodes of a SLURM cluster: sbatch examples/clusters/slurm.sh main.py --epochs=3
# (./submit_job.sh submits Duet's own training, with requeue and resume.) Run it in the folder of your script.
#SBATCH --job-name=duet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=%x_%j.log
# TERM reaches the launchers two minutes before the limit, so that the script can save
#SBATCH --signal=TERM@120

DUET=${DUET:-$HOME/duet/duet} # or `duet` of an installed package

# One launcher on each node starts one rank for each GPU; it finds the nodes and the first address in the step's variables.
srun --kill-on-bad-exit=0 "$DUET" run -n "${SLURM_GPUS_ON_NODE:-1}" "$@"
