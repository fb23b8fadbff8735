"""What a run did: worker reports in, events of the record and a summary out; lost work; the folder of the run."""
