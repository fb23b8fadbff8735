"""Plans and records as numbers, tables, pictures and exported formats. Imports core.

Order of the sub-packages: timeline, record, render, then figures and export; each imports only those before it.
"""
