"""A sweep as one Slurm array, of which no job is lost: ``hydra/launcher=submitit_slurm``."""
