"""`recycle demo`: its scenario, its texts, and the worked example of the paper."""
