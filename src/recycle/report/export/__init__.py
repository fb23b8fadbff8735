"""Plans and records in formats of other programs: Perfetto, torch.distributed.pipelining, Prometheus. Imports core."""
