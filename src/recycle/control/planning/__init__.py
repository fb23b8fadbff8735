"""Plans for a running job, made ahead in a process of their own. Imports core and host."""
