"""Commands for a job on several machines (`coordinator`, `agent`, `worker`), and for the engines that start them."""
