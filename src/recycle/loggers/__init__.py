"""Loggers: callbacks that write a run to TensorBoard, Weights & Biases, MLflow or a CSV file, each if it is installed."""
