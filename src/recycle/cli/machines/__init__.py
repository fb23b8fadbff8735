"""Commands for a job on several machines (`coordinator`, `agent`, `worker`, `slurm`), and how machines describe their job."""
