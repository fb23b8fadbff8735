"""The functions of `import recycle` that connect packages: planner, runtime and live view. It may import all others."""
