"""Commands of the simulator: `simulate`, `replay`, `reproduce`, `trace`."""
