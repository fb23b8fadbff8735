"""Jobs on engines that place processes on machines: Ray, Slurm, Kubernetes. Each has a file of its own, imported only if used."""
