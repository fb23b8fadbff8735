"""Plans and records in formats of other programs: Perfetto and torch.distributed.pipelining. Imports core."""
