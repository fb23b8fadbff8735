"""The whole control plane under one virtual clock: service, coordinator, ledger, journal, run folder, workers, and connections.

Only what waits is replaced: sockets, threads, processes, the planner and the clock. Messages and the work of background threads
are late by chance, connections break, processes are killed, hang and wake up, the coordinator stalls or is replaced.
A seed decides everything, so that a schedule that fails replays exactly:

    python -m tests.chaos.control_plane --first 4711 --num 1      replay one
    python -m tests.chaos.control_plane --num 100000              many of them, in all processors

In the end nothing more fails, and enough workers are there: then the job must be done. Its record must have every step once,
its checkpoints what their names say, and nobody may have trained in two epochs at once.
"""
