"""Plans and records as numbers, tables, pictures and exported formats. Imports core."""
