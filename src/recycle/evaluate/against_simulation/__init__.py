"""A run beside a simulation of it: its plans, its epochs as they went, its epochs as the simulator predicts them."""
