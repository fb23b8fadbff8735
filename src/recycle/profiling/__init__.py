"""A profile of a real model, measured with all workers of the cluster at work at once. Imports core, host, runtime."""
