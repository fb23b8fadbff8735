"""The control plane: membership, epochs and recovery (`decide`), and the connections between coordinator and workers (`net`)."""
