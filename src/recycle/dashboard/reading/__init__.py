"""Records that grow: `RecordTail` reads new lines, `RunReader` keeps what a page needs of them. Imports core and report."""
