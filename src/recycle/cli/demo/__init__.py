"""`recycle demo`: the twin runs, the texts, and the worked example of the paper."""
