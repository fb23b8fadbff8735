"""The links of a worker to others: whether they are there, how long their messages take, and delays on purpose."""
