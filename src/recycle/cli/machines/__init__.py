"""Commands for a job on several machines: `coordinator`, `agent`, `worker`; how machines describe their job to each other."""
