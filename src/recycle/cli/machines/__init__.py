"""Commands for a job on several machines: `coordinator`, `agent`, `worker`, `kubernetes`; the job as machines describe it."""
