"""Process services: the lifetime of child processes, scratch folders, process pools. Imports core."""
