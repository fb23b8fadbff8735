"""The simulator: replay of one plan op by op, and training systems over failure traces. Imports core, host and planner."""
