"""The control plane: membership, epochs and recovery (`decide`), where the journal and the leader are kept (`store`), and the
connections between coordinator and workers (`net`).
"""
