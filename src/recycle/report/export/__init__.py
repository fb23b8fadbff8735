"""Plans and records as files for Perfetto and torch.distributed.pipelining. Imports core and report.{timeline,record,render}."""
