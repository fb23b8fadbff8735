"""Results of a measured cluster: a plan for each variant, tables, a chart, a page. Imports planner, sim and report as well."""
