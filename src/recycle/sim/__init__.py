"""Plan and trace in, record out, without a process or a GPU: what a cluster would do, op by op or day by day."""
