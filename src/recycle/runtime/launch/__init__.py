"""Processes on this machine: the local launcher, and the fork server with torch preloaded. Imports all of runtime."""
