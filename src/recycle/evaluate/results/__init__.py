"""What a measured cluster came to: a plan for each variant, tables, a chart, a page. Imports planner, sim and report as well."""
