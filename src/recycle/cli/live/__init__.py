"""The live view of a training run on a terminal: events to state, state to a grid."""
