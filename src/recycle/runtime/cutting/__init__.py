"""Models become stages: any `nn.Sequential`, and causal language models that are found by their structure.

Imports core, torch, and of runtime boundary, compute and checkpoint.
"""
