"""Cores of no worker in particular, which are as even after each request as a test says."""


class DriftingCores:
    def __init__(self, *evenness):
        self.left = list(evenness)

    def choose(self, num_workers):
        return ()

    def evenness(self):
        return self.left.pop(0)
