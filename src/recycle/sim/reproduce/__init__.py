"""The experiments of the paper's evaluation, one a file, each with its assumptions and the published numbers beside ours."""
