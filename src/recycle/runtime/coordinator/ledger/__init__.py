"""The ledger of a run: worker reports become events of the record and a summary; lost work; the run folder."""
